"""Jobs: what reads many rows or tensors runs here, on the host, as a run of its own.

A job's process stands in its run folder, reads job.json, renews progress.json, and ends with result.json and an exit
code. What it has to say goes to its log.

usage: python -m capture.job KIND
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capture import code_hash, draw, driver, events, gate, measure, probe
from capture.dataset import formats, ledger, manifest
from capture.dataset.diff import diff
from capture.dataset.export import ExportJob, export
from capture.dataset.inspect_sample import inspect_sample, stats
from capture.dataset.verify import verify_dataset
from capture.dumps import dump, verify
from capture.dumps.verify_folder import is_dumps, verify_dumps
from capture.extraction import ExtractJob, Progress
from capture.locks import Busy, lock
from capture.model_config import read_model_config
from capture.rows import parallel, plan
from capture.rows.chat import InputError, first_line
from capture.rows.tokenise import Encoder, RowOptions, load_tokenizer, tokenise
from capture.rows.vocabulary import vocabulary_size
from capture.server import Server, ServerGone
from capture.stop import ASKED, Stop

EXIT_CODES: list[tuple[type[BaseException] | tuple[type[BaseException], ...], int]] = [
    (Busy, 7),
    (gate.NotSafe, 6),
    (ServerGone, 9),
    ((InputError, formats.UnknownFormat, manifest.ManifestError, ledger.LedgerError, dump.DumpError), 2),
    (draw.DrawError, 1),
    (parallel.WorkerLost, 9),
    (verify.VerificationError, 1),
]


REPORT_SECONDS = 0.3


class TryJob(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as text or as a user's message (`chat`)."""

    server: Server
    lock: str
    text: str
    chat: bool = False


class ProbeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A server to probe; `against_hf` compares with a Hugging Face forward too."""

    server: Server
    lock: str
    against_hf: bool = False


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """What an extraction would do, by the `server` that the model was taken from: it takes so many tokens at most.

    With `show` only these rows are looked at; see `plan.show_rows`.
    """

    rows: str
    model: str
    trust_remote_code: bool
    options: RowOptions
    formats: list[str]
    output: str | None
    layers: int
    show: list[str] = []
    server: Server | None = None


class VerifyJob(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset to verify, one format's folder in it, or a folder of dumps.

    `sample` of its samples, chosen at random, if that is given.
    """

    output: str
    sample: int | None = None


class DiffJob(msgspec.Struct, frozen=True, kw_only=True):
    """Two datasets to compare."""

    dataset: str
    other: str


