"""Other ways for the states of a forward than the tap's own, as an SGLang plugin: what `tap.py` compares the tap with.

The file that `LAYERTAP_WAY` names holds the way to go, and is read at each forward.
"""

from __future__ import annotations

import os
import shutil
import threading
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


def _put_in(_result: Any, _runner: Any, *_args: Any, **_kwargs: Any) -> None:
    from capture.tap.keeper import Keeper

    if Keeper.take is not _take:
        _own.append(Keeper.take)
        Keeper.take = _take  # type: ignore[method-assign,assignment]


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
    pairs = keeper._copies(slot, pieces, rows, [batch.input_ids.clone(), *states])

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
