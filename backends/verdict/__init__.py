"""Hung or just slow: what is seen of a server and of a run, and what that comes to."""
