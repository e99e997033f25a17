"""The load: prompts of ours, the same for every variant, each drawn through the tap and its dump deleted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from capture.draw import Drawer, DrawError
from capture.dumps import dump
from capture.server import Server

SEED = 0
SPREAD = 32  # the longest prompt is that many times the shortest, lengths between them evenly by their logarithm
LONGEST = 4096  # tokens; longer samples are rare in what drafters are trained on
REMOVERS = 4
ALIVE_SECONDS = 1.0
ATTEMPTS = 5  # of a prompt that the writers were too slow for


def make_prompts(vocabulary: Sequence[int], longest: int, tokens: int) -> list[list[int]]:
    """Prompts of `tokens` tokens together, or a little more, none longer than `longest`; always the same ones."""
    made = random.Random(SEED)
    prompts: list[list[int]] = []
    total = 0
    while total < tokens:
        length = max(1, round(longest * SPREAD ** -made.random()))
        prompts.append(made.choices(vocabulary, k=length))
        total += length
    return prompts


def vocabulary(model: str, trust_remote_code: bool) -> list[int]:
    """The ids of plain text: all but special and added tokens, some of which stand for images. Raises InputError."""
    from capture.rows.tokenise import load_tokenizer

    tokenizer = load_tokenizer(model, trust_remote_code)
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return sorted(set(tokenizer.get_vocab().values()) - special)


def prefill(server: Server, tap: dump.TapState, prompts: Sequence[list[int]], seconds: float) -> float:
    """Draw every prompt and delete its dump; returns tokens/s, until the last dump has come.

    Raises DrawError, ServerGone, TimeoutError after `seconds`.
    """
    try:
        return asyncio.run(_prefill(server, tap, prompts, seconds))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _prefill(server: Server, tap: dump.TapState, prompts: Sequence[list[int]], seconds: float) -> float:
    room = tap.dump_bytes // tap.bytes_per_token
    freed = asyncio.Event()
    in_flight = 0
    loop = asyncio.get_running_loop()

    async def draw(row: int, ids: list[int]) -> None:
        nonlocal in_flight
        for attempt in range(ATTEMPTS):
            try:
                _, folder = await drawer.draw(row, attempt, ids)
                break
            except DrawError as error:
                if not error.busy or attempt == ATTEMPTS - 1:
                    raise
        await loop.run_in_executor(removers, dump.remove, folder)
        in_flight -= len(ids)
        freed.set()

    async def watch() -> None:
        while True:
            drawer.check_alive()
            await asyncio.sleep(ALIVE_SECONDS)

    with ThreadPoolExecutor(REMOVERS) as removers:
        async with Drawer(server, tap) as drawer, asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            begun = time.monotonic()
            drawn = []
            for row, ids in enumerate(prompts):
                while in_flight and in_flight + len(ids) > room:
                    freed.clear()
                    await freed.wait()
                in_flight += len(ids)
                drawn.append(group.create_task(draw(row, ids)))
            await asyncio.gather(*drawn)
            took = time.monotonic() - begun
            watching.cancel()
    return sum(map(len, prompts)) / took
