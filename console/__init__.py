"""The two doors, on the operator's machine."""
