"""Jobs and datasets as a made host answers them, for the screens of extraction and samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from consoles import console
from scenes import SCENES, extraction, snapshot

from console.tui import jobs

ENDED = {"exit": {"code": 1, "signal": None, "at": 1_795_983_500.0}, "state": "exited"}
ROWS, OUTPUT = "/data/rows/gsm-mix.jsonl", "/data/hs/kimi-v3"

REASON = "no dump within 60 s: the server answered 500 to [/generate], and that three times, once after each attempt"
AGAIN = {
    "rows": ROWS,
    "output": OUTPUT,
    "formats": ["native", "specforge"],
    "options": {},
    "layertap": "0.1.0",
    "allow_volatile": False,
    "restart_server": 0,
    "beside_ports": [],
}

PLAN: dict[str, Any] = {
    "schema": 1,
    "rows": 27,
    "samples": 24,
    "tokens": 1538,
    "longest": 135,
    "median": 52,
    "p99": 135,
    "histogram": [[32, 2], [64, 12], [128, 9], [256, 1]],
    "masked_tokens": 959,
    "masked_share": 0.62,
    "truncated": 0,
    "skipped": 1,
    "skipped_rows": [{"file": ROWS, "line": 9, "tokens": 4_097}],
    "limit": 4_096,
    "bad": 2,
    "bad_rows": [
        {"file": ROWS, "line": 4, "reason": "messages is a string, not a list of messages"},
        {"file": ROWS, "line": 5, "reason": "not JSON: Expecting value: column 1"},
    ],
    "alarms": [
        {
            "id": "zero_mask",
            "fatal": False,
            "what": "nothing is in the loss",
            "remedy": "leave these rows out: no trainer learns from them",
            "count": 1,
            "rows": [{"file": ROWS, "line": 7, "seen": "12 tokens"}],
        },
    ],
    "bytes_per_token": {"native": 71_680.0},
    "total_bytes": {"native": 110_243_840},
    "free_bytes": 3_900_000_000_000,
    "fits": True,
    "output": OUTPUT,
    "preview": {
        "line": 1,
        "text": "<|user|>a [list]?<|assistant|>[42<|end|>]",
        "parts": [["<|user|>a [list]?<|assistant|>", False], ["42<|end|>", True]],
    },
}


class MadeJobs:
    """Starts whatever is asked for; a job ends at once, as `results` say, unless its kind is held."""

    def __init__(self, **results: Any) -> None:
        self.results = results
        self.held: set[str] = set()
        self.started: list[tuple[str, dict[str, Any], int | None]] = []

    def answers(self) -> dict[str, Any]:
        """What a host with these jobs answers."""
        return {"start": self.start, "run": self.run, "stop": {"seconds": 1.0, "how": "asked", "left": []}}

    def start(self, kind: str, job: dict[str, Any], port: int | None) -> dict[str, Any]:
        """See `Session.start`."""
        result = self.results.get(kind)
        if isinstance(result, BaseException):
            raise result
        self.started.append((kind, job, port))
        return self._run(f"{kind}-1", "running")

    def run(self, run_id: str) -> dict[str, Any]:
        """See `Agent.run`."""
        kind = run_id.partition("-")[0]
        if kind in self.held:
            return self._run(run_id, "running", progress={"rows": 500})
        result = self.results[kind]
        code = 2 if "error" in result else 0
        return self._run(run_id, "exited", result=result, exit={"code": code, "signal": None, "at": 0.0})

    @staticmethod
    def _run(run_id: str, state: str, **known: Any) -> dict[str, Any]:
        run = {"id": run_id, "state": state, "progress": None, "result": None, "exit": None, "log": f"/{run_id}.log"}
        return copy.deepcopy(run | known)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are asked for without a pause."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)


def with_extraction(monkeypatch: pytest.MonkeyPatch, run: dict[str, Any] | None, **known: Any) -> None:
    """Make a scene "made" in which the newest extraction is `run`."""
    monkeypatch.setitem(SCENES, "made", snapshot(extraction=run, **known))


def ended(**progress: Any) -> dict[str, Any]:
    """An extraction that has ended with some failed."""
    return extraction(progress=progress, **ENDED)


def made_console(jobs: MadeJobs, answers: dict[str, Any] | None = None, scene: str = "made", **known: Any) -> Any:
    """A console over a scene, with these jobs on its host."""
    return console(scene, jobs.answers() | (answers or {}), **known)


def seen(**known: Any) -> dict[str, Any]:
    """A sample of four tokens, row 2 of aux_0 all zero and row 0 far off."""
    state = {
        "shape": [4, 7168],
        "dtype": "bfloat16",
        "mean": -0.0012,
        "std": 1.5,
        "median_norm": 40.0,
        "norms": [4123.0, 40.0, 0.0, 41.5],
        "odd": [{"row": 2, "why": "all zero"}, {"row": 0, "why": "far off"}],
        "odd_rows": 2,
        "norm": "before the final norm",
    }
    well = state | {"norms": [88.0, 88.1, 88.2, None], "odd": [], "odd_rows": 0}
    tokens = [(10, "<|user|>", False), (11, " [hi]\n", False), (12, " 42", True), (13, "<|end|>", True)]
    one = {"number": 7, "file": "/rows/a.jsonl", "line": 8, "start": 0, "tokens": 4, "state": "written", "attempts": 1}
    return copy.deepcopy(
        {
            "schema": 1,
            "dataset": "/data/hs/kimi-v3",
            "model": "/models/kimi-k2.5",
            "sample": one | {"reason": None},
            "tokens": [{"id": number, "text": text, "in_loss": in_loss} for number, text, in_loss in tokens],
            "left_out": 0,
            "no_text": None,
            "read": "native",
            "layers_words": "outputs of layers 2 (boundaries 3)",
            "states": {"aux_0": state, "final": well},
            "rule": "norm more than 10 times off the median",
            "files": [{"format": "native", "path": "native/7", "bytes": 286_000, "xxh3": ""}],
            "failures": [],
        }
        | known
    )


def page(count: int = 200) -> dict[str, Any]:
    """A page of samples in every state, as `Agent.samples` answers."""
    states = (("written", 1), ("written", 1), ("failed", 3), ("sent", 1), ("pending", 0))
    samples = []
    for number in range(4400, 4400 + count):
        state, attempts = states[number % 5]
        known = {"state": state, "attempts": attempts, "reason": REASON if state == "failed" else None}
        place = {"file": ROWS, "line": number + 1, "start": 0, "tokens": 1800 + number * 37 % 6000}
        samples.append({"number": number} | place | known)
    counts = {"pending": 4019, "sent": 48, "written": 5931, "failed": 2}
    return {"path": OUTPUT, "model": "/models/kimi-k2.5", "counts": counts, "before": 4400, "samples": samples}
