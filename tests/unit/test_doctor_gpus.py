"""The doctor on GPUs and the links to them: for each check what passes, warns, fails, and what cannot be known."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import NOT_SUPPORTED, Card, FakeNvml, process

from backends import gpus as all_gpus
from backends.doctor import gpus, pcie
from backends.doctor.gpus import MORE, cuda_suits_torch, judge_gpus, look, xids
from backends.doctor.report import Asked, Check, Place
from backends.gpus import Namespace, examine_gpus
from backends.runs import Run, Runs

ASKED = Asked()
FIRST_CASE = Asked(profile="kimi", args={"tp-size": 2, "mem-fraction-static": 0.88, "moe-runner-backend": "marlin"})
FREE = {
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=102_641_958_912, used=3 << 20),
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """NVML with two free GPUs; it is closed again after every look."""
    fake = FakeNvml(Card(0, **FREE), Card(1, **FREE))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    yield fake
    assert fake.users == 0


@pytest.fixture
def place(all_runs: Runs, tmp_path: Path) -> Place:
    return Place(all_runs, tmp_path / "payload", tmp_path / "root")


def found(asked: Asked = ASKED) -> dict[str, Check]:
    """Checks by id."""
    return {check.id: check for check in judge_gpus(examine_gpus(MORE, set()), asked)}


# --- From one reading of NVML ---


def test_a_host_where_all_is_well(nvml: FakeNvml) -> None:
    checks = found(FIRST_CASE)
    assert {check.id: check.seen for check in checks.values()} == {
        "gpu.present": "2 x NVIDIA RTX PRO 6000 Blackwell Server Edition, driver 580.159.03",
        "gpu.profile": "2 GPUs, kimi wants 2",
        "driver.cuda": "the driver takes CUDA 13.1, torch was built for 13.0",
        "gpu.kinds": "of one kind: NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "gpu.memory": "at least 103 GB free on each of 2",
        "gpu.modes": "no MIG, and no GPU that is taken whole",
        "gpu.persistence": "persistence mode is on",
        "gpu.health": "no uncorrected memory error, no row to be replaced",
        "gpu.heat": "the hottest, GPU 1, has 71 °C",
        "gpu.throttling": "none is slowed down now",
        "gpu.power": "the limit is 600 W of 600 W",
        "pcie.width": "x16 on all 2",
        "pcie.generation": "generation 5 of 5 under load",
        "pcie.bar1": "BAR1 is 137 GB, all of the memory",
        "pcie.p2p": "by the driver's word 1 of 1 pairs reach each other; only --active shows that it works",
    }
    assert {(check.status, check.remedy) for check in checks.values()} == {("pass", "")}


BAD = [
    ("gpu.kinds", {"nvmlDeviceGetName": "NVIDIA H200"}, "fail", "of 2 kinds: NVIDIA H200, NVIDIA RTX PRO 6000"),
    ("gpu.kinds", {"nvmlDeviceGetName": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"}, "warn", "of 2 kinds"),
    ("gpu.modes", {"nvmlDeviceGetMigMode": [1, 1]}, "fail", "MIG is on or pending on GPU 0"),
    ("gpu.modes", {"nvmlDeviceGetMigMode": [0, 1]}, "fail", "MIG is on or pending on GPU 0"),
    (
        "gpu.modes",
        {"nvmlDeviceGetComputeMode": 3, "nvmlDeviceGetComputeRunningProcesses_v3": [process(1, 5)]},
        "fail",
        "GPU 0 let one process in, and have one",
    ),
    ("gpu.modes", {"nvmlDeviceGetComputeMode": 3}, "pass", "no GPU that is taken whole"),
    ("gpu.persistence", {"nvmlDeviceGetPersistenceMode": 0}, "warn", "off on GPU 0"),
    ("gpu.health", {"nvmlDeviceGetTotalEccErrors": 4}, "fail", "GPU 0: 4 uncorrected memory errors"),
    ("gpu.health", {"nvmlDeviceGetRemappedRows": (1, 0, 0, 1)}, "fail", "a bad row could not be replaced"),
    ("gpu.health", {"nvmlDeviceGetRemappedRows": (1, 0, 1, 0)}, "warn", "will be replaced at the next reset"),
    (
        "gpu.health",
        {"nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=2))]},
        "fail",
        "GPU 0: the driver says: reboot the host",
    ),
    ("gpu.heat", {"nvmlDeviceGetTemperatureV": 88}, "pass", "GPU 0, has 88 °C"),
    ("gpu.heat", {"nvmlDeviceGetTemperatureV": 89}, "fail", "GPU 0, has 89 °C"),
    ("gpu.throttling", {"nvmlDeviceGetCurrentClocksEventReasons": 0x88}, "fail", "GPU 0: hw_power_brake, hw_slowdown"),
    ("gpu.throttling", {"nvmlDeviceGetCurrentClocksEventReasons": 0x4}, "pass", "GPU 0 at the power limit, as under full load"),
    ("gpu.throttling", {"nvmlDeviceGetCurrentClocksEventReasons": 0x24}, "warn", "GPU 0: sw_thermal; GPU 0 at the power"),
    ("gpu.power", {"nvmlDeviceGetEnforcedPowerLimit": 480_000}, "pass", "480 W of 600 W"),
    ("gpu.power", {"nvmlDeviceGetEnforcedPowerLimit": 479_000}, "warn", "479 W of 600 W on GPU 0"),
    ("pcie.width", {"nvmlDeviceGetCurrPcieLinkWidth": 8}, "fail", "GPU 0 x8 of x16"),
    (
        "pcie.width",
        {"nvmlDeviceGetCurrPcieLinkWidth": 8, "nvmlDeviceGetMaxPcieLinkWidth": 8},
        "warn",
        "GPU 0 x8",
    ),
    ("pcie.generation", {"nvmlDeviceGetCurrPcieLinkGeneration": 4}, "warn", "generation 4, 5 of 5 under load"),
    (
        "pcie.bar1",
        {"nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=256 << 20)},
        "warn",
        "BAR1 is 268 MB, less than the memory of GPU 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "status", "seen"), BAD)
def test_what_is_wrong_with_one_gpu(nvml: FakeNvml, name: str, values: dict[str, Any], status: str, seen: str) -> None:
    nvml.cards[0].values |= values
    check = found()[name]
    assert (check.status, bool(check.remedy)) == (status, status != "pass")
    assert seen in check.seen


def test_the_generation_at_idle_says_nothing(nvml: FakeNvml) -> None:
    for card in nvml.cards:
        card.values |= {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        }
    check = found()["pcie.generation"]
    assert (check.status, check.seen) == (
        "unknown",
        "generation 1 of 5 at idle, which is by design; under load it can be judged",
    )


def test_what_nvml_does_not_tell_is_not_known(nvml: FakeNvml) -> None:
    for card in nvml.cards:
        card.failing = dict.fromkeys(card.values, NOT_SUPPORTED)
    checks = found()
    untold = {name for name, check in checks.items() if check.status == "unknown"}
    assert untold == checks.keys() - {"gpu.present", "driver.cuda", "gpu.kinds", "gpu.modes"}


def test_a_gpu_that_is_lost(nvml: FakeNvml) -> None:
    nvml.cards[1].lost = True
    checks = found(FIRST_CASE)
    assert (checks["gpu.present"].status, checks["gpu.present"].seen) == ("fail", "GPU 1: GPU is lost")
    assert (checks["gpu.profile"].status, checks["gpu.profile"].seen) == ("fail", "kimi wants 2 GPUs, 1 are usable")
    assert checks["pcie.width"].seen == "x16 on all 1"


def test_no_gpu_at_all(nvml: FakeNvml) -> None:
    nvml.failing["nvmlInitWithFlags"] = 12
    assert {name: check.status for name, check in found().items()} == {"gpu.present": "unknown"}
    assert found(FIRST_CASE)["gpu.profile"].status == "fail"
    assert found(Asked(profile="embedded-llama", embedded=True)).keys() == {"gpu.present"}


def test_nvml_that_cannot_be_opened(nvml: FakeNvml) -> None:
    nvml.failing["nvmlInitWithFlags"] = 999
    assert (found()["gpu.present"].status, found()["gpu.present"].seen) == ("fail", "NVML: Unknown Error")


def test_a_profile_for_other_gpus(nvml: FakeNvml) -> None:
    check = found(Asked(profile="b200", args={"moe-runner-backend": "flashinfer_trtllm"}))["gpu.profile"]
    assert check.status == "fail"
    assert check.seen == "b200 sets flashinfer_trtllm, which needs compute capability 10.x; here is 12.0"


@pytest.mark.parametrize(
    ("driver", "torch", "status"),
    [
        ("13.1", "13.0", "pass"),
        ("13.0", "13.0", "pass"),
        ("13.0", "13.1", "warn"),
        ("12.9", "13.0", "fail"),
        ("13.0", None, "unknown"),
    ],
)
def test_the_driver_against_torch(driver: str, torch: str | None, status: str) -> None:
    check = cuda_suits_torch(driver, torch)
    assert check is not None
    assert check.status == status


def test_pairs_that_do_not_reach_each_other(nvml: FakeNvml) -> None:
    nvml.cards[0].values["nvmlDeviceGetP2PStatus"] = 5
    check = found()["pcie.p2p"]
    assert (check.status, check.seen) == ("warn", "by the driver's word 0 of 1 pairs reach each other, not 0-1")


# --- Memory, and who holds it ---


@pytest.fixture
def holder(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process that holds half of GPU 0."""
    monkeypatch.setattr(all_gpus, "Namespace", lambda: Namespace(host=True))
    sleeper = subprocess.Popen(["/bin/sleep", "600"])
    nvml.cards[0].values |= {
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=102_641_958_912, used=50 << 30),
        "nvmlDeviceGetComputeRunningProcesses_v3": [process(sleeper.pid, 50 << 30)],
    }
    yield sleeper.pid
    sleeper.kill()
    sleeper.wait()