class SampleJob(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of a dataset to look at; see `inspect_sample`."""

    output: str
    number: int
    trusted_model: str | None = None


def report(progress: Any) -> None:
    """Renew progress.json; where that cannot be done just now, the job goes on without."""
    with contextlib.suppress(OSError):
        dump.write_json(Path("progress.json"), progress)


def tell(event: str, **facts: Any) -> None:
    """Add an event to the run's history."""
    events.append(Path(), event, **facts)


def say(text: str) -> None:
    """A line in the job's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)  # noqa: T201


def run_try(job: TryJob) -> tuple[int, Any]:
    """Send one prompt and describe what came out of it."""
    server = job.server
    handle = lock(Path(job.lock), f"another job draws from the server {server.run}")
    try:
        _, tap, findings = gate.look(server)
        if tap is None or not tap.inside or tap.code != code_hash():
            raise gate.NotSafe(gate.refusal(findings) or "the tap is not in")
        tokenizer = load_tokenizer(server.model, server.trust_remote_code)
        ids = prompt_ids(tokenizer, job)
        return 0, asyncio.run(_try(server, tap, ids, tokenizer, findings))
    finally:
        os.close(handle)


def prompt_ids(tokenizer: Any, job: TryJob) -> list[int]:
    """The prompt's token ids. Raises InputError for one without tokens, or that the chat template cannot render."""
    text = job.text
    if job.chat:
        if not tokenizer.chat_template:
            raise InputError(f"{job.server.model} has no chat template; give the prompt as plain text, without --chat")
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": job.text}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            raise InputError(f"the chat template cannot render the prompt: {first_line(error)}") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise InputError("the prompt has no tokens; give some text")
    return ids


async def _try(
    server: Server, tap: dump.TapState, ids: list[int], tokenizer: Any, findings: list[gate.Finding]
) -> dict[str, Any]:
    assert tap.layers is not None
    begun = time.monotonic()
    async with draw.Drawer(server, tap) as drawer:
        rid, folder = await drawer.draw(0, 0, ids)
        seconds = time.monotonic() - begun
        try:
            states = verify.read_dump(folder, rid, ids, tap.layers.boundaries, tap.hidden, tap.dtype)
            shown = {name: stats(state) for name, state in states.items()}
        finally:
            dump.remove(folder)
    return {
        "schema": 1,
        "seconds": round(seconds, 4),
        "tokens": [{"id": number, "text": tokenizer.decode([number])} for number in ids],
        "rows": next(iter(shown.values()))["shape"][0],
        "layers": msgspec.to_builtins(tap.layers),
        "layers_words": tap.layers.words(),
        "states": shown,
        "findings": msgspec.to_builtins(findings),
    }


def run_probe(job: ProbeJob) -> tuple[int, Any]:
    """Probe a server; one that is refused exits as one that is not safe to draw from."""
    server = job.server
    handle = lock(Path(job.lock), f"another job draws from the server {server.run}")
    try:
        info, tap, findings = gate.look(server)
        if refusal := gate.refusal(findings):
            raise gate.NotSafe(refusal)
        assert tap is not None
        tokenizer = load_tokenizer(server.model, server.trust_remote_code)
        made = probe.probe(
            server, tap, info, tokenizer, lambda what: report({"schema": 1, "what": what}), with_hf=job.against_hf
        )
    finally:
        os.close(handle)
    for failure in made.failures:
        say(failure)
    return (0 if made.passed else 6), made


def run_plan(job: PlanJob) -> tuple[int, Any]:
    """Read and tokenise the rows and say what extracting them would take."""
    chosen = {name: formats.find(name) for name in job.formats}
    hidden, itemsize = model_size(job.model)
    tokenizer = load_tokenizer(job.model, job.trust_remote_code)
    vocabulary = vocabulary_size(job.model, tokenizer)
    options = job.options
    if options.max_length is None and job.server is not None:
        options = msgspec.structs.replace(options, max_length=_most(job.server))
    if job.show:
        encoder = Encoder(tokenizer, options, vocabulary)
        shown = plan.show_rows(job.rows, encoder, job.show, tokenizer)
        return (1 if any(row.reason for row in shown) else 0), {"schema": 1, "shown": shown}
    sizes = {name: float(found.bytes_per_token(hidden, job.layers, itemsize)) for name, found in chosen.items()}
    if job.output:
        plan.refuse_unwritable(Path(job.output))
    made = plan.make_plan(
        tokenise(job.rows, tokenizer, options, vocab_size=vocabulary, workers=parallel.default_workers()),
        sizes,
        Path(job.output) if job.output else None,
        tokenizer,
        options.max_length,
        lambda done: report({"schema": 1, "rows": done}),
    )
    refused = not job.options.allow_ignored_roles and any(alarm.fatal for alarm in made.alarms)
    return (1 if made.bad or refused else 0), made


def _most(server: Server) -> int | None:
    """Tokens that it takes in one prompt; None where it does not say, or is still starting."""
    try:
        return gate.longest_prompt(server.info())
    except ServerGone:
        return None


def model_size(model: str) -> tuple[int, int]:
    """Hidden size and bytes a value of a model's states, from its config.json. Raises InputError."""
    try:
        config = read_model_config(Path(model))
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{model}/config.json: {error}") from error
    if config.hidden is None:
        raise InputError(f"{model}/config.json says no hidden_size")
    return config.hidden, 4 if config.dtype == "float32" else 2


def run_verify(job: VerifyJob) -> tuple[int, Any]:
    """Verify a dataset or dumps."""
    begun, now_and_then = time.monotonic(), _seldom(report)

    def progress(done: int, total: int, read: int) -> None:
        seconds = time.monotonic() - begun
        rate = round(read / seconds) if seconds else None
        now_and_then({"schema": 1, "done": done, "total": total, "bytes": read, "bytes_per_second": rate})

    place = Path(job.output)
    if not (place / "manifest.json").exists() and is_dumps(place):
        made = verify_dumps(place, progress, job.sample)
    elif place.name in formats.FORMATS and (place.parent / "manifest.json").exists():
        made = verify_dataset(place.parent, progress, place.name, job.sample)
    else:
        made = verify_dataset(place, progress, most=job.sample)
    return (1 if made.failures else 0), made


def run_export(job: ExportJob) -> tuple[int, Any]:
    """Write a dataset in further formats."""
    made = export(job, report, say)
    return (1 if made.failures else 0), made


def run_diff(job: DiffJob) -> tuple[int, Any]:
    """Compare two datasets."""
    now_and_then = _seldom(report)
    made = diff(
        Path(job.dataset),
        Path(job.other),
        lambda done, total: now_and_then({"schema": 1, "done": done, "total": total}),
    )
    return (0 if made.same else 1), made


def _seldom(tell: Callable[[Any], None]) -> Callable[[Any], None]:
    """`tell`, but not more often than it can be looked at."""
    last = -REPORT_SECONDS

    def seldom(what: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            tell(what)

    return seldom


def run_sample(job: SampleJob) -> tuple[int, Any]:
    """Look at one sample."""
    seen = inspect_sample(Path(job.output), job.number, job.trusted_model)
    return (1 if seen.failures else 0), seen


def run_doctor(job: measure.MeasureJob) -> tuple[int, Any]:
    """Measure disks and GPUs; what the figures mean, the doctor says."""
    return 0, measure.measure(job, say, report)


def run_extract(job: ExtractJob) -> tuple[int, Any]:
    """Run an extraction; its result is its last progress."""
    seen: list[Any] = []

    def keep(progress: Progress) -> None:
        seen[:] = [progress]
        report(progress)

    return driver.extract(job, keep, say, tell), seen[0]


Jobs = dict[str, tuple[Any, Callable[[Any], tuple[int, Any]]]]
JOBS: Jobs = {
    "try": (TryJob, run_try),
    "probe": (ProbeJob, run_probe),
    "plan": (PlanJob, run_plan),
    "extract": (ExtractJob, run_extract),
    "verify": (VerifyJob, run_verify),
    "export": (ExportJob, run_export),
    "diff": (DiffJob, run_diff),
    "sample": (SampleJob, run_sample),
    "doctor": (measure.MeasureJob, run_doctor),
}
COUNTS = ("rows", "samples", "written", "verified", "failed", "bad", "bad_rows", "seconds")  # of whichever result


def main(kind: str, jobs: Jobs = JOBS) -> int:
    """Run the job of this folder, which is one of `jobs`."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shape, run = jobs[kind]
    job = msgspec.json.decode(Path("job.json").read_bytes(), type=shape)
    try:
        code, result = run(job)
    except Stop as error:
        tell("error", reason=str(error))
        code, result = error.exit_code, {"error": str(error)}
    except KeyboardInterrupt:
        tell("error", reason=ASKED)
        code, result = 130, {"error": ASKED}
    except Exception as error:
        known = next((code for kinds, code in EXIT_CODES if isinstance(error, kinds)), None)
        tell("server_lost" if isinstance(error, ServerGone) else "error", reason=str(error) or type(error).__name__)
        if known is None:
            raise  # the log gets the traceback, exit.json the code
        code, result = known, {"error": str(error)}
    if isinstance(result, dict) and "error" in result:
        say(result["error"])
    else:
        counts = msgspec.to_builtins(result)
        tell("finished", **{name: counts[name] for name in COUNTS if name in counts})
    dump.write_json(Path("result.json"), result)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
