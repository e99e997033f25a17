"""Other ways for the states of a forward than the tap's own, as an SGLang plugin: what `tap.py` compares the tap with.

The file that `LAYERTAP_WAY` names holds the way to go, and is read at each forward. Beside it, `forwards.jsonl` gets a
line for each prefill: its tokens, the milliseconds of its layers on the GPU, and those from there to the next one's.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

VARIABLE = "LAYERTAP_WAY"
DROPPED = "dropped"
CAPTURED, COPIED, IN_THE_FORWARD = "captured", "copied", "in the forward"


def environment(folder: Path) -> dict[str, str]:
    """What a server's environment needs for the plugin to be in; makes its entry point and the way's file there."""
    from engines import entry_point

    (folder / "way").write_text("")
    return {
        "SGLANG_PLUGINS": "layertap,layertap_ways",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), entry_point(folder, "layertap_ways", "ways")]),
        VARIABLE: str(folder / "way"),
    }


def register() -> None:
    """SGLang's entry point: once the tap is in, its keeper goes the way that the file names, or its own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _put_in, HookType.AFTER)


def _put_in(_result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
    from capture.layers import inner_model
    from capture.tap.keeper import Keeper

    inner = inner_model(runner.model)
    inner.forward = Timed(inner.forward, Path(os.environ[VARIABLE]).with_name("forwards.jsonl"))
    if Keeper.take is not _take:
        _own.append(Keeper.take)
        Keeper.take = _take  # type: ignore[method-assign,assignment]


class Timed:
    """A model's forward that says of each prefill how long it took and what came after it."""

    def __init__(self, forward: Any, path: Path) -> None:
        self.forward, self.path = forward, path
        self.last: tuple[int, float, Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        from capture.tap.forward import prefill_of

        batch = prefill_of(args, kwargs)
        if batch is None:
            return self.forward(*args, **kwargs)
        now = time.perf_counter()
        if self.last is not None:
            self._write(now, *self.last)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = self.forward(*args, **kwargs)
        end.record()
        self.last = sum(batch.extend_seq_lens_cpu), now, begin, end
        return result

    def _write(self, now: float, tokens: int, started: float, begin: Any, end: Any) -> None:
        if end.query():  # with overlap schedule the next one is launched before it has ended
            computing = begin.elapsed_time(end)
            line = {"tokens": tokens, "gpu": computing, "between": 1000 * (now - started) - computing}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


_own: list[Any] = []


def _take(keeper: Any, batch: Any, states: list[Any]) -> None:
    way = Path(os.environ[VARIABLE]).read_text()
    if not way:
        _own[0](keeper, batch, states)
        return
    pieces, rows = keeper._pieces(batch)
    if way == COPIED:
        _copy(keeper, batch, states, pieces, rows)
    elif way == IN_THE_FORWARD:
        _save(keeper, states, pieces, rows)
    keeper._give_up(pieces, DROPPED)


def _copy(keeper: Any, batch: Any, states: list[Any], pieces: Any, rows: Any) -> None:
    """Into the arena, and no further."""
    slot = keeper.writers.take_slot(60.0)
    pairs = keeper._copies(slot, pieces, rows, batch, states)

    def put_back(*_error: Exception) -> None:
        keeper.writers.put_back(slot)

    keeper.copier.copy(pairs, put_back, put_back)


def _save(keeper: Any, states: list[Any], pieces: Any, rows: Any) -> None:
    """Each state of each prompt by `.cpu()` and `torch.save`, before the forward goes on."""
    import torch

    for piece, row in zip(pieces, rows, strict=True):
        folder = keeper.dump_dir / f"saved_{piece.number}"
        folder.mkdir()
        for number, state in enumerate(states):
            torch.save(state[row : row + piece.length].cpu(), folder / f"{number}.pt")
        threading.Thread(target=shutil.rmtree, args=(folder,)).start()
