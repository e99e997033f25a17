"""SGLang's entry point: puts the tap into every process that loads a model, and marks the warm-up.

SGLang logs and skips a plugin that raises. So a launch is not believed to have the tap in until tap.json says so.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capture import code_hash
from capture.dumps.dump import TapState, make_private, write_json
from capture.tap.forward import install
from capture.tap.settings import SETTINGS_VARIABLE, TapSettings


def register() -> None:
    """Register the hooks; without `LAYERTAP_TAP` in the environment the server is left alone."""
    text = os.environ.get(SETTINGS_VARIABLE)
    if not text:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    settings = msgspec.json.decode(text, type=TapSettings)

    def after_load_model(_result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        if runner.is_draft_worker:
            return
        try:
            install(runner, settings)
        except Exception as error:
            say_absent(settings, str(error))
            raise  # now, rather than after the rest of a long start

    def around_warm_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mark = Path(settings.dump_dir) / "warming"
        mark.touch()
        try:
            return original(*args, **kwargs)
        finally:
            mark.unlink(missing_ok=True)

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", after_load_model, HookType.AFTER
    )
    if multiprocessing.parent_process() is None:  # the HTTP server's process; importing it elsewhere costs seconds
        HookRegistry.register("sglang.srt.entrypoints.http_server._wait_and_warmup", around_warm_up, HookType.AROUND)


def say_absent(settings: TapSettings, why: str) -> None:
    """Write a tap.json that says that the tap is not in, and why."""
    folder = make_private(Path(settings.dump_dir))
    absent = TapState(inside=False, error=why, code=code_hash(), pid=os.getpid(), sglang="", model="", model_class="")
    write_json(folder / "tap.json", absent)
