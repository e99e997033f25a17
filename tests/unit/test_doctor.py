"""The doctor on the machine: each check passed, warned, failed and not known; one that hangs; and nothing is changed."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import until

from backends import payloads
from backends.doctor import disks, leftovers, machine, network, software
from backends.doctor.examine import SECONDS, Doctor
from backends.doctor.report import GROUPS, Asked, Check, Place, amount, judge
from backends.ports import free_port
from backends.runs import Run, Runs
from backends.sample import Disk

ASKED = Asked()
GB = 10**9


@pytest.fixture
def place(all_runs: Runs, tmp_path: Path) -> Place:
    payload = tmp_path / "payloads" / "0123"
    payload.mkdir(parents=True)
    return Place(all_runs, payload, tmp_path / "root")


def put(place: Place, **files: str) -> None:
    """Files of the kernel's, by their path with __ for slashes."""
    for name, text in files.items():
        path = place.path(name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def came(check: Check | list[Check]) -> tuple[str, str]:
    """Status and what was seen, of one check that says what to do unless it passes."""
    (only,) = check if isinstance(check, list) else [check]
    assert (only.status == "pass") == (not only.remedy) or only.status == "unknown"
    return only.status, only.seen


# --- Asking ---


def test_each_question_is_asked_and_answers_stand_by_group(place: Place) -> None:
    questions = {
        "leftovers.one": lambda place, asked: judge("leftovers.one", "nothing", ""),
        "gpu.some": lambda place, asked: [judge("gpu.a", "1", ""), judge("gpu.b", f"port {asked.port}", "")],
        "host.none": lambda place, asked: [],
    }
    checks = Doctor(place, questions).examine(Asked(port=5))
    assert [(check.id, check.seen) for check in checks] == [
        ("gpu.a", "1"),
        ("gpu.b", "port 5"),
        ("leftovers.one", "nothing"),
    ]


def test_a_question_that_hangs_or_breaks_costs_its_own_answer_alone(place: Place) -> None:
    over, asked_times = threading.Event(), []

    def hangs(place: Place, asked: Asked) -> list[Check]:
        asked_times.append(1)
        over.wait()
        return [judge("host.hangs", "well again", "")]

    def breaks(place: Place, asked: Asked) -> list[Check]:
        raise RuntimeError("no such kernel")

    fine = {f"gpu.{number}": lambda place, asked, number=number: judge(f"gpu.{number}", "", "") for number in range(20)}
    doctor = Doctor(place, {**fine, "host.hangs": hangs, "host.breaks": breaks}, seconds=0.2)
    found = {check.id: check for check in doctor.examine(ASKED)}
    assert len(found) == 22
    assert all(found[name].status == "pass" for name in fine)
    assert found["host.breaks"].status == "unknown"
    assert found["host.breaks"].seen == "could not be looked at: RuntimeError: no such kernel"
    assert (found["host.hangs"].status, found["host.hangs"].seen) == ("unknown", "has not answered for 0 s")
    doctor.examine(ASKED)
    assert len(asked_times) == 1  # while it hangs, it is not asked once more
    over.set()
    until(lambda: {check.id: check for check in doctor.examine(ASKED)}["host.hangs"].status == "pass")


def test_all_of_it_takes_less_than_five_seconds_even_where_something_hangs(place: Place) -> None:
    over = threading.Event()
    hanging = {name: lambda place, asked: over.wait() for name in ("gpu.nvml", "host.memory", "disks.output")}
    begun = time.monotonic()
    checks = Doctor(place, hanging).examine(ASKED)
    assert time.monotonic() - begun < 5.0
    assert SECONDS < 5.0
    assert [check.status for check in checks] == ["unknown"] * 3
    over.set()


def snapshot(folder: Path) -> dict[str, Any]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def test_nothing_is_changed_and_every_answer_is_whole(place: Place, start: Callable[..., Run], home: Path) -> None:
    over = start("verify", ["/bin/true"])
    until(lambda: over.exit)
    os.makedirs(home / "shm" / "server-of-nobody")
    before = snapshot(home)
    asked = Asked(output=str(home / "out"), dump_root=str(home / "shm"), port=free_port(), model=str(home))
    checks = Doctor(Place(place.runs, place.payload)).examine(asked)
    assert snapshot(home) == before
    assert len({check.id for check in checks}) == len(checks) > 20
    for check in checks:
        assert (check.group, bool(check.seen)) == (check.id.partition(".")[0], True)
        assert check.group in GROUPS
        assert not check.remedy if check.status == "pass" else check.remedy or check.status == "unknown"


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (8_388_608, "8.39 MB"), (95.6 * GB, "95.6 GB"), (3e15, "3e+03 TB")]
)  # fmt: skip
def test_amounts(count: float, said: str) -> None:
    assert amount(count) == said


