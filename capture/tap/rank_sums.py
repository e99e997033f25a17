"""What every TP rank saw of a probe's request: checksums of its states, and what its model makes of `serve_ids`.

After an all-reduce all ranks hold the same bits; a rank whose state was taken before it holds a partial sum of its
own. Each rank writes down its own view, in a small file in the dump folder, and exchanges nothing with the others. Only
requests whose extract id begins with `PROBE` ask for it; everybody else's cost one comparison.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capture.dumps.dump import state_names, write_json
from capture.tap.settings import Rid

PROBE = "probe"

logger = logging.getLogger("sglang.layertap")


class RankSum(msgspec.Struct, frozen=True):
    """One rank's view: xxh3-64 in hex of each state's bytes, `[tokens, hidden]` row by row.

    `served` holds the boundaries that its model's own setter makes of `serve_ids`; `error` says why it has no view.
    """

    rank: int
    tokens: int
    sums: dict[str, str]
    served: list[int]
    error: str | None = None


class RankSums:
    """One rank's part, in the server's process. `ask_setter` gives what `RankSum.served` holds."""

    def __init__(self, dump_dir: Path, secret: str, rank: int, ask_setter: Callable[[], list[int]]) -> None:
        self.dump_dir, self.rank, self.ask_setter = dump_dir, rank, ask_setter
        self.prefix = f"{secret}.{PROBE}"
        self.under_way: dict[str, tuple[list[Any], int]] = {}

    def take(self, batch: Any, states: list[Any]) -> None:
        """Add the rows of a probe's requests in this forward; `states` are `[rows, hidden]` each. Never raises."""
        row = 0
        for rid, prefix, length in zip(
            batch.rids or (), batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False
        ):
            if rid.startswith(self.prefix) and (parsed := Rid.parse(rid)):
                try:
                    self._add(rid, parsed, prefix, [state[row : row + length] for state in states], length)
                except Exception as error:  # the probe is told, the server goes on
                    logger.exception("layertap: checksums of a probe failed")
                    failed = RankSum(self.rank, 0, {}, [], error=str(error))
                    with contextlib.suppress(OSError):  # that may have been the error; the probe misses the file
                        write_json(self.dump_dir / _name(parsed, self.rank), failed)
            row += length

    def _add(self, rid: str, parsed: Rid, prefix: int, rows: list[Any], length: int) -> None:
        import torch
        import xxhash

        if prefix == 0:  # also where SGLang took the prompt back and starts it again
            for other in [other for other in self.under_way if f".{parsed.extract}." not in other]:
                del self.under_way[other]  # of a probe that was killed
            self.under_way[rid] = [xxhash.xxh3_64() for _ in rows], 0
        digests, seen = self.under_way.get(rid, ([], -1))
        if prefix != seen:
            raise ValueError(f"rank {self.rank} saw rows {prefix} to {prefix + length}, expected them from {seen}")
        for digest, state in zip(digests, rows, strict=True):
            digest.update(state.detach().contiguous().cpu().view(torch.uint8).numpy())
        self.under_way[rid] = digests, seen + length
        if seen + length >= parsed.tokens:
            del self.under_way[rid]
            names = state_names(len(rows) - 2)
            sums = {name: digest.hexdigest() for name, digest in zip(names, digests, strict=True)}
            write_json(
                self.dump_dir / _name(parsed, self.rank),
                RankSum(self.rank, seen + length, sums, self.ask_setter()),
            )


def read(dump_dir: Path, rid: str, rank: int) -> RankSum | None:
    """What `rank` wrote down of a request, None while it has not. Raises OSError or msgspec.MsgspecError."""
    parsed = Rid.parse(rid)
    assert parsed is not None
    try:
        return msgspec.json.decode((dump_dir / _name(parsed, rank)).read_bytes(), type=RankSum)
    except FileNotFoundError:
        return None


def remove_all(dump_dir: Path) -> None:
    """Remove every rank's files; only one probe a server is under way."""
    for path in dump_dir.glob("rank_*.json"):
        path.unlink(missing_ok=True)


def _name(rid: Rid, rank: int) -> str:
    return f"rank_{rank}.{rid.extract}.{rid.row}.{rid.attempt}.json"
