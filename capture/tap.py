"""The tap: SGLang's own EAGLE-3 capture, borrowed for one prefill forward and handed back.

`install` runs after a model is loaded. It resolves the layers through the model's own setter, leaves the model as
SGLang had it (`capture_aux_hidden_states` off, `layers_to_capture` empty) and wraps the inner model's forward. A
forward that holds a request of ours is called with the boundaries in, on every rank, so that collectives stay
matched; TP rank 0 copies the states into the arena and leaves the rest to the writer. Warm-up, health checks and
strangers' requests run through untouched.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from capture import code_hash
from capture.arena import Arena, ArenaShape
from capture.dump import TapState, make_private, state_names, write_json
from capture.layers import LayerChoice, inner_model, resolve
from capture.writer import MESSAGE_BYTES, MESSAGE_PIECES, Ack, Fail, Forward, Piece, WriterSettings

logger = logging.getLogger("sglang.layertap")

SETTINGS_VARIABLE = "LAYERTAP_TAP"
HEALTH_PREFIX = "HEALTH_CHECK"
SLOT_WAIT = 2.0  # seconds that a forward may wait for a slot
CHUNK_WAIT = 600.0  # seconds after which a prompt that comes in chunks is given up


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch hands to the tap, as JSON in `LAYERTAP_TAP`. `secret` begins the rid of every request of ours."""

    dump_dir: str
    secret: str
    layers: LayerChoice
    slots: int = 4
    reserve: int = 16 << 20


class Rid(msgspec.Struct, frozen=True):
    """A request id of ours: `<secret>.<extract>.<row>.<attempt>.<tokens>`."""

    secret: str
    extract: str
    row: int
    attempt: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.secret}.{self.extract}.{self.row}.{self.attempt}.{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> Rid | None:
        """The parts of `text`, None where it is no rid of this form."""
        parts = text.split(".")
        if len(parts) != 5 or not all(part.isdecimal() for part in parts[2:]):
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]), int(parts[4]))


def install(runner: Any, settings: TapSettings) -> Tap:
    """Put the tap into a loaded `ModelRunner`. Raises LayerError, DumpError or OSError, each with its remedy."""
    tap = Tap(runner, settings)
    tap.wrap()
    return tap


