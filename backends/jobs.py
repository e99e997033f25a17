"""Starting jobs on the host: try, plan, extract and so on, each a run with a job.json of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import Locked, RunDied, UsageError
from backends.folders import absolute
from backends.launch import as_launching, check_layers, model_folder
from backends.runs import CODE, Run, Runs, python_path, write_json
from backends.sglang import Launch
from capture.dumps.dump import read_tap
from capture.layers import LayerChoice
from capture.server import Server
from capture.tap.settings import SETTINGS_VARIABLE, TapSettings, replica_folder

# Kinds of job, and whether they draw from a server.
JOBS = {
    "try": True,
    "probe": True,
    "plan": False,
    "extract": True,
    "verify": False,
    "export": False,
    "diff": False,
    "sample": False,
    "doctor": False,
    "tune": False,
}
MODULES = {"tune": "backends.tune.job"}  # of those that run servers themselves
PATHS = ("rows", "output", "dataset", "other")
# Of these, what a job reads. Where it is not there, a run that fails at once would only stand before those that matter.
READ = {
    "plan": ["rows"],
    "extract": ["rows"],
    "verify": ["output"],
    "sample": ["output"],
    "export": ["dataset"],
    "diff": ["dataset", "other"],
}
# What else it takes to ask for the same extraction again.
ASKED = ("formats", "options", "allow_volatile", "restart_server", "beside_ports")


def start_job(runs: Runs, payload: Path, kind: str, job: dict[str, Any], port: int | None) -> Run:
    """Start a job.

    Raises RunDied where it needs a server and none runs, Locked where it runs already, UsageError where what it reads
    is not there.
    """
    job = {key: absolute(value) if key in PATHS and value else value for key, value in job.items()}
    details = {key: job[key] for key in PATHS if job.get(key)}
    if kind == "extract":
        details |= {key: job[key] for key in ASKED if key in job}
        refuse_second(runs, job["output"])
    restarts, beside_ports = job.pop("restart_server", 0), job.pop("beside_ports", [])
    if JOBS[kind]:
        server = runs.server(port)
        first, *more = sources(runs, server)
        job |= first
        details["server"] = server.id
        if kind == "extract":  # the others draw from one, and the replicas of a server are alike
            beside = _beside(runs, server, beside_ports, restarts) if beside_ports else []
            more += [source for one in beside for source in sources(runs, one)]
            job |= {"beside": more} if more else {}
            details |= {"beside": [one.id for one in beside]} if beside else {}
    elif kind == "plan":
        job |= _planned_by(runs, job.get("model"), port)
    elif kind == "doctor":
        refuse_beside(runs)
        job["state"] = str(runs.state)
    elif kind == "tune":
        if not job["launch"]["embedded"]:
            refuse_beside(runs)
        merged, choice = msgspec.convert((job["launch"], job["layers"]), tuple[Launch, LayerChoice])
        job["layers"] = msgspec.to_builtins(check_layers(as_launching(merged, choice, None)))
        job["payload"] = str(payload)
        details = {"profile": job["launch"]["profile"], "model": job["launch"]["model"]}
        details |= {key: job[key] for key in ("only", "given")}

    for key in READ.get(kind, ()):
        if not os.path.exists(job[key]):
            raise UsageError(f"{job[key]}: there is no such file or folder on this host")

    def prepare(run: Run) -> dict[str, str]:
        write_json(run.folder / "job.json", job)
        return {}

    return runs.start(
        kind,
        [sys.executable, "-P", "-m", MODULES.get(kind, "capture.job"), kind],
        environment(payload, kind),
        code=payload.name,
        prepare=prepare,
        details=details,
        supervisor="backends.supervise" if kind == "extract" else "backends.runs",
    )


def sources(runs: Runs, server: Run) -> list[dict[str, Any]]:
    """What a job that draws from a server is told of it: the server with its lock, or each of its replicas."""
    whole, lock = describe(server), str(draw_lock(runs, server))
    tap = read_tap(Path(whole.dump_dir))
    parts = [whole]
    if tap is not None and tap.replicas > 1:
        parts = [
            msgspec.structs.replace(whole, dump_dir=str(replica_folder(Path(whole.dump_dir), k)), replica=k)
            for k in range(tap.replicas)
        ]
    return [{"server": msgspec.to_builtins(part), "lock": lock} for part in parts]


def _beside(runs: Runs, first: Run, ports: list[int], restarts: int) -> list[Run]:
    """The servers on these ports. Raises UsageError for one that is named twice, RunDied for one that is not there."""
    if restarts:
        raise UsageError(
            "--restart-server goes with one server; of several, those that live go on without one that died"
        )
    found = [runs.server(port) for port in ports]
    ids = [first.id, *(server.id for server in found)]
    if len({*ids}) < len(ids):
        raise UsageError("--port names the same server twice")
    return found


def environment(payload: Path, kind: str) -> dict[str, str]:
    """The environment of a job."""
    if kind in MODULES:  # its servers inherit it: as a launch would give it to them
        return {**os.environ, "PYTHONPATH": python_path(CODE, os.environ)}
    return {
        **os.environ,
        "PYTHONPATH": python_path([payload / "engine"], os.environ),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Jobs work on what the server left in memory, never on its GPUs; only the doctor's measures these.
        **({} if kind == "doctor" else {"CUDA_VISIBLE_DEVICES": ""}),
    }


def read_job(run: Run) -> dict[str, Any]:
    """What a job was asked for, as it is now: another server where its own was launched again. Raises UsageError."""
    path = run.folder / "job.json"
    try:
        return dict(msgspec.json.decode(path.read_bytes()))
    except (OSError, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error


def draws_from(run: Run, server: Run) -> bool:
    """Whether a job draws from that server."""
    if not JOBS.get(run.spec.kind):
        return False
    try:
        job = read_job(run)
        return server.id in [source["server"]["run"] for source in (job, *job.get("beside", ()))]
    except UsageError:  # its folder is being removed
        return False


def require_same(run: Run, job: dict[str, Any]) -> None:
    """Raise Locked where an extraction that runs draws other rows than `job` asks for, or draws them otherwise."""
    now, asked = run.spec.details, job | {"rows": absolute(job["rows"])}
    for name in ("rows", "formats", "options"):
        if name in now and now[name] != asked[name]:
            has, wants = _told(now[name], asked[name]), _told(asked[name], now[name])
            raise Locked(
                f"{run.id} writes to {now['output']} already, its {name} are {has} and not {wants}; wait for it, or "
                f"`layertap stop {run.id}`"
            )


def _told(value: Any, beside: Any) -> str:
    """Formats or rows in words; of options, those that differ from the ones `beside` them."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {value[name]}" for name in value if value[name] != beside.get(name))
    return ",".join(value) if isinstance(value, list) else str(value)


