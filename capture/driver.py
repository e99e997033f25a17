"""The extract run: rows -> /generate -> dumps -> verify -> dataset.

It may be killed at any moment: a sample is `written` only when its files are on disk and the ledger says so, and
whatever else was under way is drawn again by the next run, into the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from capture import code_hash, gate, probe
from capture.dataset import formats, manifest
from capture.dataset.finish import finish
from capture.dataset.ledger import Change, Ledger, Sample
from capture.draw import DrawError
from capture.dumps import dump, verify
from capture.lanes import Lane, Lanes, Place
from capture.locks import lock
from capture.rows import alarms, parallel
from capture.rows.files import read_hash
from capture.rows.tokenise import Outcome, RowOptions, load_tokenizer, tokenise
from capture.rows.vocabulary import vocabulary_size
from capture.server import Server, ServerGone
from capture.stop import Stop, cannot_write, is_busy, is_full

ATTEMPTS = 3
BACK_OFF = 0.3  # seconds before the second attempt, four times as many before each further one
BUSY_SECONDS = 120.0  # for which a sample is asked for again while the writers have no slot free
BUSY_PAUSE = 0.5
COMMIT_SECONDS = 0.25
REPORT_SECONDS = 0.5
DRAIN_SECONDS = 30.0
# Of the manifest, by a run that goes on; and what was drawn from, until this run draws something.
KEPT = ("created", "input_hash", "limit", "earlier", "alarms", "exported", "finished")
SAMPLE_EVENTS = 300  # retries and failures that the run's history has; the log has all


class Source(msgspec.Struct, frozen=True):
    """A server, and its lock for drawing."""

    server: Server
    lock: str


class ExtractJob(msgspec.Struct, frozen=True, kw_only=True):
    """What an extraction is asked for; paths are the host's.

    `lock` is the server's lock for drawing, `beside` are more servers, of the same model and layers.
    """

    server: Server
    lock: str
    beside: list[Source] = []
    rows: str
    output: str
    formats: list[str]
    options: RowOptions
    layertap: str
    allow_volatile: bool = False

    @property
    def sources(self) -> list[Source]:
        """Every server that is drawn from."""
        return [Source(self.server, self.lock), *self.beside]


class NotSafe(Exception):
    """The gate or the probe refuses this server."""


class Progress(msgspec.Struct, kw_only=True):
    """progress.json of an extraction. Rates are over the last ten seconds; None where unknown.

    `rows` were read and tokenised by this run, 0 where that was done by an earlier one. `written_by` counts what this
    run wrote by the server that it was drawn from.
    """

    schema: int = 1
    phase: str
    output: str
    rows: int = 0
    samples: int = 0
    pending: int = 0
    sent: int = 0
    captured: int = 0
    written: int = 0
    written_by: dict[str, int] = {}
    failed: int = 0
    not_finite: int = 0
    bad_rows: int = 0
    overlong_rows: int = 0
    tokens: int = 0
    tokens_written: int = 0
    longest: int = 0
    tokens_per_second: float | None = None
    bytes_written: int = 0
    eta_seconds: float | None = None
    seconds: float = 0.0
    failures: list[verify.Failure] = []


Tell = Callable[..., None]  # event, and its facts by name


def extract(job: ExtractJob, report: Callable[[Any], None], say: Callable[[str], None], tell: Tell) -> int:
    """Run an extraction to its end; returns the exit code (0 all written, 1 some failed).

    `report` gets a `Progress` now and then, `say` a sentence for the log, `tell` an event. Raises UnknownFormat,
    ManifestError, LedgerError, InputError, Busy, NotSafe, ServerGone or Stop.
    """
    output = Path(job.output)
    manifest.take_folder(output, job.allow_volatile, say)
    locks = [lock(output / ".lock", f"another extraction writes to {output}")]
    try:
        for path, run in {source.lock: source.server.run for source in job.sources}.items():  # replicas share one
            locks.append(lock(Path(path), f"another job draws from the server {run}"))
        extraction = Extraction(job, output, report, say, tell)
        extraction.prepare()
        return asyncio.run(extraction.drive())
    except (OSError, sqlite3.OperationalError) as error:
        if is_full(error) or is_busy(error):
            raise cannot_write(output, error) from error
        raise
    finally:
        for held in locks:
            os.close(held)


class Extraction:
    """One run of the driver."""

    def __init__(
        self, job: ExtractJob, output: Path, report: Callable[[Any], None], say: Callable[[str], None], tell: Tell
    ) -> None:
        self.job, self.output, self.report, self.say, self.tell = job, output, report, say, tell
        self.told: set[gate.Finding] = set()
        self.sample_events = 0
        self.progress = Progress(phase="preparing", output=str(output))
        self.begun = time.monotonic()
        self.changes: list[Change] = []
        self.stopping: BaseException | None = None
        self.pace: deque[tuple[float, int]] = deque()
        self.of_thread = threading.local()

    def prepare(self) -> None:
        """Everything before the first prompt: gate, settings, tokens, probe."""
        self.report(self.progress)
        self.servers = [source.server for source in self.job.sources]
        passed = [self._pass_gate(server, longest=None) for server in self.servers]
        self.taps = [tap for tap, _ in passed]
        infos = [info for _, info in passed]
        require_alike(self.servers, self.taps)
        tap = self.taps[0]
        assert tap.layers is not None
        self.tap, self.boundaries = tap, tap.layers.boundaries
        for name in self.job.formats:
            if reason := formats.find(name).refuse(tap.dtype, len(self.boundaries)):
                raise manifest.ManifestError(f"--format {name}: {reason}")
        tokenizer = load_tokenizer(self.job.server.model, self.job.server.trust_remote_code)
        self.manifest = self._make_manifest(infos, tokenizer)
        self.ledger = Ledger(self.output)
        self._tokenise(tokenizer, min(filter(None, map(gate.longest_prompt, infos)), default=None))
        self.progress.longest = self.ledger.longest()
        for server in self.servers:
            self._pass_gate(server, self.progress.longest)
        self.ledger.reopen()
        self._count()
        if self.progress.pending:
            probes = [self._pass_probe(*one, tokenizer) for one in zip(self.servers, self.taps, infos, strict=True)]
            drawn = self._drawn(infos)
            drawn.probe, *beside = map(msgspec.to_builtins, probes)
            for described, found in zip(drawn.beside, beside, strict=True):
                described.probe = found
            self.manifest.draw_from(drawn)
            manifest.write_manifest(self.output, self.manifest)
        now = self.progress
        self.tell(
            "prepared",
            resumed=self.resumed,
            samples=now.samples,
            written=now.written,
            bad_rows=now.bad_rows,
            overlong_rows=now.overlong_rows,
        )

    def _pass_gate(self, server: Server, longest: int | None) -> tuple[dump.TapState, dict[str, Any]]:
        tap, info = dump.read_tap(Path(server.dump_dir)), server.info()
        findings = gate.check(info, tap, gate.Expected(code_hash(), server.model, longest))
        new = [finding for finding in findings if finding not in self.told]
        self.told.update(new)
        for finding in new:
            self.tell("gate", **msgspec.structs.asdict(finding))
        if refusal := gate.refusal(findings):
            raise NotSafe(refusal)
        for finding in new:
            self.say(f"warning: {finding.what}; {finding.remedy}")
        assert tap is not None
        return tap, info

    def _pass_probe(self, server: Server, tap: dump.TapState, info: dict[str, Any], tokenizer: Any) -> probe.Probed:
        """Have the server shown to be safe, unless it has been already."""
        longest = self.ledger.longest()
        found = probe.kept(server, tap, longest)
        earlier = found is not None
        if found is None:
            self.progress.phase = "probing"
            self.report(self.progress)
            # The embedded engine takes a minute for the longest prompts; what is not drawn need not be probed there.
            most = longest if info.get("device") == "cpu" else None
            found = probe.probe(server, tap, info, tokenizer, lambda what: self.say(f"probe: {what}"), most=most)
        self.tell("probed", passed=found.passed, earlier=earlier, lengths=found.lengths, ranks=found.ranks)
        for failure in found.failures:
            self.say(f"probe: {failure}")
        if refusal := found.refusal():
            raise NotSafe(refusal)
        return found

    def _make_manifest(self, infos: list[dict[str, Any]], tokenizer: Any) -> manifest.Manifest:
        tap, options = self.tap, self.job.options
        assert tap.layers is not None
        settings = manifest.Settings(
            model=tap.model,
            model_config=manifest.hash_file(Path(tap.model) / "config.json"),
            weights=manifest.hash_weights(Path(tap.model)),
            tokenizer=manifest.hash_tokenizer(tokenizer),
            chat_template=manifest.hash_text(tokenizer.chat_template or ""),
            layers=tap.layers,
            hidden=tap.hidden,
            dtype=tap.dtype,
            max_length=options.max_length,
            overlong=options.overlong,
            last_turn_only=options.last_turn_only,
            prompt_column=options.prompt_column,
            response_column=options.response_column,
            formats=sorted(self.job.formats),
        )
        kept: dict[str, Any] = {"created": time.time(), "input_hash": ""}
        drawn = self._drawn(infos)
        self.resumed = (self.output / "manifest.json").exists()
        if self.resumed:
            earlier = manifest.read_manifest(self.output)
            if earlier.source:
                raise manifest.ManifestError(f"{self.output} was exported from {earlier.source}; extract into that")
            manifest.require_same(earlier.settings, settings, self.output)
            kept, drawn = {name: getattr(earlier, name) for name in KEPT}, earlier
        made = manifest.Manifest(
            settings=settings,
            norms={
                name: manifest.NORMS.get(name, manifest.NORMS["last"])
                for name in dump.state_names(len(tap.layers.boundaries))
            },
            input=self.job.rows,
            updated=time.time(),
            **kept,
            **manifest.described(drawn),
        )
        manifest.write_manifest(self.output, made)
        return made

    def _drawn(self, infos: list[dict[str, Any]]) -> manifest.Drawn:
        """What is drawn from now, not yet probed."""
        first, *more = self.servers
        return manifest.Drawn(
            sglang=self.tap.sglang,
            layertap=self.job.layertap,
            profile=first.profile,
            server=_public(infos[0]),
            beside=[
                manifest.Beside(server.name, server.profile, _public(info))
                for server, info in zip(more, infos[1:], strict=True)
            ],
            gpus=[tap.gpu for tap in self.taps if tap.gpu],
        )

    def _limit(self, longest: int | None) -> int | None:
        """How many tokens a sample may have. Rows that were read by another limit would be other rows."""
        if self.job.options.max_length is not None:
            return self.job.options.max_length
        if not self.manifest.input_hash:
            self.manifest.limit = longest
        limit = self.manifest.limit or longest
        if longest and limit and longest > limit and self.ledger.unused("overlong"):
            self.say(
                f"warning: rows of more than {limit:,} tokens stay out, as the server that this dataset was begun with "
                "took no more; to have them, extract into a new folder"
            )
        return limit

    def _tokenise(self, tokenizer: Any, longest: int | None) -> None:
        """Tokenise the input unless it is the one that the ledger holds already.

        `longest` is what the servers take in one prompt, where they say it.
        """
        now, limit = read_hash(self.job.rows), self._limit(longest)
        if now == self.manifest.input_hash:
            self.say(f"{self.job.rows} is tokenised already")
            self._say_alarms()
            return
        self.progress.phase = "tokenising"
        self.report(self.progress)
        options = msgspec.structs.replace(self.job.options, max_length=limit)
        size = vocabulary_size(self.job.server.model, tokenizer)
        outcomes = tokenise(self.job.rows, tokenizer, options, vocab_size=size, workers=parallel.default_workers())
        found = alarms.Alarms()
        added = self.ledger.add(self._report_rows(found.watch(outcomes, options)))
        self.manifest.input_hash, self.manifest.alarms = now, found.all()
        manifest.write_manifest(self.output, self.manifest)
        self._say_alarms()
        self.say(f"{self.job.rows}: {added} samples added, {len(self.ledger.unused('bad'))} bad rows")
        for file, line, reason in self.ledger.unused("bad"):
            self.say(f"{file}:{line}: {reason}")

    def _report_rows(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """The rows as they are, with how many there were in the progress."""
        last = time.monotonic()
        for outcome in outcomes:
            yield outcome
            self.progress.rows += 1
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                self.report(self.progress)

    def _say_alarms(self) -> None:
        for alarm in self.manifest.alarms:
            self.say(f"warning: {alarms.words(alarm)}")
            self.tell("alarm", id=alarm.id, count=alarm.count, text=alarms.words(alarm))

    def _count(self) -> None:
        counts, progress = self.ledger.counts(), self.progress
        progress.samples = sum(counts.values())
        progress.pending, progress.written = counts["pending"] + counts["sent"], counts["written"]
        progress.failed, progress.sent, progress.captured = counts["failed"], 0, 0
        progress.bad_rows, progress.overlong_rows = len(self.ledger.unused("bad")), len(self.ledger.unused("overlong"))
        progress.tokens, progress.tokens_written = self.ledger.total(), self.ledger.total("written")
        progress.bytes_written = self.ledger.bytes_written()

    async def drive(self) -> int:
        """Draw what is pending; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, Stop(130, "it was asked to stop"))
        self.progress.phase = "extracting"
        self.lanes = Lanes(
            [Lane(server, tap, len(self.servers)) for server, tap in zip(self.servers, self.taps, strict=True)]
        )
        tasks: set[asyncio.Task[None]] = set()
        with ThreadPoolExecutor(max(4, len(os.sched_getaffinity(0)) // 2)) as self.pool:
            async with contextlib.AsyncExitStack() as stack:
                for lane in self.lanes.all:
                    await stack.enter_async_context(lane)
                keepers = [asyncio.create_task(self._commit_often()), asyncio.create_task(self._look_after())]
                try:
                    for sample in self.ledger.samples("pending"):
                        place = await self.lanes.take(sample.tokens, self._is_stopping)
                        if place is None:
                            break
                        task = asyncio.create_task(self._one(sample, place))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                    await self._drain(tasks)
                finally:
                    for keeper in keepers:
                        keeper.cancel()
                    await asyncio.gather(*keepers, return_exceptions=True)
        return self._finish()

    async def _drain(self, tasks: set[asyncio.Task[None]]) -> None:
        """Let what is under way end; where the run stops, not for long."""
        since: float | None = None
        while tasks:
            await asyncio.wait(tasks, timeout=0.2)
            if self.stopping and since is None:
                since = time.monotonic()
            gone = isinstance(self.stopping, ServerGone)
            if since is not None and (gone or time.monotonic() - since > DRAIN_SECONDS):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                return

    def _finish(self) -> int:
        progress = self.progress
        try:
            self._commit()
            self._count()
            self.manifest.counts = self.ledger.counts() | {
                "bad_rows": progress.bad_rows,
                "overlong_rows": progress.overlong_rows,
            }
            self.manifest.updated = time.time()
            if not self.stopping:
                progress.phase = "finishing"
                self.report(progress)
                finish(self.output, self.manifest, self.ledger, self.manifest.settings.formats)
            manifest.write_manifest(self.output, self.manifest)
        except (OSError, sqlite3.OperationalError) as error:
            self._stop(cannot_write(self.output, error))
        progress.phase = "stopped" if self.stopping else "finished"
        progress.tokens_per_second = progress.eta_seconds = None
        self.report(progress)
        if self.stopping:
            raise self.stopping
        return 1 if progress.failed or progress.bad_rows else 0

    async def _one(self, sample: Sample, place: Place) -> None:
        """Draw one sample until it is written or has failed; never raises for the sample's own sake."""
        try:
            await self._attempts(sample, place)
        except (ServerGone, Stop) as error:
            self._stop(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug of ours must not look like a finished run
            self._stop(error)
        finally:
            self.lanes.give_back(place)

    async def _attempts(self, sample: Sample, place: Place) -> None:
        ids, mask = self.ledger.tokens(sample)
        reason, attempts, failures, not_finite = "", sample.attempts, 0, False
        moved = False
        while failures < ATTEMPTS:
            if reason:
                self.say(f"sample {sample.number} is drawn again: {reason}")
                if not moved:  # the loss of a server is one event, not one for each of its samples
                    self._tell_of_sample("retry", sample=sample.number, reason=reason)
                await asyncio.sleep(BACK_OFF * 4 ** (failures - 1) if failures else 0)
            if self.stopping:
                return
            attempts, moved = attempts + 1, False
            self.changes.append(Change(sample.number, "sent", attempts))
            self.progress.pending -= 1
            self.progress.sent += 1
            try:
                rid, folder = await self._draw(place.lane, sample.number, attempts, ids)
            except DrawError as error:
                self.progress.sent -= 1
                self.progress.pending += 1
                reason, failures = str(error), failures + 1
                if error.hopeless:
                    break
                continue
            except ServerGone as error:  # no fault of the sample's: another server draws it
                self.progress.sent -= 1
                self.progress.pending += 1
                reason = str(error)
                self._lose(place.lane, error)
                await self.lanes.move(place, self._is_stopping)
                moved = True
                continue
            self.progress.sent -= 1
            self.progress.captured += 1
            try:
                await self._keep(sample, attempts, rid, folder, ids, mask)
                self._count_written(place.lane)
                return
            except (verify.VerificationError, dump.DumpError) as error:
                reason, not_finite = str(error), isinstance(error, verify.NotFiniteError)
                failures += 1
                self.progress.pending += 1
            finally:
                self.progress.captured -= 1
        self.progress.pending -= 1
        self.progress.failed += 1
        self.progress.not_finite += not_finite
        self.changes.append(Change(sample.number, "failed", attempts, reason))
        failure = verify.Failure(sample.number, None, reason)
        self.progress.failures = [failure, *self.progress.failures][: verify.FAILURES_SHOWN]
        self.say(f"sample {sample.number} ({sample.file}:{sample.line}) failed: {reason}")
        self._tell_of_sample("failed", sample=sample.number, file=sample.file, line=sample.line, reason=reason)

    def _count_written(self, lane: Lane) -> None:
        counts, run = self.progress.written_by, lane.server.name
        self.progress.written_by = counts | {run: counts.get(run, 0) + 1}

    def _lose(self, lane: Lane, why: ServerGone) -> None:
        """A server is dead: the others go on with its samples; without any left, the run ends."""
        if lane.gone:
            return
        lane.lose(why)
        left = len(self.lanes.alive)
        if not left:
            self._stop(why)
            return
        text = f"the server {lane.server.name} is dead; its {lane.samples} samples go on with the {left} left"
        self.say(f"warning: {text}")
        self.tell("server_lost", server=lane.server.name, samples=lane.samples, left=left, reason=text)
        self.lanes.wake()

    def _is_stopping(self) -> bool:
        return self.stopping is not None

    def _tell_of_sample(self, event: str, **facts: Any) -> None:
        self.sample_events += 1
        if self.sample_events <= SAMPLE_EVENTS:
            self.tell(event, **facts)
        elif self.sample_events == SAMPLE_EVENTS + 1:
            self.tell("log_only", most=SAMPLE_EVENTS)

    async def _draw(self, lane: Lane, number: int, attempt: int, ids: list[int]) -> tuple[str, Path]:
        """Draw a dump; where no arena slot was free for it, wait until there is one and ask again."""
        patience = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await lane.draw(number, attempt, ids)
            except DrawError as error:
                if not error.busy:
                    raise
                self.say(f"sample {number} waits for a slot and is asked for again: {error}")
                free = False
                while not free:  # seldom for long: with slow writers one comes free and is taken all the time
                    if self.stopping or lane.gone or time.monotonic() > patience:
                        raise
                    await asyncio.sleep(BUSY_PAUSE)
                    tap = dump.read_tap(lane.drawer.dump_dir)
                    free = tap is not None and tap.slots_free > 0

    async def _keep(
        self, sample: Sample, attempts: int, rid: str, folder: Path, ids: list[int], mask: list[int]
    ) -> None:
        """Verify a dump, write it in every format, and only then let it go."""
        loop = asyncio.get_running_loop()
        try:
            files = await loop.run_in_executor(self.pool, self._write, sample.number, rid, folder, ids, mask)
        finally:
            await loop.run_in_executor(self.pool, dump.remove, folder)
        self.changes.append(Change(sample.number, "written", attempts, None, files))
        self.progress.written += 1
        self.progress.tokens_written += sample.tokens
        self.progress.bytes_written += sum(file.bytes for file in files)

    def _write(self, number: int, rid: str, folder: Path, ids: list[int], mask: list[int]) -> list[Any]:
        import torch

        if not hasattr(self.of_thread, "buffer"):
            self.of_thread.buffer = dump.Buffer()
        states = verify.read_dump(
            folder, rid, ids, self.boundaries, self.tap.hidden, self.tap.dtype, self.of_thread.buffer
        )
        all_ids, all_mask = torch.tensor(ids), torch.tensor(mask)
        try:
            return [
                formats.write(name, self.output, number, states, all_ids, all_mask)
                for name in self.manifest.settings.formats
            ]
        except OSError as error:
            raise cannot_write(self.output, error) from error

    def _stop(self, why: BaseException) -> None:
        """Admit nothing more and end; the first reason counts."""
        if self.stopping is None:
            self.stopping = why
            self.lanes.wake()

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            try:
                self._commit()
            except (OSError, sqlite3.OperationalError) as error:
                if not is_busy(error):  # else the changes are kept until the next time
                    self._stop(cannot_write(self.output, error))

    def _commit(self) -> None:
        changes, self.changes = self.changes, []
        try:
            self.ledger.settle(changes)
        except BaseException:
            self.changes = changes + self.changes
            raise

    async def _look_after(self) -> None:
        while True:
            for lane in self.lanes.alive:
                try:
                    lane.drawer.check_alive()
                except ServerGone as error:
                    self._lose(lane, error)
            self._pace()
            self.report(self.progress)
            await asyncio.sleep(REPORT_SECONDS)

    def _pace(self) -> None:
        now, progress = time.monotonic(), self.progress
        self.pace.append((now, progress.tokens_written))
        while now - self.pace[0][0] > 10:
            self.pace.popleft()
        (before, tokens), progress.seconds = self.pace[0], round(now - self.begun, 1)
        rate = (progress.tokens_written - tokens) / (now - before) if now > before else 0.0
        progress.tokens_per_second = round(rate, 1) if rate else None
        progress.eta_seconds = round((progress.tokens - progress.tokens_written) / rate, 1) if rate else None


def require_alike(servers: list[Server], taps: list[dump.TapState]) -> None:
    """Raise NotSafe where servers would not draw the same states of the same prompt."""
    for server, tap in zip(servers[1:], taps[1:], strict=True):
        for name in ("model", "sglang", "layers", "hidden", "dtype"):
            first, other = getattr(taps[0], name), getattr(tap, name)
            if first != other:
                shown = (first.words(), other.words()) if name == "layers" else (first, other)
                raise NotSafe(
                    f"the servers draw other states: {name} is {shown[0]} of {servers[0].name}, {shown[1]} of "
                    f"{server.name}; launch both alike"
                )


def _public(info: dict[str, Any]) -> dict[str, Any]:
    """The server's resolved arguments without secrets and without what changes from minute to minute."""
    hidden = ("api_key", "admin_api_key", "internal_states", "launch_command", "env_vars", "startup_time")
    return {key: value for key, value in info.items() if key not in hidden}
