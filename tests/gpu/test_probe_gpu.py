"""The probe on GPUs: alone and batched through the kernels of serving, and every rank of two through NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import Engines
from shapes import make, start

from console.words import of_server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make(tmp_path_factory)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sound_server_passes(engines: Engines, made: dict[str, Path], tmp_path: Path, name: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"there is one GPU, {ranks} are needed")
    more: dict[str, Any] = {"tp_size": ranks} if ranks > 1 else {}
    code, found = start(engines, made[name], **more).probe(tmp_path, against_hf=True)
    print(*of_server.probed(msgspec.to_builtins(found)), sep="\n")
    assert (code, found.failures, found.ranks) == (0, [], ranks)
    assert found.lengths == [3, 64, 1500, 2500, 4097]
    assert found.shared_forwards > 0
