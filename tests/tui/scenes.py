"""Fixed evidence for the screens: snapshots of the first case, and a feed that shows one of them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from backends import sglang
from backends.situation import Situation
from console.feed import LOGS, Point
from console.log_buffer import LogBuffer
from console.session import NO_DEFAULTS, Session, empty_snapshot

AT = 1_795_983_512.0
GB = 1 << 30

SERVER_LOG = b"""\
[2026-11-29 13:55:50] server_args=ServerArgs(model_path='/models/kimi-k2.5', tp_size=8)
[2026-11-29 13:55:54 TP0] Load weight begin. avail mem=94.02 GB
[2026-11-29 14:01:02 TP0] Load weight end. elapsed=312.4 s, type=KimiK25ForConditionalGeneration, avail mem=17.90 GB, mem usage=76.12 GB.
[2026-11-29 14:01:05 TP0] KV Cache is allocated. #tokens: 131072, K size: 4.29 GB, V size: 4.29 GB
[2026-11-29 14:01:09] The server is fired up and ready to roll!
[2026-11-29 14:01:30 TP0] Prefill batch, #new-seq: 4, #new-token: 8190, #cached-token: 0, token usage: 0.06
"""


def gpu(index: int, **known: Any) -> dict[str, Any]:
    """A GPU under load."""
    return {
        "index": index,
        "error": None,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "utilisation_percent": 98 - index,
        "memory_used_bytes": 88 * GB,
        "memory_total_bytes": 95 * GB,
        "power_watts": 412.0 - index,
        "power_limit_watts": 600.0,
        "temperature_c": 71 + index,
        "throttle": [],
        "xid": [],
        "processes": [],
    } | known


def phases(*names: str, ended: bool = True) -> list[dict[str, Any]]:
    """Phases as a start goes through them, from ten minutes before."""
    seconds = {"args": 1, "dist": 4, "weights": 312, "kv": 3, "limits": 1, "http": 1, "warm_up": 21, "ready": 0}
    made, at = [], AT - 600.0
    for name in names:
        last = name == names[-1]
        made.append({"id": name, "started": at, "ended": None if last else at + seconds[name], "detail": ""})
        at += seconds[name]
    return made


def server(**known: Any) -> dict[str, Any]:
    """The first case's server, ready."""
    return {
        "id": "server-20261129-135548-a1b2",
        "kind": "server",
        "state": "running",
        "folder": "/root/.local/state/layertap/runs/server-20261129-135548-a1b2",
        "log": "/root/.local/state/layertap/runs/server-20261129-135548-a1b2/server.log",
        "port": 30000,
        "sglang": "0.5.16",
        "created": AT - 8040.0,
        "stop_asked": False,
        "exit": None,
        "details": {
            "profile": "kimi-k2_5-int4-8x",
            "model": "/models/kimi-k2.5",
            "layers": {"outputs": [2, 30, 58]},
            "layers_words": "outputs of layers 2, 30, 58",
        },
        "argv": ["python", "-m", "sglang.launch_server", "--model-path", "/models/kimi-k2.5", "--tp-size", "8"],
        "phase": "ready",
        "phase_seconds": 7600.0,
        "phases": phases("args", "dist", "weights", "kv", "limits", "http", "warm_up", "ready"),
        "verdict": {"verdict": "healthy", "cause": None, "remedy": None, "evidence": ["process alive", "tap in"]},
        "tap": {
            "inside": True,
            "sglang": "0.5.16",
            "layers": {
                "boundaries": [3, 31, 59],
                "outputs": [2, 30, 58],
                "serve_ids": [3, 31, 59],
                "serve_ids_elsewhere": [
                    {"ids": [2, 30, 58], "sglang": ">=0.5.9,<0.5.13"},
                    {"ids": [3, 31, 59], "sglang": ">=0.5.13"},
                ],
            },
            "bytes_per_token": 71_680,
            "hidden": 7168,
            "dtype": "bfloat16",
        },
        "layers": "outputs of layers 2, 30, 58 (boundaries 3, 31, 59)",
        "health": 200,
        "stacks": None,
        "earlier": {
            "run": "server-20261128-101010-c3d4",
            "seconds": 360.0,
            "phases": {
                "args": 1.0,
                "dist": 4.0,
                "weights": 310.0,
                "kv": 3.0,
                "limits": 1.0,
                "http": 1.0,
                "warm_up": 21.0,
            },
        },
        "events": [],
        "progress": None,
        "result": None,
    } | known


