"""The GPUs of this host as NVML sees them. No GPU or no NVML is a state, not an error, and what is not known is None.

NVML names processes by the host's numbers, in some drivers also inside a container, where /proc gives such a number to
another process or to none. So a process is only named where it is proven to be the one, and no number from here is
ever good enough to end a process by.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import psutil

from backends.processes import open_files, title

SLOW_SECONDS = 5.0  # between two readings of what seldom changes
REOPEN_SECONDS = 10.0  # between two attempts to open NVML, which may look for a driver to load
XIDS_KEPT = 50  # of each GPU, the newest
XID_WAIT_MS = 1000  # also how long a watcher takes to notice that it is over
XID_WATCH = threading.Lock()  # NVML keeps a core busy while two threads of one process wait for events
XID_PAUSE = 5.0  # after a failed wait: a lost GPU fails all of them at once

# Numbers of NVML's C interface. The wheel has names for them too, but some of those are tuples by mistake.
NO_GPUS = 1  # a flag for opening: a host without a GPU is fine
CLOCK_SM = 1
TEMPERATURE_GPU = 0
ECC_UNCORRECTED, ECC_VOLATILE = 1, 0
P2P_READ, P2P_WRITE = 0, 1
MEMORY_V2 = 0x02000028
EVENT_XID = 0x8
NOT_LOADED, LIBRARY_MISSING, TIMED_OUT = 9, 12, 10
UNUSABLE = frozenset({15, 16})  # this GPU is lost, or has to be reset
OVER = frozenset({1, 9, 18})  # NVML is closed, its driver is gone, or another driver was loaded

THROTTLE = {
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
THROTTLE_IDLE = 0x1

HOST_PID_NAMESPACE = 0xEFFFFFFC  # the inode that Linux gives the first one

State = Literal["ok", "no_nvml", "no_gpu", "error"]


class Xid(msgspec.Struct, frozen=True):
    """An error that the driver told of: NVIDIA's number for it, and when it came (seconds since the epoch)."""

    code: int
    at: float


