"""GPUs: what NVML says and what it will not say, one GPU lost among others, a driver loaded anew, and whose processes."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_nvml import FUNCTION_NOT_FOUND, LOST, NOT_SUPPORTED, UNINITIALIZED, Card, FakeNvml, process
from helpers import ROOT, Clock, until

from backends import gpus
from backends.gpus import Gpus, Namespace, Xid
from backends.processes import open_files, title


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """NVML with two GPUs."""
    fake = FakeNvml(Card(0), Card(1))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpus, "XID_WAIT_MS", 5)
    monkeypatch.setattr(gpus, "XID_PAUSE", 0.005)
    return fake


@pytest.fixture
def all_gpus(clock: Clock, nvml: FakeNvml) -> Iterator[Gpus]:
    found = Gpus(clock)
    yield found
    found.close()
    until(lambda: not watchers(), "the watcher ends")
    assert nvml.users == 0


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "layertap-xid"]


def fields(gpu: gpus.Gpu) -> dict[str, Any]:
    return dict(msgspec.to_builtins(gpu))


WHOLE = {
    "index": 0,
    "error": None,
    "uuid": "GPU-0",
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "utilisation_percent": 98,
    "memory_used_bytes": 94_598_373_376,
    "memory_total_bytes": 102_641_958_912,
    "power_watts": 412.345,
    "power_limit_watts": 600.0,
    "temperature_c": 71,
    "sm_clock_mhz": 2280,
    "max_sm_clock_mhz": 2430,
    "throttle": ["sw_power_cap"],
    "pcie_generation": 5,
    "pcie_max_generation": 5,
    "pcie_width": 16,
    "pcie_max_width": 16,
    "pcie_replays": 3,
    "ecc_uncorrected": 0,
    "remapped_pending": False,
    "remapped_failed": False,
    "xid": [],
    "mig": False,
    "processes": [],
}


# --- What NVML says ---


def test_a_gpu_as_it_is_shown(all_gpus: Gpus) -> None:
    sample = all_gpus.sample()
    assert (sample.state, sample.why, sample.driver, sample.cuda) == ("ok", None, "580.159.03", "13.1")
    assert [gpu.uuid for gpu in sample.gpus] == ["GPU-0", "GPU-1"]
    assert fields(sample.gpus[0]) == WHOLE


FIELDS_OF = {
    "nvmlDeviceGetUUID": {"uuid", "xid"},
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetUtilizationRates": {"utilisation_percent"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"max_sm_clock_mhz"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_max_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_max_width"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie_replays"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_uncorrected"},
    "nvmlDeviceGetRemappedRows": {"remapped_pending", "remapped_failed"},
    "nvmlDeviceGetMigMode": {"mig"},
    "nvmlDeviceRegisterEvents": {"xid"},
}


@pytest.mark.parametrize("error", [NOT_SUPPORTED, 4, 999])
@pytest.mark.parametrize("call", FIELDS_OF)
def test_a_call_that_fails_costs_its_own_fields_alone(all_gpus: Gpus, nvml: FakeNvml, call: str, error: int) -> None:
    nvml.cards[0].failing[call] = error
    sample = all_gpus.sample()
    assert sample.state == "ok"
    assert fields(sample.gpus[0]) == WHOLE | dict.fromkeys(FIELDS_OF[call])
    assert sample.gpus[1].uuid == "GPU-1"


def test_nothing_is_supported(all_gpus: Gpus, nvml: FakeNvml) -> None:
    nvml.cards[0].failing = dict.fromkeys(nvml.cards[0].values, NOT_SUPPORTED)
    (gpu, other) = all_gpus.sample().gpus
    assert fields(gpu) == dict.fromkeys(WHOLE) | {"index": 0}
    assert other.temperature_c == 71


def test_an_older_driver(all_gpus: Gpus, nvml: FakeNvml) -> None:
    """It has other names for two readings."""
    nvml.failing |= {
        "nvmlDeviceGetTemperatureV": FUNCTION_NOT_FOUND,
        "nvmlDeviceGetCurrentClocksEventReasons": FUNCTION_NOT_FOUND,
    }
    gpu = all_gpus.sample().gpus[0]
    assert (gpu.temperature_c, gpu.throttle) == (70, ["hw_slowdown"])


def test_an_older_wheel(all_gpus: Gpus, nvml: FakeNvml) -> None:
    del nvml.nvmlDeviceGetTemperatureV, nvml.nvmlDeviceGetCurrentClocksEventReasons
    gpu = all_gpus.sample().gpus[0]
    assert (gpu.temperature_c, gpu.throttle) == (70, ["hw_slowdown"])


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x0, []),
        (0x1, []),
        (0x5, ["sw_power_cap"]),
        (0x60, ["sw_thermal", "hw_thermal"]),
        (0x88, ["hw_slowdown", "hw_power_brake"]),
        (0x1002, ["application_clocks", "0x1000"]),
    ],
)
def test_why_clocks_are_low(all_gpus: Gpus, nvml: FakeNvml, mask: int, names: list[str]) -> None:
    nvml.cards[0].values["nvmlDeviceGetCurrentClocksEventReasons"] = mask
    assert all_gpus.sample().gpus[0].throttle == names


def test_rows_that_wait_for_a_reset_and_mig(all_gpus: Gpus, nvml: FakeNvml) -> None:
    nvml.cards[0].values |= {"nvmlDeviceGetRemappedRows": (0, 9, 1, 0), "nvmlDeviceGetMigMode": [1, 0]}
    nvml.cards[1].values |= {"nvmlDeviceGetRemappedRows": (0, 9, 0, 1), "nvmlDeviceGetMigMode": [0, 1]}
    first, second = all_gpus.sample().gpus
    assert (first.remapped_pending, first.remapped_failed, first.mig) == (True, False, True)
    assert (second.remapped_pending, second.remapped_failed, second.mig) == (False, True, False)


def test_what_never_changes_is_read_once_and_what_seldom_does_now_and_then(
    all_gpus: Gpus, nvml: FakeNvml, clock: Clock
) -> None:
    for _ in range(50):
        all_gpus.sample()
        clock.now += 0.2
    calls = nvml.calls
    assert (calls["nvmlDeviceGetName"], calls["nvmlDeviceGetUUID"]) == (2, 2)
    assert (calls["nvmlDeviceGetTotalEccErrors"], calls["nvmlDeviceGetComputeRunningProcesses_v3"]) == (4, 4)
    assert calls["nvmlDeviceGetPowerUsage"] == 100
    assert calls["nvmlInitWithFlags"] == 2  # one for reading, one for XIDs


# --- No NVML, no GPU ---


def test_no_pynvml(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sample = Gpus(clock).sample()
    assert (sample.state, sample.gpus) == ("no_nvml", [])
    assert sample.why == "this Python has no pynvml; nvidia-ml-py, which SGLang needs, brings it"


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (12, "no_nvml", "NVML: NVML Shared Library Not Found"),
        (9, "no_nvml", "NVML: Driver Not Loaded"),
        (18, "error", "NVML: RM has detected an NVML/RM version mismatch."),
        (4, "error", "NVML: Insufficient Permissions"),
    ],
)
def test_nvml_that_does_not_open(all_gpus: Gpus, nvml: FakeNvml, error: int, state: str, why: str) -> None:
    nvml.failing["nvmlInitWithFlags"] = error
    sample = all_gpus.sample()
    assert (sample.state, sample.why, sample.driver, sample.gpus) == (state, why, None, [])


def test_a_host_without_a_gpu(all_gpus: Gpus, nvml: FakeNvml) -> None:
    nvml.cards.clear()
    sample = all_gpus.sample()
    assert (sample.state, sample.why, sample.driver, sample.gpus) == ("no_gpu", "NVML sees no GPU", "580.159.03", [])
    assert nvml.users == 0


def test_opening_is_not_tried_at_every_look(all_gpus: Gpus, nvml: FakeNvml, clock: Clock) -> None:
    nvml.failing["nvmlInitWithFlags"] = 9
    for _ in range(50):
        assert all_gpus.sample().state == "no_nvml"
        clock.now += 0.25
    assert nvml.calls["nvmlInitWithFlags"] == 2
    nvml.failing.clear()
    clock.now += 10
    assert all_gpus.sample().state == "ok"


def test_devices_that_cannot_be_counted(all_gpus: Gpus, nvml: FakeNvml) -> None:
    nvml.failing["nvmlDeviceGetCount"] = 999
    sample = all_gpus.sample()
    assert (sample.state, sample.why) == ("error", "NVML: Unknown Error")
    assert nvml.users == 0


# --- Something goes wrong ---


def test_one_gpu_is_lost(all_gpus: Gpus, nvml: FakeNvml, clock: Clock) -> None:
    all_gpus.sample()
    nvml.cards[0].lost = True
    clock.now += 1
    calls = nvml.calls.total()
    lost, other = all_gpus.sample().gpus
    assert fields(lost) == WHOLE | dict.fromkeys(gpus.FAST) | {"error": "GPU is lost"}
    assert other.utilisation_percent == 98
    assert nvml.calls.total() - calls == 1 + len(gpus.FAST)  # the lost one was not asked again
    clock.now += 5
    (lost, _) = all_gpus.sample().gpus
    assert (lost.error, lost.uuid, lost.power_limit_watts, lost.processes) == ("GPU is lost", "GPU-0", None, None)
    nvml.cards[0].lost = False
    clock.now += 5
    all_gpus.sample()
    assert fields(all_gpus.sample().gpus[0]) == WHOLE


def test_a_gpu_that_nvml_will_not_give(all_gpus: Gpus, nvml: FakeNvml) -> None:
    nvml.cards[1].failing["nvmlDeviceGetHandleByIndex"] = 4
    first, second = all_gpus.sample().gpus
    assert first.error is None
    assert fields(second) == dict.fromkeys(WHOLE) | {"index": 1, "error": "Insufficient Permissions"}


@pytest.mark.parametrize("error", [UNINITIALIZED, 9, 18])
def test_a_driver_that_is_loaded_anew(all_gpus: Gpus, nvml: FakeNvml, clock: Clock, error: int) -> None:
    assert all_gpus.sample().driver == "580.159.03"
    nvml.failing["nvmlDeviceGetPowerUsage"] = error
    sample = all_gpus.sample()
    assert (sample.state, sample.gpus) == ("error", [])
    nvml.failing.clear()
    nvml.driver = "590.1"
    until(lambda: not watchers(), "the watcher ends")
    assert nvml.users == 0
    assert all_gpus.sample().state == "error"
    clock.now += 10
    sample = all_gpus.sample()
    assert (sample.state, sample.driver, len(sample.gpus)) == ("ok", "590.1", 2)


def test_all_gpus_are_lost(all_gpus: Gpus, nvml: FakeNvml, clock: Clock) -> None:
    """As after a driver was unloaded under them: NVML is opened again."""
    all_gpus.sample()
    for card in nvml.cards:
        card.lost = True
    assert [gpu.error for gpu in all_gpus.sample().gpus] == ["GPU is lost", "GPU is lost"]
    for card in nvml.cards:
        card.lost = False
    assert [gpu.error for gpu in all_gpus.sample().gpus] == ["GPU is lost", "GPU is lost"]
    until(lambda: not watchers(), "the watcher ends")
    clock.now += 10
    assert [gpu.error for gpu in all_gpus.sample().gpus] == [None, None]


# --- XIDs ---


def test_xids_are_kept_by_gpu(all_gpus: Gpus, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.time, "time", lambda: 1_790_000_000.5)
    all_gpus.sample()
    nvml.happen(1, 0x1, event_type=0x1)  # no XID but an ECC event
    nvml.happen(1, 31)
    nvml.happen(1, 79)
    until(lambda: len(all_gpus.sample().gpus[1].xid or []) == 2, "both came")
    first, second = all_gpus.sample().gpus
    assert first.xid == []
    assert second.xid == [Xid(31, 1_790_000_000.5), Xid(79, 1_790_000_000.5)]


def test_the_xid_of_a_gpu_that_is_lost_by_it(all_gpus: Gpus, nvml: FakeNvml) -> None:
    all_gpus.sample()
    nvml.cards[0].lost = True
    nvml.failing["nvmlEventSetWait_v2"] = LOST  # for a while, every wait fails
    before = nvml.calls["nvmlEventSetWait_v2"]
    until(lambda: nvml.calls["nvmlEventSetWait_v2"] > before + 1, "it goes on waiting")
    nvml.failing.clear()
    nvml.happen(0, 79)
    until(lambda: all_gpus.sample().gpus[0].xid, "it came")
    (gpu, _) = all_gpus.sample().gpus
    assert (gpu.error, [xid.code for xid in gpu.xid or []]) == ("GPU is lost", [79])


def test_xids_outlive_a_driver(all_gpus: Gpus, nvml: FakeNvml, clock: Clock) -> None:
    all_gpus.sample()
    nvml.happen(0, 48)
    until(lambda: all_gpus.sample().gpus[0].xid)
    nvml.failing["nvmlDeviceGetPowerUsage"] = UNINITIALIZED
    all_gpus.sample()
    nvml.failing.clear()
    until(lambda: not watchers())
    clock.now += 10
    assert [xid.code for xid in all_gpus.sample().gpus[0].xid or []] == [48]


def test_a_flood_of_xids(all_gpus: Gpus, nvml: FakeNvml) -> None:
    all_gpus.sample()
    for code in range(60):
        nvml.happen(0, code)
    until(lambda: [xid.code for xid in all_gpus.sample().gpus[0].xid or []][-1:] == [59], "all came")
    assert [xid.code for xid in all_gpus.sample().gpus[0].xid or []] == list(range(10, 60))


def test_one_watcher_in_a_process(all_gpus: Gpus, nvml: FakeNvml, clock: Clock) -> None:
    """Two would keep a core busy, inside NVML."""
    all_gpus.sample()
    second = Gpus(clock)
    assert [gpu.xid for gpu in second.sample().gpus] == [None, None]
    assert len(watchers()) == 1
    second.close()
    all_gpus.close()
    until(lambda: not watchers())
    clock.now += 10
    assert [gpu.xid for gpu in all_gpus.sample().gpus] == [[], []]


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_driver_that_tells_of_no_events(all_gpus: Gpus, nvml: FakeNvml, call: str) -> None:
    nvml.failing[call] = NOT_SUPPORTED
    sample = all_gpus.sample()
    assert (sample.state, [gpu.xid for gpu in sample.gpus]) == ("ok", [None, None])
    assert watchers() == []


# --- Whose processes ---


@pytest.fixture
def sleeper() -> Iterator[int]:
    child = subprocess.Popen(["/bin/sleep", "600"])
    until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
    yield child.pid
    child.kill()
    child.wait()


@pytest.fixture
def nobody() -> int:
    """The number of no process."""
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    return child.pid


def shown(found: list[gpus.GpuProcess] | None) -> list[dict[str, Any]]:
    return list(msgspec.to_builtins(found))


def test_the_processes_of_a_gpu(
    all_gpus: Gpus, nvml: FakeNvml, sleeper: int, nobody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "Namespace", lambda: Namespace(host=True))
    nvml.cards[0].values |= {
        "nvmlDeviceGetComputeRunningProcesses_v3": [process(sleeper, 7 << 30), process(nobody, None)],
        "nvmlDeviceGetGraphicsRunningProcesses_v3": [process(sleeper, 1), process(os.getpid(), 5)],
    }
    found = {entry["pid"]: entry for entry in shown(all_gpus.sample({sleeper}).gpus[0].processes)}
    assert found.keys() == {sleeper, nobody, os.getpid()}
    assert found[sleeper] == {
        "pid": sleeper,
        "memory_bytes": 7 << 30,
        "owner": getpass.getuser(),
        "name": "sleep",
        "ours": True,
        "visible": True,
    }
    assert found[nobody] == {
        "pid": nobody,
        "memory_bytes": None,
        "owner": None,
        "name": None,
        "ours": None,
        "visible": False,
    }
    assert (found[os.getpid()]["memory_bytes"], found[os.getpid()]["ours"]) == (5, False)


def test_processes_of_an_older_driver(all_gpus: Gpus, nvml: FakeNvml, sleeper: int) -> None:
    nvml.failing |= {
        "nvmlDeviceGetComputeRunningProcesses_v3": FUNCTION_NOT_FOUND,
        "nvmlDeviceGetGraphicsRunningProcesses_v3": FUNCTION_NOT_FOUND,
    }
    assert all_gpus.sample().gpus[0].processes is None
    nvml.nvmlDeviceGetComputeRunningProcesses_v2 = lambda handle: [process(sleeper, 9)]
    all_gpus.close()
    newer = Gpus()
    assert [entry.pid for entry in newer.sample().gpus[0].processes or []] == [sleeper]
    newer.close()


def test_whether_it_is_ours_is_not_known_without_a_run(sleeper: int) -> None:
    assert Namespace(host=True).process(sleeper, 1, 0, None).ours is None


def test_a_number_that_is_a_threads() -> None:
    """Drivers that translate numbers for a container may name the thread that opened the GPU."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    found = Namespace(host=True).process(thread.native_id or 0, 1, 0, {os.getpid()})
    over.set()
    thread.join()
    assert (found.ours, found.visible) == (True, True)


