"""Widgets that more than one screen could show; they do no I/O."""
