"""What both doors say in words, letter by letter."""

from __future__ import annotations

import time
from typing import Any

import pytest

from console.tui.screens.help import SIGNS
from console.tui.widgets.panel import SIGN_STYLES
from console.words import figures, of_dataset, of_host, of_run, of_server, of_snapshot

# --- Numbers ---


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (None, "?"),
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (57_344, "57.3 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (1_420_000_000, "1.42 GB"),
        (12_340_000_000_000, "12.3 TB"),
        (99_960_000_000_000, "100 TB"),
        (1_234_000_000_000_000, "1,234 TB"),
    ],
)
def test_bytes(count: float | None, said: str) -> None:
    assert figures.size(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "?"),
        (0, "0 s"),
        (0.2, "1 s"),
        (119, "119 s"),
        (119.5, "2 m 0 s"),
        (7199, "119 m 59 s"),
        (8040, "2 h 14 m"),
        (360_000, "100 h 0 m"),
    ],
)
def test_seconds(seconds: float | None, said: str) -> None:
    assert figures.duration(seconds) == said


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ([], ""),
        ([[16, 3]], "<= 16 █ 16"),
        ([[16, 1], [32, 0], [64, 8], [2048, 100]], "<= 16 ▂ ▂█ 2,048"),
    ],
)
def test_a_histogram(buckets: list[list[int]], said: str) -> None:
    assert figures.histogram(buckets) == said


# --- Status ---


def phase(name: str, started: float | None, ended: float | None, detail: str = "") -> dict[str, Any]:
    return {"id": name, "started": started, "ended": ended, "detail": detail}


def server(**known: Any) -> dict[str, Any]:
    return {
        "id": "server-20260101-120000-abcd",
        "port": 30000,
        "sglang": "0.5.23",
        "details": {"profile": "mine", "layers_words": "outputs of layers 2, 30, 58"},
        "layers": None,
        "phase": None,
        "phase_seconds": None,
        "phases": [],
        "verdict": {"verdict": "starting", "cause": None, "remedy": None, "evidence": []},
        "stacks": None,
    } | known


def test_a_server_that_has_logged_nothing() -> None:
    assert list(of_server.server(server())) == [
        "~ server server-20260101-120000-abcd: starting",
        "  profile mine · SGLang 0.5.23 · port 30000",
        "  no start-up phase seen",
        "  tensors: outputs of layers 2, 30, 58, not resolved yet",
    ]


def test_a_server_that_starts() -> None:
    now = server(
        phase="weights",
        phase_seconds=311.2,
        phases=[
            phase("args", 0.0, 1.5),
            phase("dist", 1.5, 40.0, "2.27"),
            phase("weights", 40.0, None, "shard 3 of 64"),
        ],
    )
    now["verdict"]["evidence"] = ["process alive", "in phase weights for 311 s"]
    assert list(of_server.server(now)) == [
        "~ server server-20260101-120000-abcd: starting, in weights for 5 m 12 s",
        "  profile mine · SGLang 0.5.23 · port 30000",
        "  args 2 s > dist 39 s > weights … (shard 3 of 64)",
        "  tensors: outputs of layers 2, 30, 58, not resolved yet",
        "  - process alive",
        "  - in phase weights for 311 s",
    ]


def test_a_server_that_is_healthy() -> None:
    now = server(
        layers="outputs of layers 2, 30, 58 (boundaries 3, 31, 59)",
        phase="ready",
        phase_seconds=5.0,
        phases=[phase("warm_up", 0.0, 3.0), phase("ready", 3.0, None)],
    )
    now["verdict"]["verdict"] = "healthy"
    assert list(of_server.server(now)) == [
        "+ server server-20260101-120000-abcd: healthy",
        "  profile mine · SGLang 0.5.23 · port 30000",
        "  warm-up 3 s > ready",
        "  tensors: outputs of layers 2, 30, 58 (boundaries 3, 31, 59)",
    ]


def test_a_server_that_crashed() -> None:
    now = server(phase="weights", phases=[phase("weights", None, None)])
    now["verdict"] = {
        "verdict": "crashed",
        "cause": "GPU memory ran out",
        "remedy": "lower mem-fraction-static",
        "evidence": ["process gone"],
    }
    assert list(of_server.server(now)) == [
        "! server server-20260101-120000-abcd: crashed",
        "  profile mine · SGLang 0.5.23 · port 30000",
        "  weights …",
        "  tensors: outputs of layers 2, 30, 58",
        "  cause: GPU memory ran out",
        "  remedy: lower mem-fraction-static",
        "  - process gone",
    ]


def test_a_hang_with_its_stacks() -> None:
    now = server(phase="weights", phase_seconds=200.0, stacks="/runs/x/stacks-1.txt")
    now["verdict"] = {
        "verdict": "hang_suspected",
        "cause": "it stands",
        "remedy": "stop it",
        "evidence": ["process alive"],
    }
    lines = list(of_server.server(now))
    assert lines[0] == "? server server-20260101-120000-abcd: hang_suspected, in weights for 3 m 20 s"
    assert lines[-1] == "  stacks: /runs/x/stacks-1.txt"


