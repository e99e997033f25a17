"""Producing the data, on the GPU host; knows no console and no link."""

import hashlib
from pathlib import Path


def code_hash() -> str:
    """Hash of the capture code in this process, 16 hex digits.

    The tap reports it and the gate compares it with the driver's own: a server that was started with other code is
    not drawn from.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
