"""How long until the console shows itself, and until it is left: seconds from exec to the first painted screen.

The host is one that does not answer (a socket that accepts and says nothing), so no network helps.

usage: python tests/bench/first_paint.py [RUNS]        prints JSON
"""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

LAYERTAP = Path(sys.executable).with_name("layertap")
SIZE = (40, 120)


def once(folder: Path, port: int) -> tuple[float, float]:
    """Seconds to the first screen, and from the key to the end."""
    import fcntl
    import struct
    import termios

    config = folder / "layertap.toml"
    (folder / "ssh_config").write_text(f"Host silent\n  HostName 127.0.0.1\n  Port {port}\n")
    config.write_text(f'[host.silent]\nssh_config = "{folder}/ssh_config"\n')
    begun = time.monotonic()
    pid, master = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(LAYERTAP, [str(LAYERTAP), "--host", "silent", "--config", str(config)])
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
    seen = read_until(master, b"Layertap")
    painted = time.monotonic() - begun
    assert b"connecting" in seen or b"connecting" in read_until(master, b"connecting")
    pressed = time.monotonic()
    os.write(master, b"\x11")  # ctrl+q
    while select.select([master], [], [], 30)[0]:
        try:
            if not os.read(master, 1 << 16):
                break
        except OSError:
            break
    os.waitpid(pid, 0)
    return painted, time.monotonic() - pressed


def read_until(master: int, text: bytes) -> bytes:
    """What came up to and with `text`."""
    seen = b""
    while text not in seen:
        assert select.select([master], [], [], 30)[0], f"{text!r} never came: {seen[-500:]!r}"
        seen += os.read(master, 1 << 16)
    return seen


def main(runs: int) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as silent:
        figures = [once(Path(name), silent.getsockname()[1]) for _ in range(runs)]
    painted, left = zip(*figures, strict=True)
    print(
        json.dumps(
            {
                "runs": runs,
                "first_paint_s": {"min": round(min(painted), 3), "median": round(statistics.median(painted), 3)},
                "left_s": {"min": round(min(left), 3), "median": round(statistics.median(left), 3)},
                "load": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
