"""Real SGLang servers for tests, started once a session for each way of starting them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from backends import bootstrap, payload, runs, sglang  # noqa: E402
from backends.jobs import describe  # noqa: E402
from backends.launch import Launching, launch  # noqa: E402
from backends.ports import free_port  # noqa: E402
from backends.verdict.watch import ServerWatch  # noqa: E402
from capture import job  # noqa: E402
from capture.draw import Drawer  # noqa: E402
from capture.dumps import dump  # noqa: E402
from capture.layers import LayerChoice  # noqa: E402
from capture.probe import Probed  # noqa: E402

SGLANG = importlib.metadata.version("sglang")


class Engine:
    """A launched server and what a test asks of it."""

    def __init__(self, run: runs.Run) -> None:
        self.run = run
        self.server = describe(run)
        self.model = Path(self.server.model)
        self.dump_dir = Path(self.server.dump_dir)

    @property
    def tap(self) -> dump.TapState:
        state = dump.read_tap(self.dump_dir)
        assert state is not None
        return state

    def draw(self, prompts: list[list[int]], *, together: bool = True) -> list[dict[str, Any]]:
        """The states of each prompt; `together` sends them all at once."""
        return asyncio.run(self._draw(prompts, together))

    async def _draw(self, prompts: list[list[int]], together: bool) -> list[dict[str, Any]]:
        async with Drawer(self.server, self.tap) as drawer:

            async def one(row: int, ids: list[int]) -> dict[str, Any]:
                _, folder = await drawer.draw(row, 0, ids)
                meta = dump.read_meta(folder)
                assert meta.ids == ids
                states = dump.read_states(folder, meta)
                dump.remove(folder)
                return states

            if together:
                return list(await asyncio.gather(*(one(row, ids) for row, ids in enumerate(prompts))))
            return [await one(row, ids) for row, ids in enumerate(prompts)]

    def probe(self, folder: Path, **asked: Any) -> tuple[int, Probed]:
        """The job in `folder`, as `layertap probe` runs it: its exit code and result."""
        before = Path.cwd()
        os.chdir(folder)
        try:
            return job.run_probe(job.ProbeJob(server=self.server, lock=str(folder / "lock"), **asked))
        finally:
            os.chdir(before)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def log(self) -> str:
        return self.run.log.read_text(errors="replace")


class Engines:
    """Starts servers, at most two alive at once, and stops all of them in the end."""

    def __init__(self, folder: Path) -> None:
        self.runs = runs.Runs(folder / "state")
        name, archive = payload.pack()
        self.payload = folder / "payload" / name
        bootstrap.unpack(archive, str(self.payload))
        self.alive: dict[str, Engine] = {}

    def get(
        self,
        profile: str,
        *,
        model: Path | None = None,
        layers: LayerChoice | None = None,
        memory: int | None = None,
        writers: int | None = None,
        **args: Any,
    ) -> Engine:
        """A ready server of `profile`; the same one for the same question."""
        key = repr((profile, model, layers, memory, writers, sorted(args.items())))
        if key not in self.alive:
            while len(self.alive) >= 2:
                self.stop(next(iter(self.alive)))
            self.alive[key] = self._start(profile, model, layers, {"memory": memory, "writers": writers}, args)
        return self.alive[key]

    def _start(
        self,
        profile: str,
        model: Path | None,
        layers: LayerChoice | None,
        tap: dict[str, int | None],
        args: dict[str, Any],
    ) -> Engine:
        words = {name.replace("_", "-"): value for name, value in args.items()}
        env = {name[4:]: words.pop(name) for name in list(words) if name.startswith("ENV-")}
        env = {name.replace("-", "_"): value for name, value in env.items()}
        merged = sglang.resolve(
            profile,
            sglang.load_profiles(),
            version=SGLANG,
            model=str(model) if model else None,
            port=free_port(),
            overrides=sglang.Overrides(args=words, env=env),
        )
        argv = merged.argv("python")[1:]
        run = launch(
            self.runs,
            self.payload,
            Launching(
                profile=profile,
                model=merged.model,
                argv=argv,
                shown_argv=argv,
                env=merged.environ(),
                port=merged.port,
                layers=layers or LayerChoice(**(merged.layers or {})),
                embedded=merged.embedded,
                **tap,
            ),
            SGLANG,
        )
        watch = ServerWatch(run)
        deadline = time.monotonic() + 400
        while True:
            now = watch.look()
            if now["verdict"]["verdict"] == "healthy":
                return Engine(run)
            if now["verdict"]["verdict"] in ("crashed", "stopped") or time.monotonic() > deadline:
                runs.stop(run, "it did not become ready")
                raise AssertionError(f"{now['verdict']}\n{run.log.read_text()[-6000:]}")
            time.sleep(0.3)

    def stop(self, key: str) -> runs.Stopped:
        """Stop one server and show that nothing is left."""
        stopped = runs.stop(self.alive.pop(key).run, "the test is over")
        assert stopped.left == [], stopped.left
        return stopped

    def stop_all(self) -> None:
        """Stop every server that is alive."""
        for key in list(self.alive):
            self.stop(key)


@contextmanager
def running() -> Iterator[Engines]:
    """Engines that are stopped, with proof, when the tests are over."""
    folder = Path(tempfile.mkdtemp(prefix="layertap-engines-"))
    made = Engines(folder)
    try:
        yield made
    finally:
        made.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def plugin(folder: Path, name: str, code: str) -> str:
    """An SGLang plugin of a test's own in `folder`; returns a PYTHONPATH with `folder` in front of what is there."""
    (folder / f"{name}.py").write_text(code)
    return entry_point(folder, name, name)


def entry_point(folder: Path, name: str, module: str) -> str:
    """What makes `register` of `module` an SGLang plugin, in `folder`; returns a PYTHONPATH that begins with it."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