# --- The machine ---

MEMINFO = "MemTotal: 1000000000 kB\nMemAvailable: {} kB\nSwapTotal: 8000000 kB\nSwapFree: {} kB\nHugePages_Total: {}\nHugepagesize: 2048 kB"


def meminfo(place: Place, available: int = 900_000_000, swap_free: int = 8_000_000, pages: int = 0) -> None:
    put(place, __proc__meminfo=MEMINFO.format(available, swap_free, pages))


def test_main_memory(place: Place) -> None:
    assert came(machine.memory(place, ASKED))[0] == "unknown"
    meminfo(place, 5_000_000)
    assert came(machine.memory(place, ASKED)) == ("pass", "5.12 GB available, of 1.02 TB")
    put(place, __dev__nvidiactl="")
    assert came(machine.memory(place, ASKED))[0] == "fail"
    meminfo(place)
    assert came(machine.memory(place, ASKED))[0] == "pass"


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_container(place: Place, version: int) -> None:
    """What lies in it of files that were read is free: 20 GB are left, not 5."""
    meminfo(place)
    put(place, __dev__nvidiactl="")
    if version == 2:
        put(place, __proc__self__cgroup="0::/docker/one")
        put(place, __sys__fs__cgroup__docker__memory_max="")
        folder = place.path("/sys/fs/cgroup/docker")
        (folder / "memory.max").write_text(f"{40 * GB}\n")
        (folder / "memory.current").write_text(f"{35 * GB}\n")
        (folder / "memory.stat").write_text(f"anon {19 * GB}\ninactive_file {15 * GB}\nactive_file {GB}\n")
        (folder / "one").mkdir()
        (folder / "one" / "memory.max").write_text("max\n")
        (folder / "one" / "memory.current").write_text("5\n")
    else:
        folder = place.path("/sys/fs/cgroup/memory")
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{40 * GB}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{35 * GB}\n")
        (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {15 * GB}\n")
    status, seen = came(machine.memory(place, ASKED))
    assert (status, seen) == ("fail", "20 GB available within the container's limit, of 1.02 TB")


def test_swap(place: Place) -> None:
    assert came(machine.swap(place, ASKED))[0] == "unknown"
    meminfo(place, swap_free=7_500_000)
    assert came(machine.swap(place, ASKED)) == ("pass", "512 MB of 8.19 GB swap in use")
    meminfo(place, swap_free=1_000_000)
    assert came(machine.swap(place, ASKED))[0] == "warn"


def test_huge_pages(place: Place) -> None:
    assert came(machine.huge_pages(place, ASKED))[0] == "unknown"
    meminfo(place)
    assert came(machine.huge_pages(place, ASKED))[0] == "pass"
    meminfo(place, pages=1024)
    assert came(machine.huge_pages(place, ASKED)) == ("warn", "2.15 GB reserved for huge pages")


@pytest.mark.parametrize(
    ("soft", "hard", "status"),
    [(1024, 1_048_576, "pass"), (1024, -1, "pass"), (1024, 20_000, "warn"), (1024, 4_000, "fail")],
)
def test_open_files(place: Place, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    check = machine.open_files(place, ASKED)
    assert came(check)[0] == status
    assert check.numbers == {"soft": soft, "hard": hard}


@pytest.mark.parametrize(("soft", "status"), [(resource.RLIM_INFINITY, "pass"), (65_536, "warn")])
def test_locked_memory(place: Place, monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    assert came(machine.locked_memory(place, ASKED))[0] == status


def test_the_governor(place: Place) -> None:
    assert came(machine.governor(place, ASKED))[0] == "unknown"
    for core, name in enumerate(["performance", "performance"]):
        put(place, **{f"__sys__devices__system__cpu__cpu{core}__cpufreq__scaling_governor": name})
    assert came(machine.governor(place, ASKED)) == ("pass", "CPU governor: performance")
    put(place, __sys__devices__system__cpu__cpu1__cpufreq__scaling_governor="powersave")
    assert came(machine.governor(place, ASKED)) == ("warn", "CPU governor: performance, powersave")


def test_numa(place: Place) -> None:
    assert came(machine.numa(place, ASKED))[0] == "unknown"
    put(place, __proc__sys__kernel__numa_balancing="1")
    place.path("/sys/devices/system/node/node0").mkdir(parents=True)
    assert came(machine.numa(place, ASKED))[0] == "pass"
    place.path("/sys/devices/system/node/node1").mkdir()
    assert came(machine.numa(place, ASKED)) == ("warn", "NUMA nodes: 2, automatic balancing on")
    put(place, __proc__sys__kernel__numa_balancing="0")
    assert came(machine.numa(place, ASKED))[0] == "pass"


@pytest.mark.parametrize(("state", "status"), [(0, "pass"), (1, "pass"), (5, "warn"), (-1, "unknown")])
def test_who_keeps_the_clock(place: Place, monkeypatch: pytest.MonkeyPatch, state: int, status: str) -> None:
    monkeypatch.setattr(machine, "_kernel_clock", lambda: state)
    assert came(machine.clock(place, ASKED))[0] == status


def test_the_kernel_is_asked_about_its_clock() -> None:
    assert machine._kernel_clock() in range(-1, 6)


def test_whether_runs_outlive_the_session(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "danger", lambda: None)
    assert came(machine.survival(place, ASKED))[0] == "pass"
    monkeypatch.setattr(machine, "danger", lambda: "this host ends all: have `loginctl enable-linger me` run")
    check = machine.survival(place, ASKED)
    assert came(check) == ("fail", "this host ends all")
    assert check.remedy == "have `loginctl enable-linger me` run"


# --- Network ---


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_port(place: Place, taken: int, start: Callable[..., Run]) -> None:
    assert came(network.port(place, Asked(port=taken))) == ("fail", f"port {taken} is taken by another process")
    port = free_port()
    assert came(network.port(place, Asked(port=port))) == ("pass", f"port {port} is free")
    put(place, __proc__sys__net__ipv4__ip_local_port_range="1024\t65000")
    assert came(network.port(place, Asked(port=port)))[0] == ("warn" if port <= 65000 else "pass")
    server = start("server", port=port)
    assert came(network.port(place, Asked(port=port))) == ("pass", f"our server {server.id} has port {port}")


def test_a_port_for_root_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert came(network.port(place, Asked(port=80))) == ("fail", "port 80 is for root alone")


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, "pass"),
        ({"NCCL_DEBUG": "WARN"}, "pass"),
        ({"NCCL_PROTO": "ll"}, "warn"),
        ({"NCCL_P2P_DISABLE": "1"}, "warn"),
    ],
)
def test_settings_of_nccl(place: Place, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], status: str) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert came(network.nccl_settings(place, ASKED))[0] == status