def test_stacks() -> None:
    report = {
        "run": "server-1",
        "at": 0.0,
        "path": "/runs/x/stacks-1.txt",
        "summary": ["TP0 stands in f", "TP1 differs"],
    }
    assert list(of_server.stacks(report)) == [
        f"stacks of server-1 at {figures.when(0.0)}",
        "  TP0 stands in f",
        "  TP1 differs",
        "  all of them: /runs/x/stacks-1.txt",
    ]


def test_a_diagnosis() -> None:
    finding = {"id": "runtime-oom", "since": None, "evidence": ["line 7: x"], "cause": "c", "remedy": "r"}
    made = {"verdict": "hang_suspected", "phases": [phase("args", 1.0, 3.0)], "findings": [finding]}
    assert list(of_server.diagnosis(made)) == [
        "? hang suspected",
        "  args 2 s",
        "runtime-oom",
        "  cause: c",
        "  remedy: r",
        "  - line 7: x",
    ]


@pytest.mark.parametrize(("verdict", "sign"), [("stopped", "-"), ("unknown", "?"), ("degraded", "?")])
def test_every_verdict_has_a_sign_of_its_own(verdict: str, sign: str) -> None:
    now = server()
    now["verdict"]["verdict"] = verdict
    assert next(iter(of_server.server(now))) == f"{sign} server server-20260101-120000-abcd: {verdict}"


DUMPS = {
    "states": {"done": {"requests": 1197, "bytes": 86_000_000_000}, "failed": {"requests": 3, "bytes": 0}},
    "requests_per_second": 6.0,
    "bytes_per_second": 430_000_000.0,
    "on_disk": 2,
    "free_bytes": 48_600_000_000,
    "total_bytes": 64_000_000_000,
    "seconds_to_full": 113.0,
    "seen": {"ours": 1200, "warm_up": 1, "health": 17, "stranger": 2},
    "reserve": 16_777_216,
    "slots": 4,
    "slots_free": 3,
    "slot_wait_seconds": 0.0,
    "writer_pids": [7],
    "writers_lost": 0,
    "error": None,
}


def test_dumps() -> None:
    assert of_server.dumps(DUMPS) == (
        "  dumps: ours 1200 · warm-up 1 · health 17 · stranger 2 · done 1197 · failed 3 · 430 MB/s · "
        "arena 3 of 4 slots free · 48.6 GB free · full in 113 s"
    )


def test_dumps_that_forwards_have_waited_for() -> None:
    assert " · arena 3 of 4 slots free · 72 s waited for slots · " in of_server.dumps(
        DUMPS | {"slot_wait_seconds": 71.2}
    )


def test_dumps_of_which_little_is_known() -> None:
    unknown = dict.fromkeys(("seen", "slots", "slots_free", "slot_wait_seconds", "bytes_per_second", "seconds_to_full"))
    assert of_server.dumps(DUMPS | unknown | {"error": "tap.json: not there"}) == (
        "  dumps: done 1197 · failed 3 · 48.6 GB free · tap.json: not there"
    )


GPU = {
    "index": 2,
    "error": None,
    "name": "RTX PRO 6000",
    "utilisation_percent": 97,
    "memory_used_bytes": 88_000_000_000,
    "memory_total_bytes": 95_600_000_000,
    "power_watts": 409.4,
    "power_limit_watts": 600.0,
    "temperature_c": 84,
    "throttle": [],
    "xid": [],
}


def test_gpus_with_what_is_wrong_marked_by_a_sign() -> None:
    troubled = GPU | {"index": 3, "throttle": ["thermal"], "xid": [{"code": 79, "at": 1.0}], "power_watts": None}
    lost = GPU | {"index": 4, "error": "GPU is lost"}
    assert list(of_host.gpus({"state": "ok", "why": None, "gpus": [GPU, troubled, lost]})) == [
        "  GPU 2: RTX PRO 6000 · 97 % · 88 GB of 95.6 GB · 409 of 600 W · 84 °C",
        "! GPU 3: RTX PRO 6000 · 97 % · 88 GB of 95.6 GB · ? of 600 W · 84 °C · thermal · XID 79",
        "! GPU 4: GPU is lost",
    ]


def test_a_host_without_gpus_is_no_error() -> None:
    assert list(of_host.gpus({"state": "no_gpu", "why": "NVML sees none", "gpus": []})) == []
    assert list(of_host.gpus({"state": "error", "why": "driver mismatch", "gpus": []})) == ["GPUs: driver mismatch"]


def test_a_link_that_is_not_live() -> None:
    state = {"since": 100.0, "why": "cut", "attempt": 3, "next_in": 3.2, "state": "reconnecting"}
    assert list(of_host.link(state, 129.5)) == ["! link reconnecting for 30 s, attempt 3, next in 4 s: cut"]
    assert list(of_host.link(state | {"state": "live"}, 129.5)) == []


