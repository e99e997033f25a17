"""Jobs on the host as a screen awaits them: short questions now and then, so that no key waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from console.feed import Feed
from console.session import POLL_SECONDS, Session, going_on

T = TypeVar("T")


async def ask(feed: Feed, act: Callable[[Session], T]) -> T:
    """Do something on the host. Raises the LayertapError that it met."""
    return await asyncio.wrap_future(feed.call(act))


async def finish_job(
    feed: Feed,
    kind: str,
    job: dict[str, Any],
    port: int | None = None,
    progress: Callable[[dict[str, Any]], None] = lambda _: None,
) -> tuple[int, Any]:
    """Start a job and wait for its end; its exit code and result. One that nobody awaits any more is stopped.

    `progress` gets what the job says of itself. Raises the LayertapError that the job met.
    """
    run = await ask(feed, lambda session: session.start(kind, job, port))
    run_id = run["id"]
    try:
        while going_on(run):
            if run["progress"]:
                progress(run["progress"])
            await asyncio.sleep(POLL_SECONDS)
            run = await ask(feed, lambda session: session.host.request("run", run_id=run_id))
    except asyncio.CancelledError:
        feed.call(lambda session: session.stop(run_id, "the console needs it no more"))
        raise
    return await ask(feed, lambda session: session.finish(run))