def test_a_process_that_holds_a_gpu(holder: int) -> None:
    check = found()["gpu.memory"]
    assert check.status == "fail"
    assert check.seen.startswith(
        f"at least 49 GB free on each of 2; 53.7 GB used on GPU 0: sleep (process {holder} of "
    )
    assert check.numbers["least_free_bytes"] == 102_641_958_912 - (50 << 30)


def test_a_profile_that_needs_less(holder: int) -> None:
    assert found(Asked(args={"mem-fraction-static": 0.4}))["gpu.memory"].status == "warn"


def test_memory_of_a_process_that_is_not_visible(nvml: FakeNvml) -> None:
    nvml.cards[0].values["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=102_641_958_912, used=1 << 30)
    assert found()["gpu.memory"].seen.endswith(
        "on GPU 0: no process is visible (another container, or a process that was lost)"
    )
    nvml.cards[0].values["nvmlDeviceGetComputeRunningProcesses_v3"] = [process(99_999_999, 1 << 30)]
    assert found()["gpu.memory"].seen.endswith("on GPU 0: process 99999999 of the host, not visible here")


def test_memory_that_a_server_of_ours_holds(
    holder: int, nvml: FakeNvml, start: Callable[..., Run], place: Place
) -> None:
    server = start("server")
    running = server.running
    assert running is not None
    nvml.cards[0].values["nvmlDeviceGetComputeRunningProcesses_v3"] = [process(running.child.pid, 50 << 30)]
    (check,) = [check for check in look(place, ASKED) if check.id == "gpu.memory"]
    assert (check.status, check.seen) == ("pass", "a server of ours holds up to 53.7 GB of a GPU")


# --- XIDs ---


def kernel_log(place: Place, text: str) -> None:
    place.path("/dev").mkdir(parents=True)
    place.path("/dev/nvidiactl").touch()
    place.path("/dev/kmsg").write_text(text)


def test_xids_without_a_driver(place: Place) -> None:
    assert xids(place, ASKED) == []


@pytest.mark.parametrize(
    ("codes", "status", "seen"),
    [
        ([], "pass", "no XID since boot"),
        ([31, 31], "warn", "XID 31: 2 times since boot"),
        ([31, 79], "fail", "XID 31: 1 times since boot, XID 79: 1 times since boot"),
    ],
)
def test_xids_in_the_kernels_log(place: Place, codes: list[int], status: str, seen: str) -> None:
    kernel_log(place, "".join(f"4,1,2,-;NVRM: Xid (PCI:0000:17:00): {code}, pid=7\n" for code in codes))
    (check,) = xids(place, ASKED)
    assert (check.status, check.seen) == (status, seen)


def test_a_kernel_log_that_is_not_for_us(place: Place) -> None:
    kernel_log(place, "")
    place.path("/dev/kmsg").unlink()
    (check,) = xids(place, ASKED)
    assert check.status == "unknown"
    assert "No such file" in check.seen


# --- Links ---


def test_packets_sent_again(nvml: FakeNvml, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcie, "REPLAY_SECONDS", 0.01)
    (check,) = pcie.replays(place, ASKED)
    assert (check.status, check.numbers) == ("pass", {"replays": 6})
    assert pcie.judge_replays({0: 3, 1: 3}, {0: 5, 1: 3}).status == "warn"


def test_packets_sent_again_where_no_gpu_tells(nvml: FakeNvml, place: Place) -> None:
    nvml.failing["nvmlInitWithFlags"] = 12
    assert pcie.replays(place, ASKED) == []


def pci(place: Place, gpus: int, control: int | None) -> None:
    """GPUs below one bridge with this ACS control word; None where only root may read that far."""
    tree, devices = place.path("/sys/devices/pci0000:00/0000:00:01.0"), place.path("/sys/bus/pci/devices")
    tree.mkdir(parents=True)
    devices.mkdir(parents=True)
    (tree / "class").write_text("0x060400\n")
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)  # some capability, the next at 0x148
    struct.pack_into("<IHH", config, 0x148, pcie.ACS | 1 << 16, 0, control or 0)
    (tree / "config").write_bytes(bytes(config) if control is not None else bytes(64))
    for index in range(gpus):
        card = tree / f"0000:0{index + 1}:00.0"
        card.mkdir()
        (card / "vendor").write_text("0x10de\n")
        (card / "class").write_text("0x030200\n")
        os.symlink(card, devices / card.name)


