"""A stand-in for pynvml (nvidia-ml-py 13): the same names, errors and shapes, over cards that a test may change."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

TEXTS = {
    1: "Uninitialized",
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires restart",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}


class NVMLError(Exception):
    value = 999

    def __str__(self) -> str:
        return TEXTS[self.value]


ERRORS = {value: type(f"NVMLError_{value}", (NVMLError,), {"value": value}) for value in TEXTS}
NOT_SUPPORTED, FUNCTION_NOT_FOUND, LOST, UNINITIALIZED = 3, 13, 15, 1


class Card:
    """A GPU under load, as the first case's are."""

    def __init__(self, index: int, **known: Any) -> None:
        self.handle = ctypes.pointer(ctypes.c_int(index))
        self.values = {
            "nvmlDeviceGetUUID": f"GPU-{index}",
            "nvmlDeviceGetName": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "nvmlDeviceGetMinorNumber": index,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=102_641_958_912, used=94_598_373_376),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=98, memory=61),
            "nvmlDeviceGetPowerUsage": 412_345,
            "nvmlDeviceGetEnforcedPowerLimit": 600_000,
            "nvmlDeviceGetTemperatureV": 71,
            "nvmlDeviceGetTemperature": 70,
            "nvmlDeviceGetClockInfo": 2_280,
            "nvmlDeviceGetMaxClockInfo": 2_430,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x8,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetPcieReplayCounter": 3,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (1, 0, 0, 0),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetPowerManagementDefaultLimit": 600_000,
            "nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=137_438_953_472, bar1Used=0),
            "nvmlDeviceGetCudaComputeCapability": (12, 0),
            "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))],
            "nvmlDeviceGetP2PStatus": 0,
            "nvmlDeviceGetComputeRunningProcesses_v3": [],
            "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
            "nvmlDeviceRegisterEvents": None,
        } | known
        self.failing: dict[str, int] = {}
        self.lost = False


def process(pid: int, memory: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=0xFFFFFFFF, computeInstanceId=0xFFFFFFFF)


class FakeNvml(ModuleType):
    """`failing` maps a call to the number of the error that it ends with; `calls` counts them."""

    NVMLError = NVMLError

    def __init__(self, *cards: Card) -> None:
        super().__init__("pynvml")
        self.cards = list(cards)
        self.failing: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.users = 0
        self.driver = "580.159.03"
        self.events: queue.Queue[SimpleNamespace] = queue.Queue()
        self._lock = threading.Lock()
        for name in Card(0).values:
            setattr(self, name, self._device_call(name))

    def happen(self, index: int, data: int, event_type: int = 0x8) -> None:
        """An event of a card; as in NVML, the device comes as a pointer of its own."""
        device = ctypes.cast(self.cards[index].handle, ctypes.POINTER(ctypes.c_int))
        self.events.put(SimpleNamespace(device=device, eventType=event_type, eventData=data))

    def nvmlInitWithFlags(self, flags: int) -> None:
        assert flags == 1
        self._called("nvmlInitWithFlags")
        with self._lock:
            self.users += 1

    def nvmlInit(self) -> None:
        self.nvmlInitWithFlags(1)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return self.nvmlDeviceGetComputeRunningProcesses_v3(handle)

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        with self._lock:
            self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._called("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._called("nvmlSystemGetCudaDriverVersion_v2")
        return 13_010

    def nvmlDeviceGetCount(self) -> int:
        self._called("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        card = self.cards[index]
        self._called("nvmlDeviceGetHandleByIndex", card)
        return card.handle

    def nvmlEventSetCreate(self) -> str:
        self._called("nvmlEventSetCreate")
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:
        self._called("nvmlEventSetFree")

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:
        self._called("nvmlEventSetWait_v2")
        try:
            return self.events.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise ERRORS[10] from None

    def _device_call(self, name: str) -> Any:
        def call(handle: Any, *arguments: Any) -> Any:
            card = self.cards[handle.contents.value]
            self._called(name, card)
            return card.values[name]

        return call

    def _called(self, name: str, card: Card | None = None) -> None:
        assert self.users or name in ("nvmlInitWithFlags", "nvmlShutdown"), f"{name} while NVML is closed"
        self.calls[name] += 1
        failing = self.failing | (card.failing if card else {})
        if card and card.lost:
            raise ERRORS[LOST]
        if name in failing:
            raise ERRORS[failing[name]]
