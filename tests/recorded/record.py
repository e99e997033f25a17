"""Records a start: everything that a verdict is made from, with its times, into one file that `replay.py` reads.

Needs SGLang's Python and this checkout, nothing else; the server is launched as `layertap launch` does, and stopped.

usage: python tests/recorded/record.py PROFILE FILE.jsonl.gz [--model FOLDER] [--outputs 2 30 58] [--set NAME=VALUE ...]
           [--env NAME=VALUE ...] [--cold] [--ready 30] [--timeout 1800]

`--cold` gives the server a home without caches, so that every kernel is compiled anew; `--ready` goes on for so many
seconds after the server is up. Exit code 1 where a verdict on the way was none of starting, slow_but_fine and healthy.
Paths of this machine and secrets are left out.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backends import bootstrap, payload, runs, sglang
from backends.gpus import Gpus
from backends.launch import Launching, launch
from backends.ports import free_port
from backends.sample import Sampler
from backends.sglang import mask_text
from backends.verdict.observation import Observation
from backends.verdict.watch import ServerWatch
from capture.layers import LayerChoice

LOOK_SECONDS = 1.0
FINE = ("starting", "slow_but_fine", "healthy")


class Head(msgspec.Struct, kw_only=True):
    """The first line. `zone` is by how many seconds the log's clock is ahead of UTC."""

    schema: int = 1
    sglang: str
    profile: str
    cores: int | None
    gpus: list[str]
    created: float
    zone: float


class Heard(msgspec.Struct):
    """A part of the log and when it was read, in epoch seconds."""

    at: float
    text: str


class Entry(msgspec.Struct, omit_defaults=True):
    """Any other line: what the log said, or what was seen."""

    heard: Heard | None = None
    seen: Observation | None = None


class Recorder(ServerWatch):
    """A watch that writes down what it takes in."""

    def __init__(self, run: runs.Run, sampler: Sampler, file: IO[bytes], hidden: dict[str, str]) -> None:
        super().__init__(run, sampler.gpus)
        self.file = file
        self.hidden = hidden

    def write(self, line: Head | Entry) -> None:
        text = msgspec.json.encode(line).decode()
        for path, name in self.hidden.items():
            text = text.replace(path, name)
        self.file.write(text.encode() + b"\n")

    def hear(self, text: str, at: float) -> None:
        self.write(Entry(heard=Heard(at, mask_text(text))))
        super().hear(text, at)

    def judge(self, seen: Observation) -> dict[str, Any]:
        self.write(Entry(seen=seen))
        return super().judge(seen)


def record(asked: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="layertap-record-"))
    all_runs = runs.Runs(folder / "state")
    run = start(asked, all_runs, folder)
    try:
        with gzip.open(asked.file, "wb") as file:
            return follow(asked, run, Recorder(run, Sampler(all_runs), file, hidden(folder)))
    finally:
        stopped = runs.stop(run, "the start is recorded")
        print(f"stopped in {stopped.seconds} s; left: {', '.join(stopped.left) or 'nothing'}")
        shutil.rmtree(folder, ignore_errors=True)


def start(asked: argparse.Namespace, all_runs: runs.Runs, folder: Path) -> runs.Run:
    """Launch the server."""
    name, archive = payload.pack()
    bootstrap.unpack(archive, str(folder / "payload" / name))
    env = dict(word.split("=", 1) for word in asked.env)
    if asked.cold:
        home = folder / "home"
        home.mkdir()
        env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    args: dict[str, Any] = dict(word.split("=", 1) if "=" in word else (word, True) for word in asked.set)
    args = {name: {"true": True, "false": False}.get(value, value) for name, value in args.items()}
    version = importlib.metadata.version("sglang")
    merged = sglang.resolve(
        asked.profile,
        sglang.load_profiles(),
        version=version,
        model=asked.model,
        port=free_port(),
        overrides=sglang.Overrides(args=args, env=env),
    )
    argv = merged.argv("python")[1:]
    launching = Launching(
        profile=merged.profile,
        model=merged.model,
        argv=argv,
        shown_argv=sglang.mask_argv(argv),
        env=merged.environ(),
        port=merged.port,
        layers=LayerChoice(**({"outputs": asked.outputs} if asked.outputs else merged.layers or {})),
        embedded=merged.embedded,
    )
    return launch(all_runs, folder / "payload" / name, launching, version)


def follow(asked: argparse.Namespace, run: runs.Run, watch: Recorder) -> int:
    """Look until the server has been up for a while, has ended, or the time is over."""
    gpus = [gpu.name or "?" for gpu in Gpus().sample(None).gpus]
    version, created = run.spec.sglang or "", run.spec.created
    zone = time.localtime(created).tm_gmtoff
    watch.write(
        Head(sglang=version, profile=asked.profile, cores=os.cpu_count(), gpus=gpus, created=created, zone=zone)
    )
    told, up, wrong = "", None, 0
    while time.time() - created < asked.timeout:
        now = watch.look()
        verdict = now["verdict"]
        said = f"{verdict['verdict']} {verdict['findings'][:1]} in {now['phase']}: {verdict['cause']}"
        if said != told:
            told = said
            print(f"{time.time() - created:7.1f} s  {said}", flush=True)
        known = verdict["verdict"] != "unknown" or "not known yet" not in (verdict["cause"] or "")
        wrong += verdict["verdict"] not in FINE and known
        up = up or (time.time() if verdict["verdict"] == "healthy" else None)
        if verdict["verdict"] in ("crashed", "stopped") or (up and time.time() - up > asked.ready):
            break
        time.sleep(LOOK_SECONDS)
    print(f"{wrong} looks were called neither fine nor slow")
    return int(wrong > 0 or up is None)


def hidden(folder: Path) -> dict[str, str]:
    """What the file does not say of this machine, longest first."""
    known = {str(folder): "/record", sys.prefix: "/sglang", str(Path(__file__).resolve().parents[2]): "/layertap"}
    known |= {os.path.expanduser("~"): "/home/user", socket.gethostname(): "host"}
    return {path: known[path] for path in sorted(known, key=len, reverse=True) if len(path) > 3}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("file")
    parser.add_argument("--model")
    parser.add_argument("--outputs", type=int, nargs="+")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--ready", type=float, default=30.0)
    parser.add_argument("--timeout", type=float, default=1800.0)
    sys.exit(record(parser.parse_args()))