def progress(**known: Any) -> dict[str, Any]:
    return {
        "phase": "extracting",
        "samples": 10_000,
        "written": 2_500,
        "failed": 0,
        "tokens_per_second": 4_321.9,
        "bytes_written": 123_000_000_000,
        "eta_seconds": 8040.0,
        "failures": [],
    } | known


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, "2,500 / 10,000 samples · 4,322 tok/s · 123 GB · 2 h 14 m left"),
        ({"failed": 2, "eta_seconds": None}, "2,500 / 10,000 samples · 4,322 tok/s · 123 GB · 2 failed"),
        ({"tokens_per_second": None, "eta_seconds": None}, "2,500 / 10,000 samples · 123 GB"),
        ({"phase": "preparing"}, "preparing …"),
        ({"phase": "probing"}, "probing …"),
        ({"phase": "tokenising"}, "tokenising …"),
    ],
)
def test_progress(known: dict[str, Any], said: str) -> None:
    assert of_run.progress(progress(**known)) == said


def test_the_progress_of_a_verification() -> None:
    now = {"done": 1_200, "total": 5_000, "bytes": 3_200_000_000, "bytes_per_second": 1.5e9}
    assert of_run.verifying(now) == "[####----------------] · 1,200 / 5,000 samples · 3.2 GB · 1.5 GB/s"
    assert of_run.verifying(dict(done=0, total=0, bytes=0, bytes_per_second=None)) == "0 / 0 samples · 0 B"


REPORT = {"schema": 1, "samples": 6, "verified": 5, "failed": 1, "total": 6, "bytes": 9, "deviations": {}}


def test_what_a_verification_came_to() -> None:
    failures = [
        {"sample": 3, "format": "native", "reason": "it is missing"},
        {"sample": 4, "format": None, "reason": "it is not extracted"},
        {"sample": None, "format": "speculators", "reason": "state.json is missing"},
    ]
    deviations = {"speculators-fp8": {"last": {"rows": 9, "mean": 0.0261, "largest": 0.0312}}}
    assert list(of_dataset.verified(REPORT | {"failures": failures, "deviations": deviations})) == [
        "6 samples · 5 verified · 1 failed",
        "speculators-fp8: a row is off by, relative to its norm: last 2.61% (at most 3.12%)",
        "  sample 3 native: it is missing",
        "  sample 4: it is not extracted",
        "  speculators: state.json is missing",
    ]
    some = REPORT | {"failures": [], "total": 5_000, "failed": 0, "verified": 6}
    assert list(of_dataset.verified(some)) == ["6 of 5,000 samples · 6 verified · 0 failed"]


def test_a_comparison_in_words() -> None:
    assert of_run.comparing({"done": 1, "total": 4}) == "[#####---------------] · 1 / 4 samples"
    equal = {"samples": 7, "different": 0, "deviation": {"rows": 9, "mean": 0.0, "largest": 0.0}}
    off = {"samples": 7, "different": 2, "deviation": {"rows": 9, "mean": 0.002, "largest": 0.5}}
    made = {
        "a": "/a",
        "b": "/b",
        "read": ["native", "specforge"],
        "settings": ["--max-length was 4096, now 2048"],
        "equal": 5,
        "different": 6,
        "only_a": 4,
        "only_b": 1,
        "same": False,
        "states": {"final": equal, "boundary 3": off},
        "not_compared": ["last"],
        "differences": [
            {"a": 4, "b": None, "what": "only in the first"},
            *({"a": number, "b": None, "what": "only in the first"} for number in (6, 7, 8)),
            {"a": None, "b": 9, "what": "only in the second"},
            {"a": 1, "b": 2, "what": "boundary 3 differs"},
            {"a": 2, "b": 3, "what": "boundary 3 differs"},
            {"a": 5, "b": 5, "what": "final differs"},
            {"a": 6, "b": 6, "what": "final differs"},
            {"a": 7, "b": 7, "what": "last differs"},
        ],
    }
    assert list(of_dataset.compared(made)) == [
        "not the same: 5 samples equal · 6 different · 4 only in /a · 1 only in /b",
        "read in native and specforge",
        "! --max-length was 4096, now 2048",
        "  boundary 3: 2 of 7 samples differ · off by 0.20% of a row's norm, at most 50.00%",
        "  final: 0 of 7 samples differ · equal",
        "  not in both: last",
        "  sample 4: only in /a",
        "  samples 6-8: only in /a",
        "  sample 9: only in /b",
        "  sample 1 = 2: boundary 3 differs",
        "  sample 2 = 3: boundary 3 differs",
        "  samples 5-6: final differs",
        "  sample 7: last differs",
        "  and 1 more",
    ]