class Tap:
    """One rank's part: decides which forwards are captured and, on rank 0, keeps what came out."""

    def __init__(self, runner: Any, settings: TapSettings) -> None:
        import sglang
        from sglang.srt.distributed.parallel_state import get_tp_group

        self.settings = settings
        self.inner = inner_model(runner.model)
        self.layers = resolve(runner.model, settings.layers, sglang.__version__)
        self.pre_norm: Any = None
        self.keeper: Keeper | None = None
        if get_tp_group().rank_in_group == 0:
            self.keeper = Keeper(
                settings,
                TapState(
                    code=code_hash(),
                    pid=os.getpid(),
                    sglang=sglang.__version__,
                    model=runner.server_args.model_path,
                    model_class=type(runner.model).__name__,
                    layers=self.layers,
                    ranks=get_tp_group().world_size,
                    hidden=runner.model_config.hidden_size,
                    dtype=str(runner.model_config.dtype).removeprefix("torch."),
                    slot_tokens=forward_tokens(runner.server_args, runner.model_config.context_len),
                    reserve=settings.reserve,
                ),
            )
            logger.info("layertap: the tap is in, drawing %s", self.layers.words())

    def wrap(self) -> None:
        """Wrap the inner model's forward."""
        original = self.inner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            batch = kwargs.get("forward_batch") or next((a for a in args if hasattr(a, "forward_mode")), None)
            if batch is None or not batch.forward_mode.is_extend():
                return original(*args, **kwargs)
            # Every rank sees the same rids, so all ranks capture or none does.
            ours = [rid.startswith(self.settings.secret + ".") for rid in batch.rids or ()]
            if self.keeper:
                self.keeper.count(batch, ours)
            if not any(ours):
                return original(*args, **kwargs)
            return self.capture(original, batch, args, kwargs)

        self.inner.forward = forward

    def capture(self, original: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's forward with the boundaries in; returns what the caller expects of a plain forward."""
        import torch

        if self.inner.layers_to_capture:
            raise RuntimeError("layertap: SGLang's own hidden state capture is on; start the server without it")
        self.inner.layers_to_capture = list(self.layers.boundaries)
        hook = self.inner.norm.register_forward_pre_hook(self._see_norm_input, with_kwargs=True)
        try:
            final, aux = original(*args, **kwargs)
            if self.keeper:
                # One packed [tokens, K * hidden] for the models that were moved over in 0.5.23, else a list of K.
                parts = aux.chunk(len(self.layers.boundaries), dim=-1) if isinstance(aux, torch.Tensor) else list(aux)
                self.keeper.take(batch, [*parts, final, self.pre_norm])
        finally:
            self.inner.layers_to_capture = []
            hook.remove()
            self.pre_norm = None
        return final

    def _see_norm_input(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The fused kernel overwrites both, so the sum is taken before it runs.
        hidden = args[0] if args else kwargs["x"]
        residual = args[1] if len(args) > 1 else kwargs.get("residual")
        self.pre_norm = hidden.clone() if residual is None else hidden + residual


def forward_tokens(server_args: Any, context_length: int) -> int:
    """Most rows that one forward can hold: the batch budget, or one prompt that is longer."""
    longest = max(server_args.max_prefill_tokens, context_length)
    chunk = server_args.chunked_prefill_size
    return int(min(longest, chunk) if chunk and chunk > 0 else longest)


class Request(msgspec.Struct):
    """A prompt that is coming: `seen` of its `rid.tokens` rows so far; None as number once it is given up."""

    number: int | None
    rid: str
    total: int
    seen: int = 0
    at: float = 0.0


class Keeper:
    """TP rank 0's half: numbers requests, fills slots, follows the writer, keeps tap.json true."""

    def __init__(self, settings: TapSettings, state: TapState) -> None:
        assert state.layers is not None
        self.settings, self.state = settings, state
        self.dump_dir = make_private(Path(settings.dump_dir))
        self.requests: dict[str, Request] = {}
        self.numbers = 0
        self.published = b""
        self.seen: Counter[str] = Counter()
        states = len(state_names(len(state.layers.boundaries)))
        self.arena = self._make_arena(states)
        state.slots, state.bytes_per_token = self.arena.shape.slots, self.arena.shape.bytes_per_token
        self.writer = WriterLink(
            self.arena.shape.slots,
            WriterSettings(
                dump_dir=str(self.dump_dir),
                arena=self.arena.shape,
                boundaries=state.layers.boundaries,
                reserve=settings.reserve,
                model=state.model,
                sglang=state.sglang,
                tap=state.code,
            ),
        )
        self.publish()
        threading.Thread(target=self._keep_published, name="layertap-state", daemon=True).start()

    def _make_arena(self, states: int) -> Arena:
        """As many slots as asked for, fewer where they would take more than half of the free tmpfs."""
        shape = ArenaShape(self.settings.slots, self.state.slot_tokens, states, self.state.hidden, self.state.dtype)
        free = os.statvfs(self.dump_dir).f_bavail * os.statvfs(self.dump_dir).f_frsize
        slots = min(shape.slots, free // 2 // shape.slot_bytes)
        if slots < 1:
            raise OSError(
                28,
                f"layertap: the arena needs {2 * shape.slot_bytes:,} free bytes on {self.dump_dir}, {free:,} are free; "
                "make room there, or lower --max-prefill-tokens or --context-length",
            )
        return Arena.create(self.dump_dir / "arena", msgspec.structs.replace(shape, slots=slots))

    def count(self, batch: Any, ours: list[bool]) -> None:
        """Count each request by its class, once, at its first chunk."""
        for rid, prefix, mine in zip(batch.rids or (), batch.extend_prefix_lens_cpu, ours, strict=True):
            if rid in self.requests or (prefix and not mine):
                continue
            self.seen[self._class_of(rid, mine)] += 1

    def _class_of(self, rid: str, mine: bool) -> str:
        if mine:
            return "ours"
        if rid.startswith(HEALTH_PREFIX):
            return "health"
        return "warm_up" if (self.dump_dir / "warming").exists() else "stranger"

    def take(self, batch: Any, states: list[Any]) -> None:
        """Copy the rows of our requests into a slot and tell the writer; never raises, waits `SLOT_WAIT` at most."""
        pieces, rows = self._pieces(batch)
        if not pieces:
            return
        reason = self._unfit(batch, states)
        slot = None if reason else self.writer.take_slot(SLOT_WAIT)
        if slot is None:
            self._give_up(pieces, reason or f"no arena slot came free within {SLOT_WAIT:.0f} s: the writer is too slow")
            return
        try:
            ids, room = self.arena.ids(slot), self.arena.states(slot)
            for piece, row in zip(pieces, rows, strict=True):
                to, source = slice(piece.start, piece.start + piece.length), slice(row, row + piece.length)
                ids[to].copy_(batch.input_ids[source])
                for place, state in zip(room, states, strict=True):
                    place[to].copy_(state[source])
        except Exception as error:  # a prompt lost is said, the server goes on
            logger.exception("layertap: copying a forward failed")
            self.writer.put_back(slot)
            self._give_up(pieces, f"copying its states failed: {error}")
            return
        self.writer.send_forward(slot, pieces)

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
        if prefix != request.seen:
            self._fail(
                request,
                f"its first {prefix} tokens were not computed but came from a prefix cache ({request.seen} rows were "
                "seen); start the server with --disable-radix-cache",
            )
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

    def _give_up(self, pieces: Iterable[Piece], reason: str) -> None:
        for piece in pieces:
            request = self.requests.get(piece.rid) or Request(piece.number, piece.rid, piece.total)
            self._fail(request, reason)

    def _fail(self, request: Request, reason: str) -> None:
        """Have the writer settle `request` as failed; its later chunks are dropped."""
        if request.number is not None:
            self.writer.send_fail(Fail(request.number, request.rid, reason))
            request.number = None

    def publish(self) -> None:
        """Write tap.json if it changed."""
        self.state.seen = {name: self.seen[name] for name in ("ours", "warm_up", "health", "stranger")}
        self.state.writer_pid, self.state.writers_lost = self.writer.pid, self.writer.lost
        self.state.slots_free, self.state.failed = self.writer.free.qsize(), self.writer.failed
        now = msgspec.json.encode(self.state)
        if now != self.published:
            write_json(self.dump_dir / "tap.json", self.state)
            self.published = now

    def _keep_published(self) -> None:
        while True:
            time.sleep(0.3)
            for request in list(self.requests.values()):
                if time.monotonic() - request.at > CHUNK_WAIT:
                    self._fail(request, f"no further chunk of it came for {CHUNK_WAIT:.0f} s")
                    self.requests.pop(request.rid, None)
            try:
                self.publish()
            except OSError as error:
                logger.warning("layertap: tap.json: %s", error)


class WriterLink:
    """The scheduler's end of the writer: free slots, what is unsettled, and a new writer when one dies."""

    def __init__(self, slots: int, settings: WriterSettings) -> None:
        self.slots, self.settings = slots, settings
        self.free: queue.Queue[int] = queue.Queue()
        for slot in range(slots):
            self.free.put(slot)
        self.lock = threading.Lock()
        self.unsettled: dict[int, str] = {}  # number -> rid, sent and not yet on disk
        self.sent_slots: set[int] = set()
        self.owed: list[Fail] = []  # failures that no writer has been told yet
        self.lost = self.failed = 0
        self.pid: int | None = None
        self.link: socket.socket | None = None
        threading.Thread(target=self._keep_one_alive, name="layertap-writer", daemon=True).start()

    def take_slot(self, seconds: float) -> int | None:
        """A free slot, None where none comes free in `seconds`."""
        try:
            return self.free.get(timeout=seconds)
        except queue.Empty:
            return None

    def put_back(self, slot: int) -> None:
        """Give a slot back unused."""
        self.free.put(slot)

    def send_forward(self, slot: int, pieces: list[Piece]) -> None:
        """Hand a filled slot over. Where the writer is just dying, its successor fails these requests."""
        with self.lock:
            self.unsettled.update((piece.number, piece.rid) for piece in pieces)
            self.sent_slots.add(slot)
            for start in range(0, len(pieces), MESSAGE_PIECES):
                last = start + MESSAGE_PIECES >= len(pieces)
                if not self._send(Forward(slot, pieces[start : start + MESSAGE_PIECES], last)):
                    self.owed += [
                        Fail(piece.number, piece.rid, "the writer took no message") for piece in pieces[start:]
                    ]
                    return

    def send_fail(self, message: Fail) -> None:
        """Have a request settled as failed, now or by the next writer."""
        with self.lock:
            self.unsettled.pop(message.number, None)
            self.owed.append(message)
            self._send_owed()

    def _send_owed(self) -> None:
        while self.owed and self._send(self.owed[0]):
            failure = self.owed.pop(0)
            self.unsettled[failure.number] = failure.rid

    def _send(self, message: Forward | Fail) -> bool:
        """False where no writer takes it; a full socket is a writer that hangs, and a forward waits for none."""
        if self.link is None:
            return False
        try:
            self.link.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _lose(self, why: str) -> None:
        """What was with the dead writer is failed by the next one; its slots are free again."""
        self.owed += [Fail(number, rid, f"{why} before its dump was whole") for number, rid in self.unsettled.items()]
        self.unsettled.clear()
        for slot in self.sent_slots:
            self.free.put(slot)
        self.sent_slots.clear()

    def _keep_one_alive(self) -> None:
        pause = 0.5
        while True:
            started = time.monotonic()
            try:
                process = self._start()
            except OSError as error:
                logger.error("layertap: the writer could not be started: %s", error)
            else:
                self._listen()
                how = process.wait()
                with self.lock:
                    self.link, self.pid = None, None
                    self.lost += 1
                    self._lose(f"the writer process {process.pid} ended ({_how(how)})")
                logger.error("layertap: writer %d ended (%s); starting another", process.pid, _how(how))
            pause = 0.5 if time.monotonic() - started > 60 else min(2 * pause, 10.0)
            time.sleep(pause if self.lost > 1 else 0)

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        engine = str(Path(__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": engine,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop(SETTINGS_VARIABLE, None)
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "capture.writer",
                    str(theirs.fileno()),
                    msgspec.json.encode(self.settings).decode(),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        with self.lock:
            self.link, self.pid = ours, process.pid
            self._send_owed()
        return process

    def _listen(self) -> None:
        link = self.link
        assert link is not None
        decoder = msgspec.json.Decoder(Ack)
        while True:
            try:
                data = link.recv(MESSAGE_BYTES)
            except OSError:
                data = b""
            if not data:
                link.close()
                return
            ack = decoder.decode(data)
            with self.lock:
                for number in ack.settled:
                    self.unsettled.pop(number, None)
                self.failed += ack.failed
                self._send_owed()
                if ack.slot is not None and ack.slot in self.sent_slots:
                    self.sent_slots.discard(ack.slot)
                    self.free.put(ack.slot)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
