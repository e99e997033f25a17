"""A server that logs, serves /health and writes tap.json as SGLang with the tap does, and misbehaves on request.

`FAKE` in the environment holds words: `no-tap`, `sick` (503), `crash`, `silent` (never ready), `no-port` (ready, but
listens nowhere), `stubborn` (ignores SIGTERM), `mute` (/server_info never answers), `spin` (uses CPU and says nothing
while it starts), `compile` (has a busy compiler below it while it starts).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from capture import code_hash
from capture.dumps import dump
from capture.layers import Layers

WORDS = os.environ.get("FAKE", "").split()
READY = "The server is fired up and ready to roll!"


def log(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def write_tap(model: str) -> None:
    folder = Path(json.loads(os.environ["LAYERTAP_TAP"])["dump_dir"])
    layers = Layers(boundaries=[3], outputs=[2], serve_ids=[3], serve_ids_elsewhere=[], asked="outputs of layers 2")
    state = dump.TapState(
        code=code_hash(),
        pid=os.getpid(),
        sglang="0.5.23",
        model=model,
        model_class="Fake",
        layers=layers,
        hidden=8,
        dtype="bfloat16",
        bytes_per_token=48,
        slots=4,
        slots_free=4,
        seen={"ours": 0, "warm_up": 1, "health": 0, "stranger": 0},
    )
    dump.write_json(folder / "tap.json", state)


def compile_for_ever() -> None:
    """Runs what the kernel takes for nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "nvcc"
        compiler.symlink_to(os.path.realpath(sys.executable))
        subprocess.run([compiler, "-S", "-c", "while True: pass"], check=False)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/server_info" and "mute" in WORDS:
            log("asked for /server_info")
            threading.Event().wait()
        self.send_response(503 if "sick" in WORDS else 200)
        self.end_headers()
        info = {"api_key": "sk-secret", "tp_size": 1}
        self.wfile.write(json.dumps(info if self.path == "/server_info" else {}).encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    asked, _ = parser.parse_known_args()
    if "stubborn" in WORDS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log(f"server_args=ServerArgs(model_path='{asked.model_path}', port={asked.port}, api_key='sk-secret')")
    log("Load weight begin. avail mem=1.00 GB")
    if "crash" in WORDS:
        log("Scheduler hit an exception: Traceback (most recent call last):")
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    if "spin" in WORDS:
        while True:
            pass
    if "compile" in WORDS:
        compile_for_ever()
    if "silent" in WORDS:
        signal.pause()
    if "no-tap" not in WORDS:
        write_tap(asked.model_path)
    server = None if "no-port" in WORDS else ThreadingHTTPServer(("127.0.0.1", asked.port), Handler)
    log(READY)
    if server:
        server.serve_forever()
    signal.pause()


if __name__ == "__main__":
    main()