def test_an_export_in_words() -> None:
    now = {
        "phase": "exporting",
        "samples": 400,
        "here": 100,
        "written": 100,
        "failed": 2,
        "bytes_written": 4_000_000,
        "bytes_per_second": 2e6,
        "eta_seconds": 95.0,
    }
    shown = "[##########----------] · 200 / 400 samples · 4 MB · 2 MB/s · 2 failed · 95 s left"
    assert of_run.exporting(now) == shown
    assert of_run.exporting(now | {"phase": "finishing"}) == "writing what belongs beside the samples …"
    made = {
        "dataset": "/data/hs",
        "output": "/data/out",
        "formats": ["speculators", "modelopt"],
        "here": 1,
        "written": 5,
        "failed": 1,
        "missing": 2,
        "bytes_written": 4_000_000,
        "seconds": 1.5,
        "deviations": {},
        "failures": [{"sample": 3, "format": "native", "reason": "it is missing"}],
        "hints": {"speculators": "--on-missing warn"},
    }
    assert list(of_dataset.exported(made)) == [
        "5 samples written, 1 were here, 1 failed · 4 MB in 1.5 s · speculators, modelopt in /data/out",
        "! 2 samples of /data/hs are not extracted, so they are not here either",
        "  sample 3 native: it is missing",
        "speculators: --on-missing warn",
    ]


def extraction(**known: Any) -> dict[str, Any]:
    return {
        "id": "extract-1",
        "state": "running",
        "details": {"output": "/data"},
        "progress": None,
        "result": None,
        "stop_asked": False,
        "exit": None,
    } | known


AGAIN = "  give the same command again: it goes on where this one ended"


DONE = {"bad_rows": 0}


@pytest.mark.parametrize(
    ("code", "signal", "known", "said", "more"),
    [
        (0, None, {"result": DONE}, "finished", []),
        (1, None, {"result": DONE}, "finished, not all of it good", []),
        (0, None, {"result": DONE, "stop_asked": True}, "finished", []),  # before it heard of the stop
        (1, None, {}, "failed with 1", [AGAIN]),
        (9, None, {"result": {"error": "no server; launch one"}}, "failed with 9", ["  no server; launch one"]),
        (None, 9, {}, "killed by signal 9", [AGAIN]),
        (None, 15, {"stop_asked": True}, "stopped", [AGAIN]),
        (130, None, {"stop_asked": True, "result": {"error": "asked"}}, "stopped", ["  asked", AGAIN]),
    ],
)
def test_how_an_extraction_ended(
    code: int | None, signal: int | None, known: dict[str, Any], said: str, more: list[str]
) -> None:
    exit = {"code": code, "signal": signal, "at": 1.0}
    now = extraction(state="exited", exit=exit, progress=progress(), **known)
    assert list(of_run.extraction(now)) == [
        f"extraction extract-1: {said} -> /data",
        "  2,500 / 10,000 samples · 123 GB",
        *more,
    ]


def test_an_extraction_of_which_no_end_is_known() -> None:
    assert list(of_run.extraction(extraction(state="died"))) == ["extraction extract-1: died -> /data", AGAIN]
    elsewhere = extraction(state="elsewhere")
    assert list(of_run.extraction(elsewhere)) == ["extraction extract-1: elsewhere -> /data"]


def test_an_extraction() -> None:
    failures = [{"sample": number, "format": None, "reason": "too long"} for number in (9, 8, 7, 6)]
    assert list(of_run.extraction(extraction())) == ["extraction extract-1: running -> /data"]
    now = extraction(progress=progress(failed=4, failures=failures))
    assert list(of_run.extraction(now)) == [
        "extraction extract-1: running -> /data",
        "  2,500 / 10,000 samples · 4,322 tok/s · 123 GB · 4 failed · 2 h 14 m left",
        "  failed: sample 9: too long",
        "  failed: sample 8: too long",
        "  failed: sample 7: too long",
    ]
    now |= {"state": "exited", "exit": {"code": 2, "signal": None, "at": 1.0}, "result": {"error": "/data is full"}}
    assert list(of_run.extraction(now)) == [
        "extraction extract-1: failed with 2 -> /data",
        "  2,500 / 10,000 samples · 123 GB · 4 failed",
        "  failed: sample 9: too long",
        "  failed: sample 8: too long",
        "  failed: sample 7: too long",
        "  /data is full",
    ]


def test_a_snapshot() -> None:
    at = time.mktime((2026, 1, 1, 12, 34, 56, 0, 0, -1))
    now = {"at": at, "host": {"user": "ada", "host": "gpu-7"}, "server": None, "dumps": None, "extraction": None}
    now |= {"streams": [], "alarms": [], "link": {"state": "live"}, "gpus": {"state": "ok", "why": None, "gpus": [GPU]}}
    (gpu,) = of_host.gpus(now["gpus"])
    assert list(of_snapshot.snapshot(now)) == ["ada@gpu-7 · 12:34:56", gpu, "no server of ours ever ran here"]
    alarm = {
        "id": "gpu-xid",
        "severity": "critical",
        "since": at,
        "cause": "an XID",
        "evidence": "GPU 3",
        "remedy": "go",
    }
    now |= {"server": server(), "dumps": DUMPS, "extraction": extraction(), "alarms": [alarm]}
    assert list(of_snapshot.snapshot(now)) == [
        "ada@gpu-7 · 12:34:56",
        "! critical since 2026-01-01 12:34:56: an XID (GPU 3)",
        "  -> go",
        gpu,
        *of_server.server(server()),
        of_server.dumps(DUMPS),
        "extraction extract-1: running -> /data",
    ]


# --- Plan, try and launch ---


