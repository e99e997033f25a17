"""The probe: what a server's flags cannot prove, shown by drawing from it.

Prompts of several lengths are drawn one at a time and then all at once. Each must give one dump that is sound, with the
ids that were sent; alone and in a batch the same states, but for rounding; on every TP rank the same bits; and the
model's own setter must still make the drawn boundaries of `serve_ids`. 1,500 and 2,500 tokens lie on either side of
SGLang's limit for all-reduce fusion, beyond which a partial sum does not show.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capture import against_hf, code_hash, gate
from capture.against_hf import Against, cosines
from capture.draw import Drawer, DrawError, tokens_in_flight
from capture.dumps import dump, verify
from capture.layers import Layers
from capture.model_config import known_of
from capture.server import Server
from capture.tap import rank_sums
from capture.tap.rank_sums import RankSum

NAME = "probe.json"  # in the dump folder: it lives as long as the server
LENGTHS = (3, 64, 1500, 2500)
ROUNDS = 5  # in which a server may take two prompts into one forward
RANK_SECONDS = 30.0
SCALE = 0.02  # by which the size of a state may differ from Hugging Face's; 16 bits round by 0.004
SAID = 3  # failures that one sentence names
TAP_SECONDS = 2.0  # in which tap.json shows what was drawn


class Tolerance(msgspec.Struct, frozen=True):
    """How near the states of a token must be, alone and in a batch.

    Their cosine is above `near`, but for a share `strays` of a prompt's tokens, whose is above `floor`.
    """

    near: float
    strays: float
    floor: float
    why: str


# Another batch means another order of summation. Float32 keeps six digits of it; 16 bits keep two or three, which
# rounding errors over all layers bring to 0.999. Where a router's two best experts are as good as equal, rounding picks
# another one, and that token's state (and through attention, a little of those after it) changes by an expert's part.
FLOAT32 = Tolerance(0.99999, 0.0, 0.99999, "float32")
DENSE = Tolerance(0.999, 0.0, 0.999, "16 bits")
ROUTED = Tolerance(0.999, 0.05, 0.9, "16 bits and routed experts, of which rounding may choose another")


class Compared(msgspec.Struct, frozen=True):
    """A state of one prompt, alone against in a batch: the least cosine of a token, and tokens below `near`."""

    tokens: int
    state: str
    least: float
    strays: int


class Probed(msgspec.Struct, kw_only=True):
    """What a probe came to; it passed where `failures` is empty.

    `shared_forwards` counts the forwards that held several of the prompts when they were sent together; where it is 0,
    SGLang took none of them together in any of some rounds, and batching was not shown.
    """

    schema: int = 1
    passed: bool = False
    at: float
    seconds: float = 0.0
    run: str
    code: str
    pid: int
    sglang: str
    model: str
    model_class: str
    dtype: str
    ranks: int
    layers: Layers
    lengths: list[int]
    shared_forwards: int = 0
    tolerance: Tolerance
    compared: list[Compared] = []
    against_hf: list[Against] | None = None
    failures: list[str] = []

    def refusal(self) -> str | None:
        """Why this server is not to be drawn from, None where it passed."""
        if self.passed:
            return None
        more = len(self.failures) - SAID
        rest = [f"and {more} more, which the log and `layertap probe` name"] if more > 0 else []
        return "the probe failed: " + "; ".join([*self.failures[:SAID], *rest])


def last(server: Server) -> Probed | None:
    """What this server run was last probed with; None where it has not been, by this version."""
    try:
        found = msgspec.json.decode((Path(server.dump_dir) / NAME).read_bytes(), type=Probed)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if (found.run, found.code) == (server.run, code_hash()) else None


def kept(server: Server, tap: dump.TapState, longest: int) -> Probed | None:
    """The last result, where it passed on these very processes, on prompts of `longest` tokens or more; or None."""
    found = last(server)
    return found if found and found.passed and found.pid == tap.pid and found.lengths[-1] >= longest else None


def probe(
    server: Server,
    tap: dump.TapState,
    info: dict[str, Any],
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    most: int | None = None,
    with_hf: bool = False,
) -> Probed:
    """Probe a server that the gate lets pass, and keep the result beside its dumps; the caller holds its lock.

    `report` gets what is being done. `most` bounds the prompts' tokens; without it, what the server takes into
    one forward together does. `with_hf` compares with a Hugging Face forward too. Raises ServerGone, and InputError
    for a model that such a forward cannot be made of here.
    """
    assert tap.layers is not None
    begun = time.monotonic()
    if with_hf:
        against_hf.require_room(Path(tap.model))
    takes = longest(tap, info)
    made = Probed(
        at=time.time(),
        run=server.run,
        code=tap.code,
        pid=tap.pid,
        sglang=tap.sglang,
        model=tap.model,
        model_class=tap.model_class,
        dtype=tap.dtype,
        ranks=tap.ranks,
        layers=tap.layers,
        lengths=lengths(min(takes, most or info.get("max_prefill_tokens") or takes), tokens_in_flight(server, tap)),
        tolerance=tolerance(tap.dtype, experts(Path(tap.model))),
    )
    asked = prompts(tokenizer, made.lengths)
    alone = asyncio.run(Probe(server, tap, made, report).run(asked))
    if with_hf:
        report("a Hugging Face forward")
        made.against_hf = _against_hf(server, made, asked, alone)
    made.failures = list(dict.fromkeys(made.failures))
    made.passed, made.seconds = not made.failures, round(time.monotonic() - begun, 2)
    dump.write_json(Path(server.dump_dir) / NAME, made)
    return made


def longest(tap: dump.TapState, info: dict[str, Any]) -> int:
    """Most tokens of a prompt that the server takes."""
    takes = [gate.longest_prompt(info), info.get("max_total_num_tokens"), tap.dump_bytes // tap.bytes_per_token]
    return min(int(most) for most in takes if most is not None)


def lengths(most: int, room: int) -> list[int]:
    """The prompts' lengths, ascending: those of `LENGTHS` below `most`, and `most`; `room` tokens all together."""
    fit = [length for length in LENGTHS if length < most]
    while fit and sum(fit) + fit[-1] >= room:
        fit.pop()
    return [*fit, max(1, min(most, room - sum(fit)))]


