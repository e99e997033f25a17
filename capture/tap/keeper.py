"""TP rank 0's half of the tap: tells requests apart, fills arena slots, keeps tap.json true."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dumps.dump import TapState, make_private, state_names, write_json
from capture.tap import memory
from capture.tap.arena import Arena, ArenaShape
from capture.tap.copier import copier_for
from capture.tap.settings import Rid, TapSettings
from capture.tap.writer import Fail, Piece, WriterSettings
from capture.tap.writers import Writers, default_count

logger = logging.getLogger("sglang.layertap")

HEALTH_PREFIX = "HEALTH_CHECK"
SLOT_WAIT = 2.0  # seconds that a forward may wait for a slot
CHUNK_WAIT = 600.0  # seconds after which a prompt that comes in chunks is given up
PUBLISH_SECONDS = 0.3


class Request(msgspec.Struct):
    """A prompt that is coming: `seen` of its `rid.tokens` rows so far; None as number once it is given up."""

    number: int | None
    rid: str
    total: int
    seen: int = 0
    at: float = 0.0


class Keeper:
    """TP rank 0's half: numbers requests, fills slots, follows the writers, keeps tap.json true."""

    def __init__(self, settings: TapSettings, state: TapState, device: Any) -> None:
        assert state.layers is not None
        self.settings, self.state = settings, state
        self.dump_dir = make_private(settings.folder)
        self.requests: dict[str, Request] = {}
        self.numbers = 0
        self.published = b""
        self.seen: Counter[str] = Counter()
        states = len(state_names(len(state.layers.boundaries)))
        self.arena, room = self._make_arena(states)
        state.dump_bytes = room.dump_bytes
        self.copier = copier_for(self.arena.bytes, device)
        state.slots, state.bytes_per_token = self.arena.shape.slots, self.arena.shape.bytes_per_token
        self.writers = Writers(
            settings.writers or default_count(state.ranks, state.replicas),
            self.arena.shape.slots,
            WriterSettings(
                dump_dir=str(self.dump_dir),
                arena=self.arena.shape,
                boundaries=state.layers.boundaries,
                reserve=settings.reserve,
                model=state.model,
                sglang=state.sglang,
                tap=state.code,
                spare_bytes=room.spare_bytes,
            ),
        )
        self.publish()
        threading.Thread(target=self._keep_published, name="layertap-state", daemon=True).start()

    def _make_arena(self, states: int) -> tuple[Arena, memory.Room]:
        """As large as memory allows, and what dumps may take beside it."""
        shape = ArenaShape(1, self.state.slot_tokens, states, self.state.hidden, self.state.dtype)
        disk = os.statvfs(self.dump_dir)
        replicas = self.state.replicas
        asked = None if self.settings.memory is None else self.settings.memory // replicas
        free = (disk.f_bavail * disk.f_frsize - self.settings.reserve) // replicas
        room = memory.divide(asked, shape.slot_bytes, memory.available() // replicas, free)
        return Arena.create(self.dump_dir / "arena", msgspec.structs.replace(shape, slots=room.slots)), room

    def before_forward(self, batch: Any, ours: list[bool]) -> None:
        """Have the states of the forward before copied; count each request by its class, once, at its first chunk."""
        self.copier.before_forward()
        for rid, prefix, mine in zip(batch.rids, batch.extend_prefix_lens_cpu, ours, strict=True):
            if rid in self.requests or (prefix and not mine):
                continue
            self.seen[self._class_of(rid, mine)] += 1

    def _class_of(self, rid: str, mine: bool) -> str:
        if mine:
            return "ours"
        if rid.startswith(HEALTH_PREFIX):
            return "health"
        return "warm_up" if (Path(self.settings.dump_dir) / "warming").exists() else "stranger"

    def take(self, batch: Any, states: list[Any]) -> None:
        """Copy the rows of our requests into a slot and tell the writers; never raises, waits `SLOT_WAIT` at most."""
        pieces, rows = self._pieces(batch)
        if not pieces:
            return
        self.state.shared_forwards += len(pieces) > 1
        reason = self._unfit(batch, states)
        slot = None if reason else self.writers.take_slot(SLOT_WAIT)
        if slot is None:
            slow = f"no arena slot came free within {SLOT_WAIT:.0f} s: the writers are too slow"
            self._give_up(pieces, reason or slow, busy=reason is None)
            return

        def failed(error: Exception) -> None:  # a prompt lost is said, the server goes on
            logger.error("layertap: copying a forward failed", exc_info=error)
            self.writers.put_back(slot)
            self._give_up(pieces, f"copying its states failed: {error}")

        pairs = self._copies(slot, pieces, rows, batch, states)
        self.copier.copy(pairs, functools.partial(self.writers.send_forward, slot, pieces), failed)

    def refuse(self, batch: Any, reason: str) -> None:
        """Fail what of this forward is ours."""
        self._give_up(self._pieces(batch)[0], reason)

    def _copies(
        self, slot: int, pieces: list[Piece], rows: list[int], batch: Any, states: list[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """(place in the slot, source) for ids and states; rows that lie together in both go as one."""
        places = [self.arena.ids(slot), *self.arena.states(slot)]
        # SGLang fills the buffer of ids anew for the next forward, maybe before it is copied.
        sources = [batch.input_ids.clone(), *states]
        runs: list[list[int]] = []
        for piece, row in zip(pieces, rows, strict=True):
            if runs and runs[-1][1] + runs[-1][2] == row:
                runs[-1][2] += piece.length
            else:
                runs.append([piece.start, row, piece.length])
        for start, row, length in runs:
            for place, source in zip(places, sources, strict=True):
                yield place[start : start + length], source[row : row + length]

    def _pieces(self, batch: Any) -> tuple[list[Piece], list[int]]:
        """What of this forward is ours and whole so far, packed from the slot's start, and where its rows lie."""
        pieces, rows, packed, row = [], [], 0, 0
        for rid, prefix, length in zip(
            batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True
        ):
            request = self._request(rid, prefix, length)
            if request is not None and request.number is not None:
                pieces.append(Piece(request.number, rid, packed, length, prefix, request.total))
                rows.append(row)
                packed += length
            row += length
        return pieces, rows

    def _request(self, rid: str, prefix: int, length: int) -> Request | None:
        """The request that rows `prefix … prefix + length` belong to; None for one that is not ours."""
        if not rid.startswith(self.settings.secret + "."):
            return None
        request = self.requests.get(rid)
        if request is None or (prefix == 0 and request.seen):  # new, or SGLang took it back and starts it again
            if request is not None:
                self._fail(request, "SGLang took the prompt back half-way and started it again")
            parsed = Rid.parse(rid)
            request = Request(self.numbers, rid, parsed.tokens if parsed else 0)
            self.requests[rid] = request
            self.numbers += 1
        request.at = time.monotonic()
        if prefix != request.seen == 0:
            self._fail(
                request,
                f"{prefix} of its {request.total} tokens were not computed but came from a prefix cache; start the "
                "server with --disable-radix-cache",
            )
        elif prefix != request.seen:
            self._fail(request, f"its tokens {request.seen} to {prefix} never came by")
        elif prefix + length > request.total:
            self._fail(request, f"it has more than the {request.total} tokens that its rid names")
        request.seen = prefix + length
        if request.seen >= request.total:
            self.requests.pop(rid, None)
        return request

    def _unfit(self, batch: Any, states: list[Any]) -> str | None:
        rows, shape = sum(batch.extend_seq_lens_cpu), self.arena.shape
        if rows > shape.slot_tokens:
            return f"its forward has {rows} tokens, an arena slot holds {shape.slot_tokens}"
        if len(states) != shape.states:
            return f"the model returned {len(states)} states, {shape.states} were asked for"
        for state in states:
            if tuple(state.shape) != (rows, shape.hidden):
                return f"its forward has {rows} tokens, the model returned states of shape {tuple(state.shape)}"
            if str(state.dtype) != f"torch.{shape.dtype}":
                return f"the model returned {state.dtype} states, the arena holds {shape.dtype}"
        return None

    def _give_up(self, pieces: Iterable[Piece], reason: str, *, busy: bool = False) -> None:
        for piece in pieces:
            request = self.requests.get(piece.rid) or Request(piece.number, piece.rid, piece.total)
            self._fail(request, reason, busy=busy)

    def _fail(self, request: Request, reason: str, *, busy: bool = False) -> None:
        """Have a writer settle `request` as failed, after its chunks that are on their way; later ones are dropped."""
        if request.number is not None:
            fail = Fail(request.number, request.rid, reason, busy)
            self.copier.then(functools.partial(self.writers.send_fail, fail))
            request.number = None

    def publish(self) -> None:
        """Write tap.json if it changed."""
        self.state.seen = {name: self.seen[name] for name in ("ours", "warm_up", "health", "stranger")}
        links = self.writers.links
        self.state.writer_pids = [link.pid for link in links if link.pid is not None]
        self.state.writers_lost = sum(link.lost for link in links)
        self.state.failed = sum(link.failed for link in links)
        self.state.slots_free = self.writers.free.qsize()
        self.state.slot_wait_seconds = round(self.writers.waited, 3)
        now = msgspec.json.encode(self.state)
        if now != self.published:
            write_json(self.dump_dir / "tap.json", self.state)
            self.published = now

    def _keep_published(self) -> None:
        while True:
            time.sleep(PUBLISH_SECONDS)
            for request in list(self.requests.values()):
                if time.monotonic() - request.at > CHUNK_WAIT:
                    self._fail(request, f"no further chunk of it came for {CHUNK_WAIT:.0f} s")
                    self.requests.pop(request.rid, None)
            try:
                self.publish()
            except OSError as error:
                logger.warning("layertap: tap.json: %s", error)
