"""A support bundle: one file on this machine that says what a run does, and holds no secret."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import LayertapError, UsageError
from console import VERSION
from console.doctor import Wanted, examine
from console.session import Session

SECONDS = 120  # that the host may take to gather it


def seen(session: Session, run: str | None, port: int | None) -> dict[str, Any]:
    """A snapshot for a bundle: with the server that `run` is or drew from, else the newest; without a run, `port`'s.

    Raises UsageError where there is no such run, or where several servers are live and neither is given.
    """
    if run is None:
        return session.snapshot(port)
    found = session.host.request("run", run_id=run)
    own = found["id"] if found["kind"] == "server" else found["details"].get("server")
    servers = [one["id"] for one in session.host.request("all", kind="server")]
    return session.snapshot(run_id=own if own in servers else next(iter(servers), None))


def write(
    session: Session,
    picture: Mapping[str, str],
    run: str | None = None,
    output: Path | None = None,
    *,
    port: int | None = None,
) -> Path:
    """Gather a bundle of a run and write it; returns where. Without a run, of the newest server, `port`'s if given.

    `picture` is what is seen now, by file name. The host masks all of it, since it knows its secrets. Raises UsageError
    where the file cannot be written.
    """
    extra = dict(picture)
    extra["console.json"] = _json({"layertap": VERSION, "hello": session.hello, "link": session.host.state})
    try:
        extra["doctor.json"] = _json(examine(session, Wanted()))
    except LayertapError as error:
        extra["doctor.json"] = _json({"error": str(error)})
    made = session.host.request("bundle", seconds=SECONDS, run_id=run, port=port, extra=extra)
    files = {**made["files"], "masked.json": _json({"schema": 1, "masked": made["masked"]})}
    name = f"layertap-bundle-{session.hello['host']}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = output.expanduser() if output else Path.cwd() / f"{name}.tar.gz"
    try:
        _pack(path, name, files)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give another file with --output") from error
    return path


def _pack(path: Path, folder: str, files: Mapping[str, str]) -> None:
    """Write texts into a tar.gz that only its owner may read, whole or not at all."""
    scratch = path.with_name(f".{path.name}.part")
    try:
        with (
            open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as tar,
        ):
            for name, text in sorted(files.items()):
                data = text.encode()
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                tar.addfile(entry, io.BytesIO(data))
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
