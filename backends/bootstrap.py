"""The first code on a host: takes the payload from stdin unless it is there, and becomes the agent.

Its source is the argument of `python -c`, so it needs nothing but the standard library and no file on the host, and
keeps to syntax that an old Python can read, to be able to say that it is too old.

    it says   LAYERTAP need, reads the payload, and
    it says   LAYERTAP have | error <sentence>
"""

import sys

if __name__ == "__main__":  # with -c the folder one stands in comes first, and may hold a shutil.py
    sys.path[:] = [path for path in sys.path if path]

import errno
import hashlib
import io
import os
import pathlib
import shutil
import tempfile
import zipfile

GREETING = b"LAYERTAP "


def name_of(archive: bytes) -> str:
    """Hash of a payload, 16 hex digits."""
    return hashlib.blake2b(archive, digest_size=8).hexdigest()


def unpack(archive: bytes, folder: str) -> None:
    """Unpack a payload to `folder`, atomically. Raises OSError."""
    above = os.path.dirname(folder)
    os.makedirs(above, mode=0o700, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=".payload-", dir=above)
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            opened.extractall(scratch)
        os.rename(scratch, folder)
    except OSError:
        if not os.path.isdir(folder):  # else somebody else was first, with the same content
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(name: str, size: int) -> None:
    """Become the agent of payload `name`, `size` bytes long."""
    os.umask(0o077)
    if sys.version_info < (3, 11):  # noqa: UP036
        found = ".".join(map(str, sys.version_info[:2]))
        wanted = "SGLang's own Python, 3.11 or newer, is wanted: name it with --python"
        return say("error " + sys.executable + " is Python " + found + "; " + wanted)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "layertap", "payload", name)
    try:
        if not os.path.isdir(folder):
            say("need")
            archive = sys.stdin.buffer.read(size)
            if name_of(archive) != name:
                return say("error the payload arrived damaged")
            unpack(archive, folder)
    except OSError as error:
        return say("error " + not_written(error, folder, "XDG_CACHE_HOME"))
    sys.path[:0] = [os.path.join(folder, part) for part in ("host", "engine")]
    try:
        from backends.agent import Agent, serve

        agent = Agent(pathlib.Path(folder))
    except ImportError as error:
        return say("error " + sys.executable + ": " + str(error) + "; SGLang's own Python is wanted")
    except OSError as error:
        return say("error " + not_written(error, "the state folder", "XDG_STATE_HOME"))
    say("have")
    return serve(agent)


def not_written(error: OSError, folder: str, variable: str) -> str:
    """What could not be written and what to do, `variable` being where `folder` is said."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room there" if full else "let us write there"
    return (
        str(error.filename or folder) + ": " + str(error.strerror) + "; " + remedy + ", or have " + variable + " name "
        "another folder"
    )


def say(text: str) -> None:
    """One line to the console; whatever a login shell printed before it, even half a line, is skipped there."""
    sys.stdout.buffer.write(b"\n" + GREETING + text.encode(errors="backslashreplace") + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
