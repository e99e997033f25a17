"""SGLang plugins of the embedded engine: a device platform without kernels of its own, and two small repairs.

SGLang finds them through the entry points beside this file (`sglang.srt.platforms`, `sglang.srt.plugins`) and takes
the platform when `SGLANG_PLATFORM=layertap_cpu`. Every operator then runs on its torch-native path, so no compiled
kernel package, AMX or C++ compiler is needed. Start the server with `--device cpu --attention-backend torch_native`.
"""

from types import SimpleNamespace
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform that claims no capability, so that SGLang falls back to torch everywhere."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """The attention that is written in torch alone."""
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Nothing to pin for: there is no device to copy to."""
        return False

    def get_dispatch_key_name(self) -> str:
        """A key that no kernel is registered under."""
        return "layertap_cpu"


def activate() -> str:
    """Entry point of the platform: the class that SGLang is to load."""
    return "layertap_cpu.PlainCpu"


def register() -> None:
    """Entry point of the repairs."""
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", use_absorbed_mla, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.multimodal.processors.kimi_k25.KimiK2_5VLImageProcessor.__init__",
        give_media_processor,
        HookType.BEFORE,
    )


def use_absorbed_mla(*_args: Any, **_kwargs: Any) -> None:
    """Let `torch_native` take DeepSeek's absorbed MLA.

    It has no handler of its own there and would fall to triton's, whose MHA path does not fit its KV layout.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def give_media_processor(
    _self: Any, _config: Any, _server_args: Any, processor: Any, *_args: Any, **_kwargs: Any
) -> None:
    """Give Kimi's image processor the attribute that SGLang expects of the class in Kimi's own checkpoint.

    The tiny model uses transformers' processor, which has it not. Only the warm-up sends an image.
    """
    if not hasattr(processor, "media_processor"):
        processor.media_processor = SimpleNamespace(
            media_proc_cfg={
                "patch_size": 14,
                "merge_kernel_size": 2,
                "in_patch_limit": 1024,
                "patch_limit_on_one_side": 64,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            }
        )
