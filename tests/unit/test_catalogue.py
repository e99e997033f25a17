"""The catalogue of signatures: every entry matches what it shows, benign lines mean nothing, a bad entry names itself."""

from __future__ import annotations

import pytest

from backends.verdict.catalogue import CatalogueError, catalogue, load

ENTRIES = catalogue().signatures
GOOD = """
[one]
kind = "crash"
lines = ["no luck"]
examples = ["there was no luck"]
evidence = "e"
cause = "c"
remedy = "r"
source = ["sglang#1"]
"""


def first(line: str, phase: str | None = "ready") -> str | None:
    return next((one.id for one in catalogue().of_line(line, phase)), None)


def test_there_are_enough_of_each_kind() -> None:
    kinds = [one.kind for one in ENTRIES]
    assert len(kinds) - kinds.count("benign") >= 60
    assert set(kinds) == {"crash", "hang", "degraded", "slow", "watch", "benign"}


@pytest.mark.parametrize("one", [one for one in ENTRIES if one.kind != "benign"], ids=lambda one: one.id)
def test_an_entry_matches_its_lines_or_rests_on_evidence(one) -> None:
    phase = one.phases[0] if one.phases else "ready"
    for example in one.examples:
        assert one.id in [found.id for found in catalogue().of_line(example, phase)]
    assert one.examples or one.needs or one.kind == "watch"
    assert one.source


@pytest.mark.parametrize("line", [line for one in ENTRIES if one.kind == "benign" for line in one.examples])
def test_a_benign_line_means_nothing(line: str) -> None:
    for phase in (None, "dist", "weights", "graphs", "ready"):
        assert first(line, phase) is None


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(model_path='/m', watchdog_timeout=300, disable_custom_all_reduce=True)",
        "Init torch distributed ends. elapsed=2.51 s, mem usage=0.61 GB",
        "Load weight end. elapsed=312.10 s, type=KimiK25ForConditionalGeneration, avail mem=18.21 GB, mem usage=76.0 GB.",
        "Prefill batch, #new-seq: 4, #new-token: 8190, #cached-token: 0, token usage: 0.99, #running-req: 48, #queue-req: 9",
        "Decode batch, #running-req: 1, #token: 12, cuda graph: True, gen throughput (token/s): 3.1, #queue-req: 0",
        "Registering 1680 cuda graph addresses",
        'INFO:     127.0.0.1:52348 - "POST /generate HTTP/1.1" 200 OK',
        "Subprocess scheduler_0 (pid=7) crashed with exit code -15. Triggering SIGQUIT",
    ],
)
def test_a_normal_line_means_nothing(line: str) -> None:
    assert first(line) is None


@pytest.mark.parametrize(
    ("line", "phase", "first_of"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "weights", "cuda-oom-load"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "ready", "runtime-oom"),
        ("Exception: Capture cuda graph failed: CUDA out of memory", "graphs", "cuda-oom-capture"),
        ("Exception: Capture cuda graph failed: invalid argument", "graphs", "capture-failed-other"),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).", "weights", "host-oom-kill"),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: 1).", "weights", "child-died"),
        ("OSError: [Errno 28] No space left on device", "weights", "disk-full"),
        ("posix_fallocate failed: No space left on device", "dist", "shm-too-small"),
        (
            "ValueError: rpc_port at 1 is not available in 30 seconds. rpc_port is used by a process already.",
            None,
            "plan-port-in-use",
        ),
    ],
)
def test_the_specific_stands_before_the_general(line: str, phase: str, first_of: str) -> None:
    assert first(line, phase) == first_of


def test_a_stack_is_told_by_its_functions() -> None:
    named = {
        "idle": ["recv_requests", "event_loop_normal"],
        "loads": ["safetensors_weights_iterator", "load_model"],
        "barrier": ["monitored_barrier", "dist_barrier_after_load"],
    }
    found = {name: catalogue().of_stack(functions) for name, functions in named.items()}
    assert {name: one.id if one else None for name, one in found.items()} == {
        "idle": "benign-idle-loop",
        "loads": "weights-slow-io",
        "barrier": "rank-skew-load",
    }
    assert catalogue().of_stack(["sleep"]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[one]", "[one"), "signatures.toml: "),
        (('kind = "crash"', 'kind = "odd"'), "one: Invalid enum value 'odd'"),
        (('cause = "c"', 'cuase = "c"'), "one: Object contains unknown field `cuase`"),
        (('cause = "c"\n', ""), "one: Object missing required field `cause`"),
        (('cause = "c"', 'cause = ""'), "one: cause, remedy and evidence must be said"),
        (('examples = ["there was no luck"]', 'examples = ["luck"]'), "one: no example shows the line 'no luck'"),
        (("examples = [", 'examples = ["another", '), "one: it does not match its example 'another'"),
        (('lines = ["no luck"]', 'lines = [{ text = "no", pattern = "(" }]'), "one: the pattern '(': missing )"),
        (('lines = ["no luck"]', 'lines = [""]'), "one: a line without text would be looked for everywhere"),
        (
            ('lines = ["no luck"]\nexamples = ["there was no luck"]', ""),
            "one: it has neither lines nor needs nor frames",
        ),
        (('kind = "crash"', 'kind = "watch"'), "one: what the watch of a run sees is decided by its rule in alarms.py"),
        (('source = ["sglang#1"]', "source = []"), "one: its source is missing"),
        (
            ('source = ["sglang#1"]', 'source = ["x"]\nphases = ["wieghts"]'),
            "one: no phase is called wieghts; there are launch",
        ),
        (('source = ["sglang#1"]', 'source = ["x"]\nneeds = ["luck"]'), "one: Invalid enum value 'luck'"),
        (('kind = "crash"', 'kind = "hang"'), "one: a hang is never told by lines alone; it needs evidence"),
        (
            ('kind = "crash"', 'kind = "crash"\ntraceback = true'),
            "one: only what follows a benign line can be benign too",
        ),
        (("[one]", "one = 3\n[two]"), "one: "),
    ],
)
def test_a_bad_entry_names_itself(change: tuple[str, str], says: str) -> None:
    with pytest.raises(CatalogueError) as error:
        load(GOOD.replace(*change))
    assert says in str(error.value)


def test_an_entry_needs_no_code() -> None:
    found = load(GOOD)
    assert [one.id for one in found.of_line("there was no luck at all", None)] == ["one"]
    assert found.needles == ("no luck",)


def test_an_argument_can_be_taken_away_where_it_came_from() -> None:
    """From the profile, or from the command line."""
    (bad,) = [one for one in ENTRIES if one.id == "bad-flag"]
    assert bad.remedy and bad.remedy.endswith("take the argument away, in the profile or with --set NAME=unset")
