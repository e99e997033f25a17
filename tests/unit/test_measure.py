"""Measuring without GPUs: a folder is really written to; ranks are stand-ins that hang, fail or come up too late."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import ROOT

from capture import measure
from capture.measure import MeasureJob, Reduced

TORCH = """
import os, sys, time
bfloat16 = None
class Values(list):
    def __eq__(self, other):
        return self
    def all(self):
        return SUM_IS_RIGHT
    def item(self):
        return 7
    def __getitem__(self, index):
        return self
def full(*_, **__):
    return Values()
def zeros(*_, **__):
    return Values()
class cuda:
    is_available = staticmethod(lambda: False)
"""
DISTRIBUTED = """
import os, sys, time
def init_process_group(backend, init_method, rank, world_size):
    if BEHAVIOUR == "crashes" and rank == 1:
        raise SystemExit("no device 1")
    if BEHAVIOUR == "prints":
        os.write(1, b"NCCL version 2.28.9+cuda13.0\\n")
    if BEHAVIOUR == "comes late" and rank == 1:
        time.sleep(600)
calls = []
def all_reduce(values):
    calls.append(values)
    if BEHAVIOUR == "hangs" or (BEHAVIOUR == "hangs later" and len(calls) > 1):
        time.sleep(600)
def destroy_process_group():
    pass
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Reduced]:
    """An all-reduce of two ranks whose torch behaves so; none of them is left afterwards."""
    monkeypatch.chdir(tmp_path)

    def reduced(behaviour: str = "", sum_is_right: bool = True) -> Reduced:
        package = tmp_path / "fake" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"SUM_IS_RIGHT = {sum_is_right}\n{TORCH}")
        (package / "distributed.py").write_text(f"BEHAVIOUR = {behaviour!r}\n{DISTRIBUTED}")
        env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'fake'}:{ROOT}"}
        made = measure.all_reduce(2, "gloo", env, first_seconds=1.0)
        mine = str(tmp_path)
        assert [child for child in psutil.Process().children() if mine in arguments(child)] == []
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fake"]
        return made

    return reduced


def arguments(process: psutil.Process) -> str:
    """Of one that is over, as another test may have left it, none."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_ranks_that_reduce(ranks: Callable[..., Reduced]) -> None:
    made = ranks()
    assert (made.ranks, made.backend, made.error, sorted(made.bus)) == (2, "gloo", None, list(measure.SIZES))
    assert made.first_seconds is not None


def test_what_a_library_prints_is_no_result(ranks: Callable[..., Reduced]) -> None:
    made = ranks("prints")  # as NCCL does to stdout, being asked for warnings by NCCL_DEBUG
    assert (made.error, sorted(made.bus)) == (None, list(measure.SIZES))


def test_an_all_reduce_that_hangs_is_an_answer(ranks: Callable[..., Reduced]) -> None:
    made = ranks("hangs")
    assert (made.first_seconds, made.bus) == (None, {})
    assert made.error == "the first all-reduce did not end within 1 s"


def test_an_all_reduce_that_hangs_later(ranks: Callable[..., Reduced], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MORE_SECONDS", 0.5)
    made = ranks("hangs later")
    assert made.first_seconds is not None
    assert made.error == "the first all-reduce ended, later ones did not within 0.5 s"


def test_a_rank_that_never_comes_up(ranks: Callable[..., Reduced], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "START_SECONDS", 2.0)
    assert ranks("comes late").error == "only 1 of 2 ranks came up within 2 s"


def test_a_rank_that_crashes(ranks: Callable[..., Reduced]) -> None:
    assert ranks("crashes").error == "rank 1: no device 1"


def test_a_sum_that_is_wrong(ranks: Callable[..., Reduced]) -> None:
    made = ranks(sum_is_right=False)
    assert made.error is not None
    assert made.error.endswith("the sum over 2 ranks is wrong: 7 instead of 3.0")


def test_a_folder_is_written_to_and_nothing_stays(tmp_path: Path) -> None:
    made = measure.write(tmp_path / "out" / "deep", most=30_000_000)
    assert (made.path, made.bytes, made.error) == (str(tmp_path), 30_000_000, None)
    assert made.seconds is not None
    assert made.seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to() -> None:
    made = measure.write(Path("/proc/self"), 100)
    assert made.error is not None
    assert made.error.startswith("/proc/self: ")


def test_no_more_than_a_quarter_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = os.statvfs_result((4096, 4096, 1000, 1000, 1000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    assert measure.write(tmp_path, 10**9).bytes == 4096 * 1000 // 4


def test_a_host_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "visible_gpus", lambda: 0)
    monkeypatch.setattr(measure, "WRITE_BYTES", 1_000_000)
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 7168, "num_hidden_layers": 61}}')
    told: list[str] = []
    job = MeasureJob(state=str(tmp_path), output=str(tmp_path), model=str(tmp_path))
    made = measure.measure(job, told.append, lambda progress: told.append(progress["what"]))
    assert (made.gpus, made.copies, made.all_reduce, made.shape) == (0, [], None, (61, 7168))
    assert len(made.disks) == 2
    assert told == [f"writing to {tmp_path}"] * 4


def test_copies_that_fail_say_why(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('CUDA is out of memory')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    assert measure.copy(env) == ([], "CUDA is out of memory")


def test_a_model_that_says_nothing_of_its_shape(tmp_path: Path) -> None:
    assert measure.model_shape(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert measure.model_shape(str(tmp_path)) is None
