"""The console in a browser, on the loopback address only: whoever reaches the port has the console."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path

from backends.errors import UsageError

LOOPBACK = "127.0.0.1"


def serve(port: int, words: list[str]) -> None:
    """Serve `layertap WORDS` on a port of the loopback address until Ctrl+C, a console for each page that is opened.

    Raises UsageError without the extra `web`, or where nothing can listen on that port.
    """
    try:
        from textual_serve.server import Server
    except ImportError:
        raise UsageError("--serve needs textual-serve; install layertap[web]") from None
    command = shlex.join([sys.executable, "-c", "from console.cli import main; main()", *words])
    # A page of our own: textual-serve's fetches a font from elsewhere.
    server = Server(command, host=LOOPBACK, port=port, title="Layertap", templates_path=Path(__file__).parent)
    try:
        server.serve()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = os.strerror(error.errno)
        raise UsageError(f"port {port} of {LOOPBACK}: {why}; choose another port for --serve") from error
