"""Reaching a host and running things on it."""