def test_in_a_container_a_number_alone_proves_nothing(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Namespace(host=False)
    assert shown([inside.process(sleeper, 8, 3, {sleeper})]) == [
        {"pid": sleeper, "memory_bytes": 8, "owner": None, "name": None, "ours": None, "visible": False}
    ]
    monkeypatch.setattr(gpus, "open_files", lambda pid: {"/dev/null", "/dev/nvidia3"} if pid == sleeper else set())
    assert inside.process(sleeper, 8, 3, {sleeper}).ours is True
    assert inside.process(sleeper, 8, 13, {sleeper}).visible is False
    assert inside.process(sleeper, 8, None, {sleeper}).visible is False


def test_what_a_process_has_open(tmp_path: Path, nobody: int) -> None:
    with (tmp_path / "nvidia0").open("w"):
        assert f"{tmp_path}/nvidia0" in open_files(os.getpid())
    assert f"{tmp_path}/nvidia0" not in open_files(os.getpid())
    assert open_files(nobody) == set()


def test_a_namespace_of_its_own_is_told() -> None:
    code = "from backends.gpus import Namespace; print(Namespace().host)"
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", code]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if "unshare" in made.stderr:
        pytest.skip(f"no namespaces here: {made.stderr.strip()}")
    assert made.stdout == "False\n"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["sglang::scheduler_TP0"], "sglang::scheduler_TP0"),
        (["/usr/bin/python3.12", "-P", "-m", "sglang.launch_server", "--api-key", "sk-1"], "python3.12 -m sglang.launch_server"),
        (["python", "-c", "secret"], "python"),
        (["/usr/bin/curl", "-H", "Authorization: Bearer sk-1"], "curl"),
        (["python", "-m"], "python"),
        (["python", "train.py", "-m", "secret"], "python"),
        ([], "kworker/0:1"),
    ],
)  # fmt: skip
def test_a_title_holds_no_arguments(argv: list[str], shown: str) -> None:
    assert title(argv, "kworker/0:1") == shown