class GpuProcess(msgspec.Struct):
    """A process that NVML says uses a GPU.

    `visible`: it is known which process of this host or container the number means; only then `owner`, `name` and
    `ours` are known. `ours` is None also where no run was asked about.
    """

    pid: int
    memory_bytes: int | None
    owner: str | None = None
    name: str | None = None
    ours: bool | None = None
    visible: bool = False


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU; told from others by its uuid, since CUDA may count in another order. None stands for not known.

    `error`: why nothing of it can be read. `memory_used_bytes` is without what the driver keeps for itself.
    `power_limit_watts` is the one in force. `pcie_generation` drops by design while a GPU idles, so only under load it
    says something beside `pcie_max_generation`. `pcie_replays` and `ecc_uncorrected` count since the driver was
    loaded, `xid` holds what came since this agent watches, `throttle` why clocks are lower than they could be.
    """

    index: int
    error: str | None = None
    uuid: str | None = None
    name: str | None = None
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle: list[str] | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_replays: int | None = None
    ecc_uncorrected: int | None = None
    remapped_pending: bool | None = None
    remapped_failed: bool | None = None
    xid: list[Xid] | None = None
    mig: bool | None = None
    processes: list[GpuProcess] | None = None


class GpuSample(msgspec.Struct):
    """All GPUs at one moment, and the versions of driver and CUDA; `why` says what hinders where `state` is not ok."""

    state: State
    why: str | None = None
    driver: str | None = None
    cuda: str | None = None
    gpus: list[Gpu] = []


class Reading(NamedTuple):
    """How one field is read: the NVML call, older names for it, arguments behind the device, what to make of it."""

    calls: tuple[str, ...]
    arguments: tuple[Any, ...] = ()
    of: Callable[[Any], Any] = lambda value: value


def _throttle(mask: int) -> list[str]:
    bits = [1 << i for i in range(mask.bit_length()) if mask & 1 << i and 1 << i != THROTTLE_IDLE]
    return [THROTTLE.get(bit, f"{bit:#x}") for bit in bits]


STATIC = {
    "uuid": Reading(("nvmlDeviceGetUUID",)),
    "name": Reading(("nvmlDeviceGetName",)),
    "memory_total_bytes": Reading(("nvmlDeviceGetMemoryInfo",), (MEMORY_V2,), lambda memory: memory.total),
    "max_sm_clock_mhz": Reading(("nvmlDeviceGetMaxClockInfo",), (CLOCK_SM,)),
    "pcie_max_generation": Reading(("nvmlDeviceGetMaxPcieLinkGeneration",)),
    "pcie_max_width": Reading(("nvmlDeviceGetMaxPcieLinkWidth",)),
}
SLOW = {
    "power_limit_watts": Reading(("nvmlDeviceGetEnforcedPowerLimit",), of=lambda milliwatts: milliwatts / 1000),
    "pcie_width": Reading(("nvmlDeviceGetCurrPcieLinkWidth",)),
    "pcie_replays": Reading(("nvmlDeviceGetPcieReplayCounter",)),
    "ecc_uncorrected": Reading(("nvmlDeviceGetTotalEccErrors",), (ECC_UNCORRECTED, ECC_VOLATILE)),
    "remapped_pending": Reading(("nvmlDeviceGetRemappedRows",), of=lambda rows: bool(rows[2])),
    "remapped_failed": Reading(("nvmlDeviceGetRemappedRows",), of=lambda rows: bool(rows[3])),
    "mig": Reading(("nvmlDeviceGetMigMode",), of=lambda modes: modes[0] == 1),
}
FAST = {
    "utilisation_percent": Reading(("nvmlDeviceGetUtilizationRates",), of=lambda rates: rates.gpu),
    "memory_used_bytes": Reading(("nvmlDeviceGetMemoryInfo",), (MEMORY_V2,), lambda memory: memory.used),
    "power_watts": Reading(("nvmlDeviceGetPowerUsage",), of=lambda milliwatts: milliwatts / 1000),
    "temperature_c": Reading(("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), (TEMPERATURE_GPU,)),
    "sm_clock_mhz": Reading(("nvmlDeviceGetClockInfo",), (CLOCK_SM,)),
    "throttle": Reading(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), of=_throttle
    ),
    "pcie_generation": Reading(("nvmlDeviceGetCurrPcieLinkGeneration",)),
}
MINOR = Reading(("nvmlDeviceGetMinorNumber",))
PROCESSES = (
    Reading(("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")),
    Reading(("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")),
)


class Gpus:
    """Reads every GPU of this host; opens NVML when it is first asked, and again after a driver was loaded anew.

    While it is open, the driver cannot be unloaded. One thread at a time may ask.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._closed = GpuSample("no_nvml")
        self._retry = -math.inf
        self._xids: dict[str, deque[Xid]] = {}
        self._open: _Open | None = None
        self._watch: _XidWatch | None = None

    def sample(self, ours: Collection[int] | None = None) -> GpuSample:
        """The GPUs now. `ours`: the processes of the run that is asked about. Never raises for what NVML says."""
        now = self._clock()
        if self._open is None and now >= self._retry:
            self._retry = now + REOPEN_SECONDS
            self._try_to_open()
        if self._open is None:
            return self._closed
        nvml, devices = self._open.nvml, self._open.devices
        try:
            gpus = [self._gpu(device, now, ours) for device in devices]
        except nvml.NVMLError as error:
            self._closed = GpuSample("error", f"NVML: {error}")
            self.close()
            return self._closed
        sample = GpuSample("ok", None, self._open.driver, self._open.cuda, gpus)
        if all(device.unusable for device in devices):  # as after a driver was unloaded by force
            self._closed = sample
            self.close()
        return sample

    def close(self) -> None:
        """Let the driver go; a sample after `REOPEN_SECONDS` opens it again."""
        if self._watch:
            self._watch.over.set()
        if self._open:
            self._open.close()
            self._open = None

    def _try_to_open(self) -> None:
        if self._watch and self._watch.is_alive():  # NVML stays as it is until its last user has closed it
            return
        found = _open_nvml()
        if isinstance(found, GpuSample):
            self._closed = found
        else:
            self._open = found
            self._watch = _XidWatch.begin(found, self._xids)

    def _gpu(self, device: _Device, now: float, ours: Collection[int] | None) -> Gpu:
        fast = device.read(FAST)
        if now - device.slow_at >= SLOW_SECONDS:
            device.slow_at = now
            device.read_slow(ours)
        uuid = device.static["uuid"]
        watched = self._watch is not None and uuid in self._watch.uuids.values()
        return Gpu(
            index=device.index,
            error=device.unusable,
            xid=list(self._xids[uuid]) if watched else None,
            **device.static,
            **device.slow,
            **fast,
        )