# --- Disks ---


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what every path is on."""

    def says(free: float | None, total: float = 1000 * GB, filesystem: str = "ext4") -> None:
        known = None if free is None else int(free)
        monkeypatch.setattr(disks, "read_disk", lambda path: Disk(path, known and int(total), known, filesystem))

    return says


@pytest.fixture
def kimi(tmp_path: Path) -> Asked:
    """Of which a slot of the arena takes 587 MB."""
    folder = tmp_path / "kimi"
    folder.mkdir()
    (folder / "config.json").write_text('{"text_config": {"hidden_size": 7168, "num_hidden_layers": 61}}')
    return Asked(model=str(folder), args={"max-prefill-tokens": 8192})


@pytest.mark.parametrize(
    ("free", "total", "filesystem", "status"),
    [
        (60 * GB, 64 * GB, "tmpfs", "pass"),
        (4.6 * GB, 64 * GB, "tmpfs", "warn"),
        (1.1 * GB, 64 * GB, "tmpfs", "fail"),
        (60 * GB, 64 * GB, "ext4", "warn"),
        (0.064 * GB, 0.064 * GB, "tmpfs", "fail"),
        (None, 0, "tmpfs", "unknown"),
    ],
)
def test_room_for_dumps(
    place: Place, on_disk: Callable[..., None], kimi: Asked, free: float, total: float, filesystem: str, status: str
) -> None:
    on_disk(free, total, filesystem)
    got, seen = came(disks.dumps(place, kimi))
    assert got == status
    assert status == "unknown" or "a slot of the arena takes 587 MB, 4 are wanted" in seen


def test_room_for_dumps_of_no_model_in_particular(place: Place, on_disk: Callable[..., None]) -> None:
    on_disk(1.1 * GB, 64 * GB, "tmpfs")
    assert came(disks.dumps(place, ASKED)) == ("pass", "/dev/shm: 1.1 GB free of 64 GB, tmpfs")
    assert came(disks.dumps(place, Asked(model="/nowhere", args={"max-prefill-tokens": 8192})))[0] == "pass"


@pytest.mark.parametrize(
    ("free", "filesystem", "status"),
    [
        (10 * GB, "ext4", "pass"),
        (1 * GB, "ext4", "warn"),
        (0.1 * GB, "ext4", "fail"),
        (10 * GB, "nfs4", "warn"),
        (None, "ext4", "unknown"),
    ],
)
def test_room_for_runs(
    place: Place, on_disk: Callable[..., None], free: float | None, filesystem: str, status: str
) -> None:
    on_disk(free, filesystem=filesystem)
    assert came(disks.state(place, ASKED))[0] == status


PLAN = {"samples": 10_000, "total_bytes": {"native": 100 * GB, "specforge": 80 * GB}}


@pytest.mark.parametrize(
    ("free", "filesystem", "plan", "status"),
    [
        (200 * GB, "ext4", PLAN, "pass"),
        (197 * GB, "ext4", PLAN, "fail"),
        (200 * GB, "lustre", PLAN, "warn"),
        (200 * GB, "tmpfs", PLAN, "fail"),
        (200 * GB, "ext4", None, "unknown"),
        (None, "ext4", PLAN, "unknown"),
    ],
)
def test_room_for_a_dataset(
    on_disk: Callable[..., None], tmp_path: Path, free: float, filesystem: str, plan: Any, status: str
) -> None:
    on_disk(free, filesystem=filesystem)
    check = disks.judge_output(tmp_path / "out", plan)
    assert came(check)[0] == status
    if status in ("pass", "warn"):
        assert check.seen.endswith("; the plan takes 180 GB in 20,000 files")


def test_too_few_inodes_for_a_dataset(
    on_disk: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(200 * GB)
    few = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 30_000, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    check = disks.judge_output(tmp_path, PLAN)
    assert (check.status, check.remedy) == ("warn", "choose a file system with more inodes")


def test_a_dataset_where_nothing_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert came(disks.judge_output(tmp_path / "file" / "out", PLAN))[0] == "fail"


def test_the_newest_plan_for_a_folder(place: Place, start: Callable[..., Run], home: Path) -> None:
    assert disks.output(place, ASKED) == []
    for output, size in (("/a", 1), ("/a", 2), (f"{home}/data", 3), ("/a", None)):
        run = start("plan", ["/bin/true"], details={"output": output})
        result = {"error": "the rows are gone"} if size is None else {"samples": 1, "total_bytes": {"native": size}}
        (run.folder / "result.json").write_text(json.dumps(result))
    found = disks.planned(place.runs, "/a")
    assert found is not None
    assert found["total_bytes"] == {"native": 2}
    assert disks.planned(place.runs, "/b") is None
    (check,) = disks.output(place, Asked(output="data"))
    assert "the plan takes 3 B in 1 files" in check.seen


# --- Software ---


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a distribution that is there, and wants others."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def made(name: str, version: str, *wants: str) -> None:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *[f"Requires-Dist: {want}" for want in wants],
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    return made


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.5.11", "pass"),
        ("0.5.23", "pass"),
        ("0.5.23.post1", "pass"),
        ("0.5.24", "warn"),
        ("0.5.9", "fail"),
        (None, "fail"),
    ],
)
def test_the_version_of_sglang(place: Place, installed: Callable[..., None], version: str | None, status: str) -> None:
    if version:
        installed("sglang", version)
    assert came(software.sglang(place, ASKED))[0] == status


def test_packages_that_sglang_pins(place: Place, installed: Callable[..., None]) -> None:
    assert software.pins(place, ASKED) == []
    installed("sglang", "0.5.23", "torch==2.14.1", "left[cu13]==1.0", "diffusers==0.37.0; extra == 'diffusion'", "tqdm")
    installed("left", "1.0")
    installed("torch", "2.14.1+cu130")
    assert came(software.pins(place, ASKED)) == ("pass", "all 2 packages that SGLang pins are as it wants them")


def test_packages_that_are_not_what_sglang_wants(place: Place, installed: Callable[..., None]) -> None:
    installed("sglang", "0.5.23", "aaa==1", "torch==2.14.1")
    installed("torch", "2.11.0")
    put(place, dev__nvidiactl="")
    (check,) = software.pins(place, ASKED)
    assert came(check) == ("warn", "2 of 2 pinned packages differ: torch 2.11.0 (wants 2.14.1), aaa missing (wants 1)")


@pytest.mark.parametrize(
    ("kernel", "torch", "gpu", "asked", "status"),
    [
        (None, "2.11.0", False, ASKED, "pass"),
        ("sglang-kernel", "2.11.0+cpu", False, ASKED, "pass"),
        (None, "2.11.0", True, Asked(embedded=True), "pass"),
        (None, "2.11.0", True, ASKED, "warn"),  # a GPU host that lacks the kernels
        ("sglang-kernel", "2.11.0", False, ASKED, "warn"),  # an image for GPUs, looked at without one
        ("sgl-kernel", "2.11.0", False, ASKED, "warn"),
    ],
)
def test_a_cpu_engine_lacks_what_is_for_gpus(
    place: Place, installed: Callable[..., None], kernel: str | None, torch: str, gpu: bool, asked: Asked, status: str
) -> None:
    installed("sglang", "0.5.23", "torch==2.14.1", "flashinfer_python==0.7.2")
    installed("torch", torch)
    if kernel:
        installed(kernel, "0.4")
    if gpu:
        put(place, dev__nvidiactl="")
    found, seen = came(software.pins(place, asked))
    assert found == status
    said = "a CPU engine: 2 of 2 pinned packages differ, as SGLang wants them for GPUs"
    assert (seen == said) == (status == "pass")


def test_nccl(place: Place, installed: Callable[..., None]) -> None:
    assert software.nccl(place, ASKED) == []
    installed("torch", "2.14.1", 'nvidia-nccl-cu13==2.30.7; platform_system == "Linux"')
    assert came(software.nccl(place, ASKED)) == ("fail", "NCCL is missing, torch wants 2.30.7")
    installed("nvidia-nccl-cu13", "2.30.7")
    assert came(software.nccl(place, ASKED)) == ("pass", "NCCL 2.30.7, torch wants 2.30.7")


def test_another_nccl(place: Place, installed: Callable[..., None]) -> None:
    installed("torch", "2.14.1", 'nvidia-nccl-cu13==2.30.7; platform_system == "Linux"')
    installed("nvidia-nccl-cu13", "2.28.3")
    assert came(software.nccl(place, ASKED)) == ("warn", "NCCL 2.28.3, torch wants 2.30.7")


def test_the_cuda_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.torch_cuda() is None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text("__all__ = ['cuda']\ncuda: Optional[str] = '13.0'\nhip = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert software.torch_cuda() == "13.0"
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")
    assert software.torch_cuda() is None


def test_code_that_is_compiled_at_every_start(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert software.bytecode(place, ASKED) == []  # there is no SGLang
    source = tmp_path / "sglang" / "srt" / "server_args.py"
    source.parent.mkdir(parents=True)
    source.touch()
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert came(software.bytecode(place, ASKED))[0] == "pass"
    monkeypatch.setattr(software.os, "access", lambda path, mode: path != source.parent)
    status, seen = came(software.bytecode(place, ASKED))
    assert (status, seen.endswith(f"at every start: {source.parent} may not be written")) == ("warn", True)
    monkeypatch.setattr(software.sys, "pycache_prefix", str(tmp_path / "cache"))
    assert came(software.bytecode(place, ASKED))[0] == "pass"
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    status, seen = came(software.bytecode(place, ASKED))
    assert (status, seen.endswith("at every start: PYTHONDONTWRITEBYTECODE is set")) == ("warn", True)
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert came(software.bytecode(place, ASKED)) == ("pass", "SGLang's Python code is compiled already")


def test_py_spy(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert came(software.py_spy(place, ASKED)) == ("warn", "py-spy is not beside SGLang's Python")
    (tmp_path / "py-spy").touch(mode=0o755)
    put(place, __proc__self__status="Name:\tpython\nCapEff:\t0000000000000000")
    assert came(software.py_spy(place, ASKED))[0] == "pass"
    put(place, __proc__sys__kernel__yama__ptrace_scope="1")
    assert came(software.py_spy(place, ASKED)) == (
        "warn",
        "py-spy is there; the kernel lets it look into those of a process's own children (ptrace_scope 1)",
    )
    put(place, __proc__self__status="Name:\tpython\nCapEff:\t0000000000080000")
    assert came(software.py_spy(place, ASKED))[0] == "pass"


def test_a_models_files(place: Place, tmp_path: Path) -> None:
    asked = Asked(model=str(tmp_path / "model"))
    assert software.model_files(place, ASKED) == []
    assert software.model_files(place, Asked(model="embedded:llama")) == []
    assert came(software.model_files(place, asked))[0] == "fail"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert came(software.model_files(place, asked))[1].endswith("has neither model.safetensors nor an index")
    (folder / "model.safetensors").touch()
    assert came(software.model_files(place, asked)) == ("pass", "model.safetensors, in one piece")
    index = {"metadata": {"total_size": 2000}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "one.safetensors").write_bytes(bytes(1500))
    assert came(software.model_files(place, asked)) == ("fail", "1 of 2 shards are missing: two.safetensors")
    (folder / "two.safetensors").write_bytes(bytes(100))
    assert came(software.model_files(place, asked)) == ("fail", "2 shards, 1.6 kB, and the index says 2 kB: one is cut")
    (folder / "two.safetensors").write_bytes(bytes(600))
    assert came(software.model_files(place, asked)) == ("pass", "2 shards, 2.1 kB")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert came(software.model_files(place, asked))[0] == "fail"


# --- Leftovers ---


@pytest.fixture
def sglang_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process that is titled as SGLang titles its own; no other one is seen."""
    begun: list[subprocess.Popen[bytes]] = []
    found = leftovers.sglang_processes

    def started(run: str = "") -> subprocess.Popen[bytes]:
        argv = ["sglang::scheduler_TP0", "600"]
        begun.append(subprocess.Popen(argv, executable="/bin/sleep", env={"LAYERTAP_RUN": run} if run else {}))
        until(lambda: begun[-1].pid in [process.pid for process in found()])
        return begun[-1]

    def ours() -> list[Any]:
        return [process for process in found() if process.pid in [one.pid for one in begun]]

    monkeypatch.setattr(leftovers, "sglang_processes", ours)
    yield started
    for process in begun:
        process.kill()
        process.wait()


