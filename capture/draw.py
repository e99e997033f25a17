"""Drawing: send one prompt to the server, get the folder of its dump.

The answer of `/generate` only says that the prompt was prefilled; what counts is the line in dumps.jsonl.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from capture.dumps import dump
from capture.dumps.dump import Journal, TapState
from capture.server import Process, Server, ServerGone
from capture.tap.settings import Rid

FOLLOW_SECONDS = 0.01
DUMP_SECONDS = 120.0  # from the server's answer to the line in dumps.jsonl
CONNECTIONS = 512
KEEP_SECONDS = 2.0  # SGLang closes a connection that was idle for 5 s; a prompt sent just then would be lost
TMPFS_SHARE = 0.7


class DrawError(Exception):
    """A prompt that gave no dump: `hopeless` where asking again cannot help, `busy` where the writers were too slow."""

    def __init__(self, reason: str, *, hopeless: bool = False, busy: bool = False) -> None:
        super().__init__(reason)
        self.hopeless, self.busy = hopeless, busy


def tokens_in_flight(server: Server, tap: TapState, share: int = 1) -> int:
    """Tokens whose dumps may lie in memory at once: by the tap's settings, or fewer where tmpfs has become small.

    What is free there is for `share` servers.
    """
    free = shutil.disk_usage(server.dump_dir).free - tap.reserve
    return min(tap.dump_bytes, int(max(free, 0) * TMPFS_SHARE) // share) // tap.bytes_per_token


class Drawer:
    """One drawer a server, or one of its replicas, at a time (`lock`), since it deletes what is not its own.

    An async context that follows dumps.jsonl while it is open, from where that ends then.
    """

    def __init__(self, server: Server, tap: TapState, name: str | None = None) -> None:
        self.server, self.tap = server, tap
        # A name of its own for every drawer makes each rid new, whatever an earlier one left behind.
        self.name = name or secrets.token_hex(4)
        self.dump_dir = Path(server.dump_dir)
        self.waiting: dict[str, asyncio.Future[dump.Line]] = {}
        self.scheduler = Process.of(tap.pid)
        self.broken: DrawError | None = None

    async def __aenter__(self) -> Drawer:
        import aiohttp

        self.session = aiohttp.ClientSession(
            self.server.url,
            headers=self.server.headers,
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=KEEP_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        journal = Journal(self.dump_dir)
        try:
            journal.skip()  # first: what an earlier drawer asked for, and comes only now, is deleted by `_deliver`
            await asyncio.to_thread(dump.remove_settled, self.dump_dir)
        except (OSError, dump.DumpError) as error:
            self._break(error)
        self.follower = asyncio.create_task(self._follow(journal))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.follower.cancel()
        await asyncio.gather(self.follower, return_exceptions=True)
        await self.session.close()

    async def draw(self, row: int, attempt: int, ids: list[int]) -> tuple[str, Path]:
        """Prefill `ids` once; returns the rid and the dump's folder, which is the caller's to remove.

        Raises DrawError where this prompt gave no dump, ServerGone where the server is dead.
        """
        if self.broken is not None:
            raise self.broken
        rid = str(Rid(self.server.secret, self.name, row, attempt, len(ids)))
        line: asyncio.Future[dump.Line] = asyncio.get_running_loop().create_future()
        self.waiting[rid] = line
        try:
            await self._generate(rid, ids)
            found = await asyncio.wait_for(line, DUMP_SECONDS)
        except TimeoutError:
            self.check_alive()
            raise DrawError(f"the server answered, but no dump came within {DUMP_SECONDS:.0f} s") from None
        except BaseException:
            if line.done() and not line.cancelled() and not line.exception():  # the dump is whole, its answer was lost
                dump.remove(dump.request_folder(self.dump_dir, line.result().n))
            raise
        finally:
            self.waiting.pop(rid, None)
        folder = dump.request_folder(self.dump_dir, found.n)
        if found.state != "done":
            dump.remove(folder)
            raise DrawError(found.reason or "the tap gave no reason", busy=found.busy)
        return rid, folder

    async def _generate(self, rid: str, ids: list[int]) -> None:
        import aiohttp

        body: dict[str, Any] = {"input_ids": ids, "rid": rid}
        body["sampling_params"] = {"max_new_tokens": 0, "temperature": 0}
        if self.server.replica is not None:
            body["routed_dp_rank"] = self.server.replica
        try:
            async with self.session.post("/generate", json=body) as answer:
                if answer.status == 200:
                    await answer.read()
                    return
                text = (await answer.text())[:300]
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self.check_alive()
            raise DrawError(f"/generate: {type(error).__name__}: {error}") from error  # some say nothing else
        raise DrawError(f"/generate answered {answer.status}: {text}", hopeless=400 <= answer.status < 500)

    def check_alive(self) -> None:
        """Raise ServerGone where the server's process, or the one that holds the tap, is dead."""
        if not self.scheduler.alive() or not self.server.process.alive():
            raise ServerGone(f"the server {self.server.run} is dead; `layertap launch` it, then give the command again")

    async def _follow(self, journal: Journal) -> None:
        try:
            while True:
                for line in journal.read():
                    self._deliver(line)
                await asyncio.sleep(FOLLOW_SECONDS)
        except (OSError, dump.DumpError) as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        self.broken = DrawError(f"dumps.jsonl cannot be followed any more: {error}", hopeless=True)
        for waiting in self.waiting.values():
            if not waiting.done():
                waiting.set_exception(self.broken)

    def _deliver(self, line: dump.Line) -> None:
        waiting = self.waiting.get(line.rid)
        if waiting is not None and not waiting.done():
            waiting.set_result(line)
        else:  # left by an earlier drawer, which nobody waits for any more
            dump.remove(dump.request_folder(self.dump_dir, line.n))