def plan(**known: Any) -> dict[str, Any]:
    return {
        "rows": 12_000,
        "samples": 11_900,
        "skipped": 60,
        "skipped_rows": [{"file": "rows.jsonl", "line": 9, "tokens": 40_011}],
        "limit": 2_049,
        "truncated": 5,
        "bad": 40,
        "tokens": 9_520_000,
        "masked_share": 0.426,
        "histogram": [[64, 10], [128, 80]],
        "median": 90,
        "p99": 127,
        "longest": 128,
        "bytes_per_token": {"native": 71_680.0, "specforge": 57_344.0},
        "total_bytes": {"native": 682_393_600_000, "specforge": 545_914_880_000},
        "free_bytes": 2_000_000_000_000,
        "fits": True,
        "output": "/data",
        "alarms": [
            alarm("zero_mask", "nothing is in the loss", 2, [3, 17]),
            alarm("ignores_roles", "roles look alike", 9, [1, 2, 3, 4, 5, 6, 7, 8], fatal=True),
        ],
        "bad_rows": [{"file": "rows.jsonl", "line": 5, "reason": "not JSON: Expecting value: column 1"}],
        "preview": {"line": 1, "text": "Hi[ there]"},
    } | known


def test_one_row_is_no_rows() -> None:
    assert next(of_dataset.alarm_lines(alarm("zero_mask", "odd", 1, [3]))) == "? 1 row: odd; do something"
    assert [figures.counted(count, "row") for count in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]


def alarm(name: str, what: str, count: int, lines: list[int], *, fatal: bool = False) -> dict[str, Any]:
    rows = [{"file": "rows.jsonl", "line": line, "seen": "odd"} for line in lines]
    return {"id": name, "fatal": fatal, "what": what, "remedy": "do something", "count": count, "rows": rows}


def test_chosen_rows_are_shown_whole_with_what_is_odd_about_them() -> None:
    row = {
        "file": "b.parquet", "line": 17, "reason": None, "tokens": 1200, "masked_tokens": 3, "truncated": True,
        "alarms": {"bos_twice": "token 1 twice"}, "text": "Hi[ there]", "parts": [["Hi", False], [" there", True]],
    }  # fmt: skip
    bad = row | {"line": 18, "reason": "messages is an empty list"}
    assert list(of_dataset.chosen_rows({"schema": 1, "shown": [row, bad]})) == [
        "b.parquet:17: 1,200 tokens, truncated, 3 in the loss, [ ]:",
        "  Hi[ there]",
        "  ? bos-twice: token 1 twice",
        "b.parquet:18: messages is an empty list",
    ]


def test_a_plan() -> None:
    assert list(of_dataset.plan(plan())) == [
        "12,000 rows · 11,900 good · 60 overlong, skipped · 5 truncated · 40 bad",
        "9,520,000 tokens · 43% in the loss",
        "lengths  <= 64 ▂█ 128  median 90 · p99 127 · longest 128",
        "native: 71.7 kB a token -> 682 GB",
        "specforge: 57.3 kB a token -> 546 GB",
        "/data has 2 TB free: fits",
        "? 2 rows: nothing is in the loss; do something",
        "    rows.jsonl:3: odd",
        "    rows.jsonl:17: odd",
        "! 9 rows: roles look alike; do something",
        *(f"    rows.jsonl:{line}: odd" for line in range(1, 6)),
        "rows.jsonl:9: 40,011 tokens, and no sample may have more than 2,049",
        "rows.jsonl:5: not JSON: Expecting value: column 1",
        "line 1, [ ] = in the loss:",
        "  Hi[ there]",
    ]


def test_a_plan_that_does_not_fit() -> None:
    assert "/data has 3.2 MB free: DOES NOT FIT" in list(of_dataset.plan(plan(free_bytes=3_200_000, fits=False)))


def test_a_plan_without_good_rows() -> None:
    nothing = plan(
        samples=0, tokens=0, masked_share=None, histogram=[], total_bytes={}, free_bytes=None, fits=None, preview=None
    )
    nothing |= {"alarms": [], "bad_rows": [], "skipped_rows": [], "median": None, "p99": None, "longest": None}
    assert list(of_dataset.plan(nothing)) == ["12,000 rows · 0 good · 60 overlong, skipped · 5 truncated · 40 bad"]


def state(rows: int, norm: float) -> dict[str, Any]:
    return {"shape": [rows, 64], "dtype": "bfloat16", "mean": 0.01234, "std": 1.5, "norms": [norm] * rows}


def tried(tokens: int, rows: int) -> dict[str, Any]:
    return {
        "tokens": [{"id": 100 + number, "text": f" w{number}"} for number in range(tokens)],
        "rows": rows,
        "seconds": 0.12,
        "layers": {"outputs": [2, 30], "boundaries": [3, 31]},
        "states": {
            name: state(rows, norm)
            for name, norm in (("aux_0", 1.25), ("aux_1", 12345.6), ("final", 8.0), ("last", 80.0))
        },
        "findings": [],
    }