def extraction(**known: Any) -> dict[str, Any]:
    """The first case's extraction, half way."""
    progress = {
        "phase": "drawing",
        "output": "/data/hs/kimi-v3",
        "samples": 10_000,
        "pending": 4_019,
        "sent": 48,
        "captured": 0,
        "written": 5_931,
        "failed": 2,
        "bad_rows": 0,
        "overlong_rows": 6,
        "tokens": 19_800_000,
        "tokens_written": 11_000_000,
        "tokens_per_second": 7_412.0,
        "bytes_written": 1_020_000_000_000,
        "eta_seconds": 1_080.0,
        "seconds": 1_490.0,
        "failures": [{"sample": 4_412, "reason": "aux_1 has NaN in row 17; the dump is kept"}],
    }
    return {
        "id": "extract-20261129-140200-e5f6",
        "kind": "extract",
        "state": "running",
        "folder": "/root/.local/state/layertap/runs/extract-20261129-140200-e5f6",
        "log": "/root/.local/state/layertap/runs/extract-20261129-140200-e5f6/extract.log",
        "created": AT - 1500.0,
        "stop_asked": False,
        "exit": None,
        "details": {
            "rows": "/data/rows/gsm-mix.jsonl",
            "output": "/data/hs/kimi-v3",
            "server": "server-20261129-135548-a1b2",
            "formats": ["native", "specforge"],
            "options": {},
        },
        "argv": ["python", "-P", "-m", "capture.job", "extract"],
        "events": [],
        "progress": progress | known.pop("progress", {}),
        "result": None,
    } | known


def dumps(**known: Any) -> dict[str, Any]:
    return {
        "states": {"done": {"requests": 5_933, "bytes": 1_020_000_000_000}, "failed": {"requests": 0, "bytes": 0}},
        "requests_per_second": 5.9,
        "bytes_per_second": 430_000_000.0,
        "on_disk": 2,
        "free_bytes": 58 * 10**9,
        "total_bytes": 64 * 10**9,
        "seconds_to_full": None,
        "seen": {"ours": 5_933, "warm_up": 1, "health": 812, "stranger": 0},
        "reserve": 16 << 20,
        "slots": 8,
        "slots_free": 6,
        "writer_pids": [4242, 4243],
        "slot_wait_seconds": 0.0,
        "writers_lost": 0,
        "error": None,
    } | known


LIVE: dict[str, Any] = {
    "state": "live",
    "since": AT - 9000.0,
    "heard_age": 0.4,
    "why": None,
    "attempt": 0,
    "next_in": None,
    "notes": [],
}


def snapshot(**known: Any) -> dict[str, Any]:
    """All is well, and much is going on."""
    return {
        "schema": 1,
        "at": AT,
        "link": LIVE,
        "alarms": [],
        "streams": [
            {"name": "samples", "state": "live", "heard_age": 0.4, "lost_bytes": 0},
            {"name": "server log", "state": "live", "heard_age": 0.1, "lost_bytes": 0},
        ],
        "host": {
            "host": "gpu-host-1",
            "user": "me",
            "python": "/opt/sglang/bin/python",
            "sglang": "0.5.16",
            "cpu_percent": 12.0,
            "cores": 96,
            "load": [11.5, 10.2, 9.8],
            "memory_total_bytes": 1024 * GB,
            "memory_available_bytes": 900 * GB,
            "swap_used_bytes": 0,
            "disks": [],
        },
        "gpus": {
            "state": "ok",
            "why": None,
            "driver": "595.80",
            "cuda": "13.1",
            "gpus": [gpu(index) for index in range(8)],
        },
        "server": server(),
        "processes": [],
        "dumps": dumps(),
        "extraction": extraction(),
        "runs": [{"id": "server-20261129-135548-a1b2", "kind": "server", "state": "running"}],
        "question": None,
        "trouble": None,
    } | known