def prompts(tokenizer: Any, wanted: list[int]) -> list[list[int]]:
    """Ids of ordinary tokens, none of which stands for an image or a turn; the same ones every time."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
    return [random.Random(length).choices(ordinary, k=length) for length in wanted]


def tolerance(dtype: str, routed: bool) -> Tolerance:
    """How near states of this dtype must be."""
    if dtype == "float32":
        return FLOAT32
    return ROUTED if routed else DENSE


def experts(model: Path) -> bool:
    """Whether a model routes its tokens to experts, by its config.json."""
    return known_of(model).experts > 0


def _against_hf(
    server: Server, made: Probed, asked: list[list[int]], alone: list[dict[str, Any] | None]
) -> list[Against]:
    """Each prompt that is short enough, against a Hugging Face forward; what is wrong goes into `made.failures`."""
    drawn = [
        (ids, states)
        for ids, states in zip(asked, alone, strict=True)
        if states is not None and len(ids) <= against_hf.MOST_TOKENS
    ]
    found = against_hf.compare(Path(made.model), drawn, made.layers.boundaries, server.trust_remote_code)
    for one in found:
        if one.nearest != one.boundary:
            made.failures.append(
                f"{one.tokens:,} tokens: {named(made.layers, one.state)} should be Hugging Face's hidden_states"
                f"[{one.boundary}], and is nearer to hidden_states[{one.nearest}]"
            )
        elif abs(one.scale - 1) > SCALE:
            made.failures.append(
                f"{one.tokens:,} tokens: {named(made.layers, one.state)} is {one.scale:.3g} times as large as Hugging "
                "Face's: a norm was applied or left out"
            )
    return found


def named(layers: Layers, state: str) -> str:
    """A state with its layer: `aux_1 (output of layer 30)`."""
    if state.startswith("aux_"):
        return f"{state} (output of layer {layers.outputs[int(state[4:])]})"
    return f"{state} ({'after' if state == 'final' else 'before'} the final norm)"


class Probe:
    """One probe under way: what it draws, and what it finds wrong."""

    def __init__(self, server: Server, tap: dump.TapState, made: Probed, report: Callable[[str], None]) -> None:
        assert tap.layers is not None
        self.server, self.tap, self.made, self.report = server, tap, made, report
        self.layers, self.dump_dir = tap.layers, Path(server.dump_dir)
        self.names = dump.state_names(len(self.layers.boundaries))

    async def run(self, prompts: list[list[int]]) -> list[dict[str, Any] | None]:
        """Draw every prompt alone, then all of them together, and compare; returns the states of each alone."""
        rank_sums.remove_all(self.dump_dir)
        try:
            async with Drawer(self.server, self.tap, rank_sums.PROBE + random.randbytes(4).hex()) as self.drawer:
                alone = []
                for row, ids in enumerate(prompts):
                    self.report(f"{len(ids):,} tokens alone")
                    alone.append(await self._draw(row, 0, ids, "alone"))
                together = await self._together(prompts)
        finally:
            rank_sums.remove_all(self.dump_dir)
        for ids, one, batched in zip(prompts, alone, together, strict=True):
            if one is not None and batched is not None:
                self._compare(len(ids), one, batched)
        return alone

    async def _together(self, prompts: list[list[int]]) -> list[dict[str, Any] | None]:
        """All prompts at once, the longest first: while it is computed the others gather, and share a forward."""
        order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        states: dict[int, dict[str, Any] | None] = {}
        for attempt in range(1, ROUNDS + 1):
            self.report(f"{len(prompts)} prompts together")
            before = self._shared_forwards()
            drawn = await asyncio.gather(*(self._draw(row, attempt, prompts[row], "together") for row in order))
            states = dict(zip(order, drawn, strict=True))
            deadline = time.monotonic() + TAP_SECONDS
            while (shared := self._shared_forwards() - before) == 0 and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            self.made.shared_forwards = shared
            if shared or self.made.failures or len(prompts) == 1:
                break
        return [states[row] for row in range(len(prompts))]

    def _shared_forwards(self) -> int:
        tap = dump.read_tap(self.dump_dir)
        return tap.shared_forwards if tap else 0

    async def _draw(self, row: int, attempt: int, ids: list[int], how: str) -> dict[str, Any] | None:
        """The states of one prompt; None where something is wrong with them, which is then said."""
        where = f"{len(ids):,} tokens {how}"
        try:
            rid, folder = await self.drawer.draw(row, attempt, ids)
        except DrawError as error:
            self.made.failures.append(f"{where}: {error}")
            return None
        try:
            states = verify.read_dump(folder, rid, ids, self.layers.boundaries, self.tap.hidden, self.tap.dtype)
            await self._check_ranks(where, rid, states)
            return states
        except (verify.VerificationError, dump.DumpError) as error:
            self.made.failures.append(f"{where}: {error}")
            return None
        finally:
            dump.remove(folder)

    async def _check_ranks(self, where: str, rid: str, states: dict[str, Any]) -> None:
        """Every rank saw the bits that came out, and its setter still makes these boundaries of `serve_ids`."""
        import torch
        import xxhash

        whole: list[RankSum] = []
        for rank in range(self.tap.ranks):
            seen = await self._rank(rid, rank)
            if seen is None:
                self.made.failures.append(f"{where}: rank {rank} left no checksums within {RANK_SECONDS:.0f} s")
            elif seen.error:
                self.made.failures.append(f"{where}: rank {rank} has no checksums: {seen.error}")
            else:
                whole.append(seen)
                if seen.served != self.layers.boundaries:
                    self.made.failures.append(
                        f"{where}: rank {rank}'s {self.tap.model_class} makes boundaries {seen.served} of serve_ids "
                        f"{self.layers.serve_ids}, drawn were {self.layers.boundaries}"
                    )
        if not whole or whole[0].rank != 0:
            return
        for name, state in states.items():
            first, which = whole[0].sums[name], named(self.layers, name)
            if xxhash.xxh3_64_hexdigest(state.contiguous().view(torch.uint8).numpy()) != first:
                self.made.failures.append(f"{where}: {which} was changed between the model and its dump")
            if others := ", ".join(str(one.rank) for one in whole if one.sums[name] != first):
                self.made.failures.append(
                    f"{where}: {which} differs between rank 0 and rank {others}: it was taken before the ranks' parts "
                    "were added up (as under all-reduce fusion), or the ranks do not compute the same"
                )

    async def _rank(self, rid: str, rank: int) -> RankSum | None:
        deadline = time.monotonic() + RANK_SECONDS
        while (found := rank_sums.read(self.dump_dir, rid, rank)) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return found

    def _compare(self, tokens: int, alone: dict[str, Any], together: dict[str, Any]) -> None:
        limit = self.made.tolerance
        for name in self.names:
            cosine = cosines(alone[name], together[name])
            one = Compared(tokens, name, round(float(cosine.min()), 7), int((cosine <= limit.near).sum()))
            self.made.compared.append(one)
            most = limit.strays * tokens + (limit.strays > 0)  # of a short prompt, one
            if one.strays > most or one.least <= limit.floor:
                self.made.failures.append(
                    f"{tokens:,} tokens: {named(self.layers, name)} differs between alone and together: {one.strays:,} "
                    f"have a cosine of {limit.near} or less, the least is {one.least:.5f} ({limit.why})"
                )