def test_a_try() -> None:
    assert list(of_dataset.tried(tried(2, 2))) == [
        "2 tokens sent · 2 rows in every tensor · 0.12 s",
        "      id  text                 |aux_0|     |aux_1|     |final|      |last|",
        "     100  ' w0'                   1.25   1.235e+04           8          80",
        "     101  ' w1'                   1.25   1.235e+04           8          80",
        "aux_0  [2, 64] bfloat16 mean 0.01234 std 1.5 · output of layer 2",
        "aux_1  [2, 64] bfloat16 mean 0.01234 std 1.5 · output of layer 30",
        "final  [2, 64] bfloat16 mean 0.01234 std 1.5 · last layer, after the final norm",
        "last   [2, 64] bfloat16 mean 0.01234 std 1.5 · last layer, before the final norm",
    ]


def test_a_try_shows_forty_tokens_and_every_finding() -> None:
    made = tried(42, 42)
    made["findings"] = [
        {"fatal": False, "what": "SGLang 0.6.0 was not tested", "remedy": "look at the states twice"},
        {"fatal": True, "what": "the cache is on", "remedy": "launch without it"},
    ]
    lines = list(of_dataset.tried(made))
    assert lines[41] == "     139  ' w39'                  1.25   1.235e+04           8          80"
    assert lines[42] == "          … and 2 more"
    assert lines[-2:] == [
        "? SGLang 0.6.0 was not tested; look at the states twice",
        "! the cache is on; launch without it",
    ]


def test_a_launch() -> None:
    merged = {
        "profile": "mine",
        "sglang": "0.5.23",
        "layers": "outputs of layers 2, 30, 58",
        "differs": ["it is for 8 GPUs, and here are none"],
        "tap": [["memory", "48 GiB", "[command line]"], ["writers", None, "half of the cores [default]"]],
        "env": [["NCCL_DEBUG", "WARN", "NCCL's own errors reach the log [base]"]],
        "args": [
            ["port", "30000", "[layertap]"],
            ["disable-radix-cache", True, "missing rows [base]"],
            ["api-key", "***", "[command line]"],
        ],
    }
    assert list(of_server.launch(merged)) == [
        "# profile mine for SGLang 0.5.23; layers: outputs of layers 2, 30, 58",
        "? it is for 8 GPUs, and here are none",
        "tap memory 48 GiB      # [command line]",
        "tap writers auto       # half of the cores [default]",
        "NCCL_DEBUG=WARN        # NCCL's own errors reach the log [base]",
        "--port 30000           # [layertap]",
        "--disable-radix-cache  # missing rows [base]",
        "--api-key ***          # [command line]",
    ]
    assert list(of_server.launch(merged | {"differs": []}))[1] == "# host and model are what the profile is for"
    assert list(of_server.launch(merged | {"differs": None}))[1].startswith("tap memory")


# --- A sample ---


def sample(**known: Any) -> dict[str, Any]:
    state = {
        "shape": [3, 8],
        "dtype": "bfloat16",
        "mean": -0.00123,
        "std": 1.5,
        "median_norm": 40.0,
        "norms": [4123.4, 40.0, 0.0],
        "odd": [{"row": 2, "why": "all zero"}, {"row": 0, "why": "far off"}],
        "odd_rows": 2,
        "norm": "before the final norm",
    }
    one = {"number": 1234, "file": "/rows/a.jsonl", "line": 17, "tokens": 3, "state": "written", "attempts": 1}
    return {
        "sample": one,
        "tokens": [
            {"id": 19180, "text": "What\n", "in_loss": False},
            {"id": 5, "text": " is", "in_loss": True},
            {"id": 6, "text": None, "in_loss": True},
        ],
        "left_out": 0,
        "no_text": None,
        "states": {"aux_0": state},
        "rule": "norm more than 10 times off the median",
        "files": [{"format": "native", "path": "native/1234", "bytes": 71_700, "xxh3": ""}],
        "failures": [],
        **known,
    }


def test_a_sample_token_by_token() -> None:
    assert list(of_dataset.sample(sample())) == [
        "+ sample 1,234 written · a.jsonl:17 · 3 tokens, 2 in the loss · 1 attempt",
        "   row       id  text                loss     |aux_0|",
        "     0    19180  'What\\n'            -         ? 4123",
        "     1        5  ' is'               yes           40",
        "     2        6                      yes          ! 0",
        "aux_0  [3, 8] bfloat16 · mean -0.00123 · std 1.5 · norm 0 to 4123, median 40",
        "       ! row 2 all zero · ? row 0 far off",
        "! wrong, ? norm more than 10 times off the median",
        "native/1234: 71.7 kB",
        "+ verified: ids, mask, shapes, dtype, values, size and checksum are as they should be",
    ]


def test_a_sample_without_states_and_texts() -> None:
    one = sample()["sample"] | {"state": "failed", "attempts": 3}
    why = {"sample": 1234, "format": None, "reason": "it is not extracted"}
    said = list(
        of_dataset.sample(
            sample(sample=one, states={}, files=[], failures=[why], no_text="/m: no such model", left_out=9)
        )
    )
    assert said[0] == "! sample 1,234 failed · a.jsonl:17 · 3 tokens, 2 of the first 3 in the loss · 3 attempts"
    assert said[1] == "no texts: /m: no such model"
    assert said[-2:] == ["     … and 9 more", "! it is not extracted"]


