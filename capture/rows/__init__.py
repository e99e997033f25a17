"""Rows: what somebody wants drawn, from input files to token ids and loss mask."""
