"""The two doors, on the operator's machine."""

VERSION = "0.1.0"
DEFAULT_PORT = 30000