def test_odd_rows_of_which_there_are_many() -> None:
    odd = [{"row": row, "why": "all zero"} for row in range(7)]
    said = of_dataset.odd_rows({"odd": odd, "odd_rows": 1007})
    assert said.startswith("! row 0 all zero · ! row 1 all zero")
    assert said.endswith("! row 4 all zero · 1,002 more")


def test_figures_that_are_not_finite() -> None:
    state = {"shape": [1, 8], "dtype": "float32", "mean": None, "std": None, "median_norm": None, "norms": [None]}
    assert of_dataset.sample_state(state) == "[1, 8] float32 · mean ? · std ? · norm ?, median ?"


# --- Runs ---


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "started", "child": 8, "supervisor": 7}, "started as process 8, supervised by process 7"),
        ({"event": "stop_asked", "why": "layertap stop"}, "asked to stop: layertap stop"),
        ({"event": "ended", "code": 0, "signal": None}, "ended with code 0"),
        ({"event": "ended", "code": None, "signal": 9}, "ended by signal 9"),
        (
            {"event": "stopped", "how": "asked", "seconds": 1.5, "left": []},
            "stopped in 1.5 s (asked), left behind: nothing",
        ),
        (
            {"event": "stopped", "how": "ended by SIGKILL", "seconds": 37.0, "left": ["port 1", "process 2 (x)"]},
            "stopped in 37.0 s (ended by SIGKILL), left behind: port 1; process 2 (x)",
        ),
        (
            {"event": "prepared", "resumed": True, "samples": 2500, "written": 1200, "bad_rows": 0},
            "prepared: 2,500 samples, 1,200 of them written already",
        ),
        (
            {"event": "gate", "id": "radix", "fatal": True, "what": "the cache is on", "remedy": "turn it off"},
            "gate: the cache is on; turn it off",
        ),
        (
            {"event": "probed", "passed": True, "earlier": False, "lengths": [3, 64, 1500], "ranks": 8},
            "probe passed: prompts of 3, 64 and 1,500 tokens on 8 ranks",
        ),
        (
            {"event": "probed", "passed": False, "earlier": True, "lengths": [3], "ranks": 1},
            "probe FAILED: prompts of 3 tokens on one rank, as it was asked before",
        ),
        ({"event": "retry", "sample": 3, "reason": "/generate:\n 500"}, "sample 3 is drawn again: /generate: 500"),
        (
            {"event": "failed", "sample": 3, "file": "r.jsonl", "line": 4, "reason": "not finite"},
            "sample 3 (r.jsonl:4) failed: not finite",
        ),
        ({"event": "log_only", "most": 300}, "further retries and failures are only in the log"),
        ({"event": "server_lost", "reason": "it is dead"}, "server lost: it is dead"),
        ({"event": "error", "reason": "no such file"}, "ended early: no such file"),
        ({"event": "finished", "samples": 3, "bad_rows": 0}, "finished: samples 3, bad rows 0"),
        ({"event": "retry", "sample": 3}, "retry: sample 3"),
        ({"event": "prepared", "samples": None, "written": 1}, "prepared: samples None, written 1"),
        ({"event": "ended"}, "ended:"),
        ({"event": "of_a_later_version", "key": [1]}, "of_a_later_version: key [1]"),
    ],
)
def test_an_event(event: dict[str, Any], said: str) -> None:
    assert of_run.event({"at": 1.0, **event}) == said


PROBED: dict[str, Any] = {
    "passed": True,
    "seconds": 2.4,
    "model_class": "KimiK25ForConditionalGeneration",
    "dtype": "bfloat16",
    "sglang": "0.5.23",
    "ranks": 2,
    "lengths": [3, 2049],
    "layers": {
        "outputs": [2, 30, 58],
        "boundaries": [3, 31, 59],
        "serve_ids": [3, 31, 59],
        "serve_ids_elsewhere": [{"ids": [2, 30, 58], "sglang": ">=0.5.9,<0.5.13"}],
    },
    "shared_forwards": 1,
    "tolerance": {"near": 0.999, "strays": 0.05, "floor": 0.9, "why": "16 bits"},
    "compared": [
        {"tokens": 3, "state": "aux_0", "least": 1.0, "strays": 0},
        {"tokens": 2049, "state": "final", "least": 0.9981, "strays": 2},
    ],
    "against_hf": None,
    "failures": [],
}


def test_a_probe_that_passed() -> None:
    assert list(of_server.probed(PROBED)) == [
        "+ probe passed: prompts of 3 and 2,049 tokens on 2 ranks, in 3 s",
        "  KimiK25ForConditionalGeneration in bfloat16, SGLang 0.5.23",
        "  tensors: outputs of layers 2, 30, 58, which are Hugging Face's hidden_states[3, 31, 59]",
        "  drafter's config: eagle_aux_hidden_state_layer_ids = [3, 31, 59] under this SGLang",
        "    [2, 30, 58] under SGLang >=0.5.9,<0.5.13",
        "  each gave one dump, sound and with the ids that were sent",
        "  all 2 ranks saw the same bits of every state",
        "  alone against together: least cosine 0.9981 (2,049 tokens, final), 2 at 0.999 or less (16 bits)",
    ]


