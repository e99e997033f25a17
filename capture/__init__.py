"""Producing the data, on the GPU host; knows no console and no link."""

import hashlib
from pathlib import Path


def code_hash() -> str:
    """Hash of the capture code in this process, 16 hex digits.

    The tap reports it and the gate compares it with the driver's own: a server that was started with other code is
    not drawn from.
    """
    digest = hashlib.blake2b(digest_size=8)
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(bytes(path.relative_to(folder)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