class Examined(NamedTuple):
    """GPUs read once: the usual sample, what else was asked of each by field, and what hinders pairs of them.

    `peers` maps a pair of indexes to NVML's P2P status for reads and writes, the worse of the two: 0 is fine.
    """

    sample: GpuSample
    more: list[dict[str, Any]]
    peers: dict[tuple[int, int], int]


def examine_gpus(more: Mapping[str, Reading], ours: Collection[int] | None = None) -> Examined:
    """Read every GPU once, with `more` readings, and let the driver go again. Never raises for what NVML says."""
    opened = _open_nvml()
    if isinstance(opened, GpuSample):
        return Examined(opened, [], {})
    try:
        gpus = []
        for device in opened.devices:
            device.read_slow(ours)
            gpus.append(Gpu(index=device.index, **device.static, **device.slow, **device.read(FAST)))
            gpus[-1].error = device.unusable
        extra = [device.read(more) for device in opened.devices]
        return Examined(GpuSample("ok", None, opened.driver, opened.cuda, gpus), extra, opened.peers())
    except opened.nvml.NVMLError as error:
        return Examined(GpuSample("error", f"NVML: {error}"), [], {})
    finally:
        opened.close()


def _open_nvml() -> _Open | GpuSample:
    """NVML with its devices, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return GpuSample("no_nvml", "this Python has no pynvml; nvidia-ml-py, which SGLang needs, brings it")
    try:
        pynvml.nvmlInitWithFlags(NO_GPUS)
    except pynvml.NVMLError as error:
        absent = error.value in (LIBRARY_MISSING, NOT_LOADED)
        return GpuSample("no_nvml" if absent else "error", f"NVML: {error}")
    opened = _Open(pynvml)
    try:
        opened.find_devices()
    except pynvml.NVMLError as error:
        opened.close()
        return GpuSample("error", f"NVML: {error}", opened.driver, opened.cuda)
    if not opened.devices:
        opened.close()
        return GpuSample("no_gpu", "NVML sees no GPU", opened.driver, opened.cuda)
    return opened


class _Open:
    """NVML while it is open."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.devices: list[_Device] = []
        self.driver: str | None = None
        self.cuda: str | None = None

    def find_devices(self) -> None:
        """Raises NVMLError."""
        self.driver = self.nvml.nvmlSystemGetDriverVersion()
        version = self.nvml.nvmlSystemGetCudaDriverVersion_v2()
        self.cuda = f"{version // 1000}.{version % 1000 // 10}"
        here = Namespace()
        self.devices = [_Device(self.nvml, index, here) for index in range(self.nvml.nvmlDeviceGetCount())]

    def peers(self) -> dict[tuple[int, int], int]:
        """P2P status of every pair that tells it."""
        found = {}
        for one, other in itertools.combinations(self.devices, 2):
            try:
                found[one.index, other.index] = max(
                    self.nvml.nvmlDeviceGetP2PStatus(one.handle, other.handle, way) for way in (P2P_READ, P2P_WRITE)
                )
            except self.nvml.NVMLError:
                continue  # this driver, or a lost GPU, does not tell
        return found

    def close(self) -> None:
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError:
            pass  # its driver is gone


class _Device:
    """One GPU of an open NVML. A reading that fails is None; it raises NVMLError only where NVML itself is over.

    `unusable` says why nothing can be read, such as that the GPU is lost; it is tried again with the slow readings.
    """

    def __init__(self, nvml: Any, index: int, here: Namespace) -> None:
        self._nvml = nvml
        self._here = here
        self.index = index
        self.handle: Any = None
        self.unusable: str | None = None
        self.static = self._find()
        self.slow: dict[str, Any] = {}
        self.slow_at = -math.inf

    def read(self, readings: Mapping[str, Reading]) -> dict[str, Any]:
        """Values by field."""
        return {name: self._value(reading) for name, reading in readings.items()}

    def read_slow(self, ours: Collection[int] | None) -> None:
        """Renew what seldom changes, and try again what was unusable."""
        if self.unusable:
            self.unusable = None
            self.static = {name: value or self.static[name] for name, value in self._find().items()}
        self.slow = self.read(SLOW) | {"processes": self._processes(ours)}

    def _find(self) -> dict[str, Any]:
        try:
            self.handle = self._nvml.nvmlDeviceGetHandleByIndex(self.index)
        except self._nvml.NVMLError as error:
            self.unusable = str(error)
        return self.read(STATIC)

    def _value(self, reading: Reading) -> Any:
        for function in [getattr(self._nvml, call, None) for call in reading.calls]:
            if function is None or self.unusable:
                continue
            try:
                return reading.of(function(self.handle, *reading.arguments))
            except self._nvml.NVMLError as error:
                if error.value in OVER:
                    raise
                if error.value in UNUSABLE:
                    self.unusable = str(error)
        return None

    def _processes(self, ours: Collection[int] | None) -> list[GpuProcess] | None:
        lists = [entries for reading in PROCESSES if (entries := self._value(reading)) is not None]
        if not lists:
            return None
        minor = self._value(MINOR)
        # One that computes and draws stands in both lists.
        memory = {entry.pid: entry.usedGpuMemory for entries in reversed(lists) for entry in entries}
        return [self._here.process(pid, memory[pid], minor, ours) for pid in sorted(memory)]