def starting(**known: Any) -> dict[str, Any]:
    """In weight loading."""
    return server(
        created=AT - 120.0,
        phase="weights",
        phase_seconds=95.0,
        phases=[
            *phases("args", "dist"),
            {"id": "weights", "started": AT - 95, "ended": None, "detail": "shard 43 of 64"},
        ],
        verdict={
            "verdict": "starting",
            "cause": None,
            "remedy": None,
            "evidence": ["process alive", "port 30000 closed"],
        },
        tap=None,
        layers=None,
        health=None,
        **known,
    )


HANG = {
    "verdict": "hang_suspected",
    "cause": "the warm-up spins: ranks busy, nothing read, nothing logged",
    "remedy": "stop it and relaunch without --enable-return-aux-hidden-states",
    "evidence": [
        "log silent for 158 s at line 217 (a good start has about 641)",
        "/health 503 after 20.0 s",
        "8 ranks at 100 % CPU",
        "GPUs at 100 % and 92 W",
        "no compiler child, no disk reads",
    ],
}


def alarm(name: str, severity: str, cause: str, remedy: str, evidence: str) -> dict[str, Any]:
    return {
        "id": name,
        "severity": severity,
        "cause": cause,
        "remedy": remedy,
        "evidence": evidence,
        "since": AT - 60.0,
    }


HANGS = alarm("server-hangs", "critical", HANG["cause"], HANG["remedy"], HANG["evidence"][0])
CRASHED = alarm(
    "server-crashed",
    "critical",
    "GPU memory ran out while the weights were loading",
    "lower --mem-fraction-static",
    "process gone",
)
HOT = alarm(
    "gpu-throttled",
    "warning",
    "a GPU is slowed down by heat or by its power supply",
    "look at cooling and power of the host; layertap doctor shows temperatures and limits",
    "for 60 s GPU 5: hw_thermal",
)
XID = alarm(
    "gpu-xid",
    "critical",
    "the driver reported errors of a GPU (XID)",
    "see dmesg for the XID's text; verify what was drawn since, and reset the GPU if it comes again",
    "GPU 6 reported XID 79",
)
FILLING = alarm(
    "memory-filling",
    "critical",
    "the memory that dumps go through (tmpfs) is full, or will be; requests then fail",
    "find what else lies there (du -sh /dev/shm/*), and remove what is nobody's; the run goes on by itself",
    "/dev/shm is full in 95 s: other processes fill it, 3 GB are left",
)

SCENES: dict[str, dict[str, Any]] = {
    "live": snapshot(),
    "connecting": empty_snapshot()
    | {
        "at": AT,
        "link": LIVE | {"state": "connecting", "since": AT - 2.0, "heard_age": None},
        "streams": [{"name": "samples", "state": "waiting", "heard_age": None, "lost_bytes": 0}],
        "question": None,
        "trouble": None,
    },
    "starting": snapshot(server=starting(), dumps=None, extraction=None),
    "stale": snapshot(streams=[{"name": "samples", "state": "stale", "heard_age": 12.3, "lost_bytes": 0}]),
    "reconnecting": snapshot(
        link=LIVE | {"state": "reconnecting", "since": AT - 31.0, "attempt": 3, "next_in": 4.0, "why": "gpu-host-1: connection reset"}
    ),
    "failed": snapshot(link=LIVE | {"state": "failed", "since": AT - 5.0, "why": "gpu-host-1: no key was accepted; see `ssh -v gpu-host-1`"}),
    "no-gpu": snapshot(gpus={"state": "no_nvml", "why": "NVML: not found", "driver": None, "cuda": None, "gpus": []}),
    "throttled": snapshot(
        alarms=[XID, HOT],
        gpus={
            "state": "ok",
            "why": None,
            "driver": "595.80",
            "cuda": "13.1",
            "gpus": [
                *[gpu(index) for index in range(5)],
                gpu(5, throttle=["thermal"]),
                gpu(6, xid=[{"code": 79}]),
                gpu(7, error="GPU is lost"),
            ],
        }
    ),
    "hang": snapshot(
        server=starting() | {"created": AT - 500.0, "phase": "warm_up", "phase_seconds": 160.0, "phases": phases("args", "dist", "weights", "kv", "limits", "http", "warm_up"), "health": 503, "verdict": HANG}, dumps=None, extraction=None, alarms=[HANGS]
    ),
    "crashed": snapshot(
        alarms=[CRASHED],
        server=server(
            state="exited",
            exit={"code": None, "signal": 9, "at": AT - 60.0},
            verdict={"verdict": "crashed", "cause": "GPU memory ran out while the weights were loading", "remedy": "lower --mem-fraction-static", "evidence": []},
        )
    ),
    "tmpfs-full-soon": snapshot(dumps=dumps(free_bytes=3 * 10**9, seconds_to_full=95.0), alarms=[FILLING]),
    "slower": snapshot(alarms=[HOT]),
}  # fmt: skip