def test_servers_that_nobody_watches(
    place: Place, start: Callable[..., Run], sglang_process: Callable[..., subprocess.Popen[bytes]]
) -> None:
    assert came(leftovers.servers(place, ASKED)) == ("pass", "none of ours runs")
    live = start("server")
    sglang_process(live.id)
    assert came(leftovers.servers(place, ASKED)) == ("pass", f"ours: {live.id}")
    foreign = sglang_process()
    status, seen = came(leftovers.servers(place, ASKED))
    assert status == "warn"
    assert f"1 SGLang processes that are not ours: process {foreign.pid} of " in seen
    dead = start("server", ["/bin/true"])
    until(lambda: dead.exit)
    orphan = sglang_process(dead.id)
    status, seen = came(leftovers.servers(place, ASKED))
    assert status == "fail"
    assert f"left by dead runs: process {orphan.pid} of {dead.id}" in seen


def test_dumps_of_a_server_that_is_gone(place: Place, start: Callable[..., Run], home: Path) -> None:
    root = home / "dumps"
    asked = Asked(dump_root=str(root))
    assert came(leftovers.dumps(place, asked)) == ("pass", f"{root}: no folder whose server is gone")
    live, dead = start("server"), start("server", ["/bin/true"])
    until(lambda: dead.exit)
    for folder in (root / live.id, root / dead.id / "req_1", root / "server-of-another-state"):
        folder.mkdir(parents=True)
    (root / dead.id / "req_1" / "final.pt").write_bytes(bytes(2000))
    check = leftovers.dumps(place, asked)
    assert came(check) == ("warn", f"{root}: 2 folders whose server is gone, 2 kB")
    assert check.numbers == {"folders": 2, "bytes": 2000}