def test_a_probe_that_failed() -> None:
    against = {"tokens": 3, "state": "aux_0", "least": 0.5, "median": 0.75, "scale": 1.5, "boundary": 3, "nearest": 2}
    made = PROBED | {"passed": False, "failures": ["x is wrong"], "shared_forwards": 0, "against_hf": [against]}
    said = list(of_server.probed(made))
    assert said[0] == "! probe FAILED: prompts of 3 and 2,049 tokens on 2 ranks, in 3 s"
    assert said[5:] == [
        "  ! x is wrong",
        "  alone against together: least cosine 0.9981 (2,049 tokens, final), 2 at 0.999 or less (16 bits)",
        "  ? SGLang never took two of the prompts into one forward, so batching was not shown",
        "  against Hugging Face, 3 tokens: aux_0 least cosine 0.50000, median 0.75, size 1.500, nearest to hidden_states[2]",
    ]


def test_a_probe_that_drew_nothing() -> None:
    said = list(of_server.probed(PROBED | {"passed": False, "failures": ["/generate answered 500"], "compared": []}))
    assert said[5:] == ["  ! /generate answered 500"]


def one_run(name: str, **known: Any) -> dict[str, Any]:
    """A run that began at 03:04:05 and ended well after a minute and a half."""
    kind = name.partition("-")[0]
    run = {"id": name, "kind": kind, "state": "exited", "created": BEGAN, "stop_asked": False, "port": None}
    return run | {"exit": {"code": 0, "signal": None, "at": BEGAN + 90.0}, "details": {}} | known


BEGAN = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))


@pytest.mark.parametrize(
    ("name", "state", "code", "signal", "asked", "said"),
    [
        ("plan-1", "running", None, None, False, "~ running"),
        ("plan-1", "died", None, None, False, "! died"),
        ("plan-1", "elsewhere", None, None, False, "elsewhere"),
        ("plan-1", "exited", 0, None, False, "+ ended"),
        ("plan-1", "exited", 0, None, True, "+ ended"),  # before it heard of the stop
        ("plan-1", "exited", 130, None, True, "- stopped"),
        ("server-1", "exited", 0, None, True, "- stopped"),
        ("server-1", "exited", None, 15, True, "- stopped"),
        ("server-1", "exited", 0, None, False, "+ ended"),
        ("server-1", "exited", None, 9, False, "! signal 9"),
        ("verify-1", "exited", 1, None, False, "! exit 1"),
    ],
)
def test_how_a_run_is(name: str, state: str, code: int | None, signal: int | None, asked: bool, said: str) -> None:
    ended = None if code is signal is None else {"code": code, "signal": signal, "at": BEGAN}
    assert of_run.signed_state(one_run(name, state=state, exit=ended, stop_asked=asked)) == said


def test_runs_as_a_table() -> None:
    runs = [
        one_run("server-20", port=30000, details={"profile": "base"}, state="running", exit=None),
        one_run("try-1", created=BEGAN - 86400.0),
        one_run("extract-3", state="died", exit=None, details={"output": "/data"}),
    ]
    assert list(of_run.runs(runs, BEGAN + 7200.0)) == [
        "server-20  ~ running  03:04:05      2 h 0 m   port 30000  base",
        "try-1      + ended    01 Jan 03:04  24 h 1 m",
        "extract-3  ! died     03:04:05      ?         /data",
    ]
    assert list(of_run.runs([], BEGAN)) == []


def test_a_run_with_its_events() -> None:
    shown = one_run("try-1") | {"events": [{"at": BEGAN, "event": "ended", "code": 0, "signal": None}]}
    said = ["try-1  + ended, began 2026-01-02 03:04:05, lasted 90 s", "  2026-01-02 03:04:05  ended with code 0"]
    assert list(of_run.run(shown)) == said
    assert next(of_run.run(shown | {"exit": None, "state": "running"})).endswith("~ running, began 2026-01-02 03:04:05")


# --- Signs ---


def test_each_sign_means_one_thing_which_the_help_says() -> None:
    meanings: dict[str, list[str]] = {}
    for table in (of_server.SIGNS, of_host.CHECK_SIGNS, of_dataset.SAMPLE_SIGNS):
        for what, sign in table.items():
            meanings.setdefault(sign, []).append(what)
    assert meanings == {
        "+": ["healthy", "pass", "written"],
        "~": ["starting", "slow_but_fine", "sent"],
        "?": ["hang_suspected", "degraded", "unknown", "warn"],  # a server of which the tap, say, is not known
        "!": ["crashed", "fail", "failed"],
        "-": ["stopped", "unknown"],  # a check that this host cannot answer
        "·": ["pending"],
    }
    assert set(meanings) == set(SIGNS) == {*SIGN_STYLES, "·"}
    assert (figures.sign(True), figures.sign(False)) == ("!", "?")