NO_SAMPLES = {
    "path": "/data/hs/kimi-v3",
    "model": "/models/kimi-k2.5",
    "counts": {"pending": 0, "sent": 0, "written": 0, "failed": 0},
    "before": 0,
    "samples": [],
}


H200S = Situation(gpus=8, cc="9.0", vram_gib=140.4, nvlink=True)


class MadeFeed:
    """Shows one scene; what is asked of the host is answered by `answers`, by the request's name."""

    def __init__(self, scene: dict[str, Any], name: str = "gpu-host-1", answers: dict[str, Any] | None = None) -> None:
        self.name = name
        self.scene = copy.deepcopy(scene)
        self.answers = {"samples": NO_SAMPLES, "situation": H200S} | (answers or {})
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.given: list[str | None] = []
        self.closed = False
        self.history = deque(
            Point(AT - 900.0 + second, 90.0 + second % 9, 7000.0 + second % 800, 4.3e8, 5.0 + second % 3)
            for second in range(900)
        )
        self.gpu_history = {
            index: deque(float(40 + (step * 7 + index) % 60) for step in range(120)) for index in range(8)
        }
        self.logs = {key: LogBuffer() for key in LOGS}
        self.logs["server"].feed(SERVER_LOG)
        self.session = MadeSession(self)

    def start(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def retry(self) -> None:
        self.asked.append(("retry", {}))

    def watch(self, run_id: str | None) -> None:
        self.asked.append(("watch", {"run_id": run_id}))

    def snapshot(self) -> dict[str, Any]:
        return self.scene

    def answer(self, text: str | None) -> None:
        self.given.append(text)
        self.scene["question"] = None

    def log_run(self, key: str) -> str | None:
        return {"server": self.scene["server"], "job": self.scene["extraction"]}.get(key, {}).get("id")

    def log_state(self, key: str) -> str:
        return "live"

    def call(self, act: Callable[[Session], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(act(self.session))  # type: ignore[arg-type]
        except BaseException as error:
            done.set_exception(error)
        return done


class MadeSession:
    """What the screens ask a session, answered by the feed's answers."""

    def __init__(self, feed: MadeFeed) -> None:
        self.feed = feed
        self.host = self
        self.profiles = sglang.load_profiles()
        self.hello = {
            "host": "gpu-host-1",
            "sglang": "0.5.23",
            "danger": None,
            "payload_folder": "/payload",
            "python": "python",
        }

    def request(self, method: str, /, *, seconds: float = 60.0, **parameters: Any) -> Any:
        self.feed.asked.append((method, parameters))
        answer = self.feed.answers[method]
        if isinstance(answer, BaseException):
            raise answer
        return answer(**parameters) if callable(answer) else answer

    def situation(self, model: str | None) -> Any:
        return self.request("situation", model=model)

    def stop(self, run_id: str, why: str) -> Any:
        return self.request("stop", run_id=run_id, why=why)

    def start(self, kind: str, job: dict[str, Any], port: int | None = None) -> Any:
        return self.request("start", kind=kind, job=job, port=port)

    extraction = Session.extraction
    finish = Session.finish
    defaults = NO_DEFAULTS
    plan_launch = Session.plan_launch
    launch = Session.launch
    dump_root = None

    @staticmethod
    def _dict(value: Any) -> dict[str, Any]:
        return value
