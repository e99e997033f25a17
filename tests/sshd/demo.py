"""The demo on a host behind a real sshd, with the link cut on the way; nothing may be lost or be there twice.

usage: python tests/sshd/demo.py        (make demo-ssh)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit"), str(ROOT / "tests" / "sshd")]

from sshd import Keys, Relay, Sshd  # noqa: E402

from backends.host import Host, Reconnecting  # noqa: E402
from backends.logs import LogCursor, PartHead  # noqa: E402
from backends.ssh import SshHost  # noqa: E402

ENGINE = ROOT / ".venv-engine" / "bin" / "python"
# The link is cut whenever the demo has said one of these.
CUT_AFTER = ("launched ", "  http", "extracting: ")


class Outcome(msgspec.Struct):
    """What a demo over SSH came to."""

    line: str
    cuts: int
    log_bytes_missing: int
    samples_lost: int
    duplicated: int

    def words(self) -> str:
        return (
            f"{self.line}\nlinks cut: {self.cuts}, log bytes missing: {self.log_bytes_missing}, "
            f"samples lost: {self.samples_lost}, duplicated: {self.duplicated}"
        )


class LogReader(threading.Thread):
    """Reads the server's log over the same relay for as long as it grows."""

    def __init__(self, host: Host, path: str) -> None:
        super().__init__(daemon=True)
        self.host, self.path = host, path
        self.data = b""
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        cursor, last = LogCursor(), False
        while not last:
            last = self.over.is_set()
            while True:
                head, data = self.host.read(self.path, **cursor.asks)
                step = cursor.advance(msgspec.convert(head, PartHead), data)
                assert step.kind == "continue"
                self.data += step.data
                if not step.data:
                    break
            self.over.wait(0.2)


def run_demo(folder: Path) -> Outcome:
    """Run it with everything it leaves in `folder`. Raises AssertionError where the demo itself fails."""
    keys = folder / "keys"
    keys.mkdir(parents=True)
    sshd = Sshd(folder / "sshd", Keys(keys), {}, {})
    relay = Relay(sshd.port)
    try:
        return _run(folder, sshd, relay)
    finally:
        relay.close()
        sshd.stop()


def _run(folder: Path, sshd: Sshd, relay: Relay) -> Outcome:
    config, output = folder / "layertap.toml", folder / "layertap-demo"
    config.write_text(f'[host.gpu]\nssh_config = "{sshd.config(port=relay.port)}"\npython = "{ENGINE}"\n')
    command = Path(sys.executable).with_name("layertap")
    demo = subprocess.Popen(
        [command, "demo", output, "--host", "gpu", "--config", config],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "LAYERTAP_PYTHON"},
    )
    assert demo.stdout is not None and demo.stderr is not None
    host = Reconnecting(lambda: SshHost(sshd.target(port=relay.port), python=str(ENGINE)))
    reader: LogReader | None = None
    cuts = 0
    for line in demo.stderr:
        sys.stderr.write(line)
        if line.startswith("launched "):
            (server,) = host.request("all", kind="server")
            reader = LogReader(host, server["log"])
        if line.startswith(CUT_AFTER):
            relay.cut()
            cuts += 1
    said = demo.stdout.read()
    assert demo.wait() == 0, said
    assert reader is not None
    reader.over.set()
    reader.join(60)
    host.close()
    written = Path(reader.path).read_bytes()
    samples = [int(path.stem) for path in output.glob("native/*/*.safetensors")]
    drawn: dict[str, Any] = json.loads((output / "manifest.json").read_text())["counts"]
    return Outcome(
        line=said.strip().splitlines()[-1],
        cuts=cuts,
        log_bytes_missing=len(written) - len(reader.data) if written.startswith(reader.data) else len(written),
        samples_lost=24 - len(set(samples)),
        duplicated=sum(drawn[state] for state in ("written", "failed", "pending", "sent")) - 24,
    )


def main() -> int:
    """Run the demo and say what came of it."""
    with tempfile.TemporaryDirectory(prefix="layertap-demo-ssh-") as folder:
        outcome = run_demo(Path(folder))
    print(outcome.words())
    lost = outcome.log_bytes_missing or outcome.samples_lost or outcome.duplicated
    return 1 if lost or outcome.cuts != len(CUT_AFTER) else 0


if __name__ == "__main__":
    sys.exit(main())
