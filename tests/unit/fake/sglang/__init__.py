"""Stands in for SGLang in tests of what runs and watches it."""
