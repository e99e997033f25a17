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
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from capture.dataset import formats, manifest
from capture.dataset.finish import finish
from capture.dataset.ledger import Change, Sample
from capture.draw import DrawError
from capture.dumps import dump, verify
from capture.extraction import ExtractJob, Tell
from capture.lanes import Lane, Lanes, Place
from capture.locks import lock
from capture.prepare import REPORT_SECONDS, Preparation, Prepared
from capture.server import ServerGone
from capture.stop import ASKED, Stop, cannot_write, is_busy, is_full

ATTEMPTS = 3
BACK_OFF = 0.3  # seconds before the second attempt, four times as many before each further one
BUSY_SECONDS = 120.0  # for which a sample is asked for again while the writers have no slot free
BUSY_PAUSE = 0.5
COMMIT_SECONDS = 0.25
DRAIN_SECONDS = 12.0  # a stop waits for 20, and then ends what is left
MOST_THREADS = 16  # each of which holds the states of one sample
SAMPLE_EVENTS = 300  # retries and failures that the run's history has; the log has all


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
        prepared = Preparation(job, output, report, say, tell).prepare()
        extraction = Extraction(prepared, output, report, say, tell)
        asyncio.run(extraction.drive())
        return extraction.finish()
    except (OSError, sqlite3.OperationalError) as error:
        if is_full(error) or is_busy(error):
            raise cannot_write(output, error) from error
        raise
    finally:
        for held in locks:
            os.close(held)


class Extraction:
    """Draws what is pending, and keeps it."""

    def __init__(
        self, prepared: Prepared, output: Path, report: Callable[[Any], None], say: Callable[[str], None], tell: Tell
    ) -> None:
        self.servers, self.taps, self.manifest, self.ledger, self.progress, self.begun = prepared
        self.output, self.report, self.say, self.tell = output, report, say, tell
        self.sample_events = 0
        self.changes: list[Change] = []
        self.stopping: BaseException | None = None
        self.pace: deque[tuple[float, int]] = deque()
        self.of_thread = threading.local()

    async def drive(self) -> None:
        """Draw what is pending."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, Stop(130, ASKED))
        self.progress.phase = "extracting"
        self.lanes = Lanes(
            [Lane(server, tap, len(self.servers)) for server, tap in zip(self.servers, self.taps, strict=True)]
        )
        tasks: set[asyncio.Task[None]] = set()
        with ThreadPoolExecutor(min(MOST_THREADS, max(4, len(os.sched_getaffinity(0)) // 2))) as self.pool:
            async with contextlib.AsyncExitStack() as stack:
                for lane in self.lanes.all:
                    await stack.enter_async_context(lane)
                keepers = [asyncio.create_task(self._keep_up(keep)) for keep in (self._commit_often, self._look_after)]
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

    def finish(self) -> int:
        """Bring the dataset into the state that trainers load, unless the run was stopped; returns the exit code.

        Raises what the run was stopped by.
        """
        progress = self.progress
        try:
            with stopped_by_signals():
                self._commit()
                progress.count(self.ledger)
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
        except Stop as asked:
            self._stop(asked)
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
        settings = self.manifest.settings
        states = verify.read_dump(
            folder, rid, ids, settings.layers.boundaries, settings.hidden, settings.dtype, self.of_thread.buffer
        )
        all_ids, all_mask = torch.tensor(ids), torch.tensor(mask)
        try:
            return [formats.write(name, self.output, number, states, all_ids, all_mask) for name in settings.formats]
        except OSError as error:
            raise cannot_write(self.output, error) from error

    def _stop(self, why: BaseException) -> None:
        """Admit nothing more and end; the first reason counts."""
        if self.stopping is None:
            self.stopping = why
            self.lanes.wake()

    async def _keep_up(self, keep: Callable[[], Awaitable[None]]) -> None:
        try:
            await keep()
        except Exception as error:  # a bug of ours: nobody would look after the run any more
            self._stop(error)

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


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise Stop, wherever the run is, when it is asked to end."""

    def stop(_number: int, _frame: Any) -> None:
        raise Stop(130, ASKED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