def test_shared_memory_of_killed_servers(place: Place, sglang_process: Callable[..., subprocess.Popen[bytes]]) -> None:
    folder = place.path("/dev/shm")
    folder.mkdir(parents=True)
    (folder / "sem.mp-abc").touch()
    (folder / f"sgl_shm_mq_{os.getpid()}_1d2f5238").touch()
    assert came(leftovers.shared_memory(place, ASKED)) == ("pass", f"{folder}: no segment of a killed SGLang server")
    (folder / "sglang_loads_016ae3147ab4_f49cad05.shm").write_bytes(bytes(16_396))
    (folder / "sgl_shm_mq_99999999_1d2f5238").touch()
    check = leftovers.shared_memory(place, ASKED)
    assert came(check) == ("warn", f"{folder}: 2 segments of killed SGLang servers, 16.4 kB")
    assert check.remedy == f"rm {folder}/sgl_shm_mq_99999999_1d2f5238 {folder}/sglang_loads_*.shm"
    sglang_process()
    assert leftovers.shared_memory(place, ASKED).remedy.startswith("once no SGLang runs: rm ")
    os.utime(folder / "sglang_loads_016ae3147ab4_f49cad05.shm", (time.time() + 60, time.time() + 60))
    assert leftovers.shared_memory(place, ASKED).numbers["segments"] == 1  # a live server may use the newer one


def test_old_payloads(place: Place) -> None:
    folder = place.payload.parent
    assert came(leftovers.old_payloads(place, ASKED))[0] == "pass"
    (folder / "old").mkdir()
    os.utime(folder / "old", (0, 0))
    assert came(leftovers.old_payloads(place, ASKED)) == (
        "warn",
        f"{folder}: 1 of 2 not used for 30 days",
    )
    payloads.prune(place.payload, place.runs)
    assert came(leftovers.old_payloads(place, ASKED))[0] == "pass"