def refuse_second(runs: Runs, output: str) -> None:
    """Raise Locked where an extraction into `output` runs."""
    for run in runs.live("extract"):
        if run.spec.details.get("output") == output:
            raise Locked(f"an extraction into {output} runs already: {run.id}; `layertap stop {run.id}` stops it")


def refuse_beside(runs: Runs) -> None:
    """Raise Locked where a server of ours holds the GPUs that are to be measured, or where they are being measured."""
    for run in runs.live():
        if run.spec.kind == "doctor" or on_gpus(run):
            raise Locked(f"{run.id} uses the GPUs; `layertap stop {run.id}`, and measure then")


def on_gpus(run: Run) -> bool:
    """Whether it is a server that uses GPUs, or launches such servers."""
    embedded = str(run.spec.details.get("profile")).startswith("embedded-")
    return run.spec.kind in ("server", "tune") and not embedded


def describe(server: Run) -> Server:
    """A server run as a job needs it. Raises RunDied where it has no live process."""
    running = server.running
    if running is None or not server.alive():
        raise RunDied(f"the server {server.id} is dead; `layertap launch` it")
    private, spec = server.private, server.spec
    settings = msgspec.json.decode(private.env[SETTINGS_VARIABLE], type=TapSettings)
    argv = private.argv
    return Server(
        run=server.id,
        url=f"http://127.0.0.1:{spec.port}",
        dump_dir=settings.dump_dir,
        secret=settings.secret,
        process=running.child,
        model=spec.details["model"],
        profile=spec.details["profile"],
        trust_remote_code="--trust-remote-code" in argv,
        api_key=argv[argv.index("--api-key") + 1] if "--api-key" in argv else None,
    )


def draw_lock(runs: Runs, server: Run) -> Path:
    """The lock that only one job that draws from `server` holds at a time."""
    assert server.spec.port is not None
    return runs.lock_path(server.spec.port, ".draw")


def _planned_by(runs: Runs, model: str | None, port: int | None) -> dict[str, Any]:
    """The model that a plan is made for; where none is named, that of the server, whose limit then holds."""
    if model:
        return {"model": model_folder(model)}
    try:
        server = describe(runs.server(port))
    except RunDied:
        raise UsageError("no server runs here to take the model from; name the model's folder with --model") from None
    return {"model": server.model, "server": msgspec.to_builtins(server)}
