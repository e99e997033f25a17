"""The embedded engine's platform for SGLang 0.5.11 to 0.5.20, which asked a platform other questions than 0.5.23 does.

A plugin of the tests alone: it brings up enough of an older SGLang on a plain CPU to see what the tap does in it.
"""

from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class OlderCpu(SRTPlatform):
    """Torch everywhere, SGLang's own pools, one token a page."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: Any = None) -> float:
        return float(psutil.Process().memory_info().rss)

    def get_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: Any) -> None:
        pass

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_mha_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        try:
            from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        except ImportError:
            from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        def make(size: int, page_size: int, **more: Any) -> Any:
            assert page_size == 1
            return TokenToKVPoolAllocator(size, **more)

        return make


def activate() -> str:
    return "older_cpu.OlderCpu"