@pytest.mark.parametrize(
    ("control", "status", "seen"),
    [
        (0x0, "pass", "none of the 1 bridges above the GPUs redirects"),
        (0x10, "pass", "none of the 1 bridges above the GPUs redirects"),
        (0xC, "warn", "1 of 1 bridges above the GPUs redirect: 0000:00:01.0 ReqRedir+ CmpltRedir+"),
        (None, "unknown", "the bridges' settings cannot be read (only root sees all of them)"),
    ],
)
def test_bridges_that_redirect(place: Place, control: int | None, status: str, seen: str) -> None:
    pci(place, 2, control)
    (check,) = pcie.acs(place, ASKED)
    assert (check.status, check.seen) == (status, seen)


def test_a_machine_that_shows_no_bridge(place: Place) -> None:
    pci(place, 2, 0xC)
    (place.path("/sys/devices/pci0000:00/0000:00:01.0") / "class").unlink()
    (check,) = pcie.acs(place, ASKED)
    assert check.status == "unknown"


def test_one_gpu_talks_to_nobody(place: Place) -> None:
    pci(place, 1, 0xC)
    assert pcie.acs(place, ASKED) == []
    assert pcie.iommu(place, ASKED) == []


@pytest.mark.parametrize(
    ("groups", "cmdline", "status", "seen"),
    [
        (0, "quiet", "pass", "it is off"),
        (3, "quiet iommu=pt", "pass", "it passes through"),
        (3, "quiet", "warn", "it translates, in 3 groups"),
        (None, "quiet", "unknown", "whether an IOMMU translates cannot be seen here"),
    ],
)
def test_an_iommu(place: Place, groups: int | None, cmdline: str, status: str, seen: str) -> None:
    pci(place, 2, 0)
    place.path("/proc").mkdir()
    place.path("/proc/cmdline").write_text(f"BOOT_IMAGE=/vmlinuz {cmdline}\n")
    for index in range(groups or 0):
        place.path(f"/sys/kernel/iommu_groups/{index}").mkdir(parents=True)
    if groups == 0:
        place.path("/sys/kernel/iommu_groups").mkdir(parents=True)
    (check,) = pcie.iommu(place, ASKED)
    assert (check.status, check.seen) == (status, seen)