class Namespace:
    """Tells which process a number of NVML's means here."""

    def __init__(self, host: bool | None = None) -> None:
        self.host = os.stat("/proc/self/ns/pid").st_ino == HOST_PID_NAMESPACE if host is None else host
        """Whether the numbers here are the host's own."""

    def process(
        self, pid: int, memory_bytes: int | None, minor: int | None, ours: Collection[int] | None
    ) -> GpuProcess:
        """The process `pid` that uses the GPU of device file /dev/nvidia<minor>."""
        unknown = GpuProcess(pid, memory_bytes)
        # Inside a container the number may be the host's or ours; who has the GPU open is the one.
        if not self.host and (minor is None or f"/dev/nvidia{minor}" not in open_files(pid)):
            return unknown
        try:
            process = psutil.Process(pid)
            return GpuProcess(
                pid,
                memory_bytes,
                owner=process.username(),
                name=title(process.cmdline(), process.name()),
                ours=None if ours is None else _leader(pid) in ours,
                visible=True,
            )
        except (psutil.Error, OSError):
            return unknown


def _leader(pid: int) -> int:
    """The process that a number means which may be a thread's: some drivers name those. Raises OSError."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))


class _XidWatch(threading.Thread):
    """Waits for XIDs and keeps them; has NVML open for itself, so that it is not closed under a wait."""

    def __init__(self, nvml: Any, xids: dict[str, deque[Xid]]) -> None:
        super().__init__(name="layertap-xid", daemon=True)
        self.over = threading.Event()
        self.uuids: dict[int | None, str] = {}
        self._nvml = nvml
        self._xids = xids
        self._events: Any = None

    @classmethod
    def begin(cls, opened: _Open, xids: dict[str, deque[Xid]]) -> _XidWatch | None:
        """A watcher of those devices that tell of XIDs; None where none does, or where another one watches."""
        if not XID_WATCH.acquire(blocking=False):
            return None
        watch = cls(opened.nvml, xids)
        try:
            opened.nvml.nvmlInitWithFlags(NO_GPUS)
        except opened.nvml.NVMLError:
            XID_WATCH.release()
            return None
        try:
            watch._events = opened.nvml.nvmlEventSetCreate()
            for device in opened.devices:
                watch._register(device)
        except opened.nvml.NVMLError:
            pass  # this driver tells of none
        if not watch.uuids:
            watch._close()
            return None
        watch.start()
        return watch

    def run(self) -> None:
        """Until `over` is set."""
        while not self.over.is_set():
            self._wait()
        self._close()

    def _close(self) -> None:
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass  # the driver is gone
        finally:
            XID_WATCH.release()

    def _register(self, device: _Device) -> None:
        uuid = device.static["uuid"]
        if uuid is None:
            return
        try:
            self._nvml.nvmlDeviceRegisterEvents(device.handle, EVENT_XID, self._events)
        except self._nvml.NVMLError:
            return  # this GPU tells of none
        self._xids.setdefault(uuid, deque(maxlen=XIDS_KEPT))
        self.uuids[_address(device.handle)] = uuid

    def _wait(self) -> None:
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, XID_WAIT_MS)
        except self._nvml.NVMLError as error:
            if error.value != TIMED_OUT:
                self.over.wait(XID_PAUSE)
            return
        # By address: a GPU that has just been lost no longer says its uuid.
        uuid = self.uuids.get(_address(event.device))
        if uuid and event.eventType == EVENT_XID:
            self._xids[uuid].append(Xid(event.eventData, time.time()))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
