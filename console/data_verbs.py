"""Verbs about prompts, rows and datasets. Heavy imports stay inside them, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from backends.errors import ExitCode, UsageError
from console.options import (
    COMMON,
    PORTS,
    ROW_OPTIONS,
    Common,
    NotNegative,
    Port,
    Positive,
    RowOptions,
    app,
    asked_formats,
    asked_row_options,
    host_model,
    host_path,
    open_host,
)

if TYPE_CHECKING:
    from console.session import Session


@app.command(name="try")
def try_prompt(
    text: str,
    /,
    *,
    chat: bool = False,
    port: Port | None = None,
    common: Common = COMMON,
) -> int:
    """Send one prompt and show its tokens and what came out of every layer.

    Args:
        text: the prompt, taken as it is.
        chat: take it as a user's message, through the chat template.
        port: port of the server, where several run.
    """
    from console import headless
    from console.words import of_dataset

    with open_host(common) as session:
        run = session.start("try", {"text": text, "chat": chat}, port)
        return headless.end_job(session, run, lambda _: "drawing …", of_dataset.tried, common.json)


@app.command
def probe(*, against_hf: bool = False, port: Port | None = None, common: Common = COMMON) -> int:
    """Show by drawing that a server is safe to draw from: alone, in a batch, on every rank; exit 6 where it is not.

    Args:
        against_hf: compare with a Hugging Face forward on the host's CPU too, where its memory holds the model.
        port: port of the server, where several run.
    """
    from console import headless
    from console.words import of_server

    with open_host(common) as session:
        run = headless.follow_job(
            session,
            session.start("probe", {"against_hf": against_hf}, port)["id"],
            lambda now: f"{now['what']} …",
        )
        code, result = session.finish(run)
        headless.out(result, common.json, of_server.probed)
        return code


@app.command
def plan(
    rows: Path,
    /,
    *,
    output: Path | None = None,
    format: str | None = None,
    model: str | None = None,
    layers: Positive = 3,
    show: list[str] | None = None,
    port: Port | None = None,
    trust_remote_code: bool = False,
    options: RowOptions = ROW_OPTIONS,
    common: Common = COMMON,
) -> int:
    """Show what an extraction would do, before any GPU time; exit 1 where rows are bad or their masks would be wrong.

    Args:
        rows: JSONL, JSON or Parquet file, folder of such files, or folder of a saved Hugging Face dataset.
        output: folder that the dataset would go to.
        format: formats, e.g. native,specforge.
        model: folder of the model on the host; the running server's without it.
        layers: how many layers are drawn.
        show: instead, show this row with its loss mask, by its line or index, e.g. 17 or b.parquet:17; repeatable.
        port: port of the server that the model is taken from, where several run.
        trust_remote_code: let the model's own tokenizer code run.
    """
    from console import headless
    from console.words import figures, of_dataset

    with open_host(common) as session:
        job = {
            "rows": host_path(rows, common),
            "output": host_path(output, common) if output else None,
            "formats": asked_formats(format, session),
            "model": host_model(model, common),
            "layers": layers,
            "show": show or [],
            "trust_remote_code": trust_remote_code,
            "options": asked_row_options(options, session),
        }
        run = session.start("plan", job, port)
        shown = of_dataset.chosen_rows if show else of_dataset.plan
        return headless.end_job(
            session, run, lambda now: f"{figures.counted(now['rows'], 'row')} read …", shown, common.json
        )


@app.command
def extract(
    rows: Path,
    /,
    *,
    output: Path,
    format: str | None = None,
    port: Annotated[list[int] | None, PORTS] = None,
    watch: bool = False,
    detach: bool = False,
    allow_volatile: bool = False,
    restart_server: NotNegative = 0,
    options: RowOptions = ROW_OPTIONS,
    common: Common = COMMON,
) -> int:
    """Draw the states of every row into a dataset; the same command again attaches or goes on.

    Args:
        rows: JSONL, JSON or Parquet file, folder of such files, or folder of a saved Hugging Face dataset.
        output: folder of the dataset.
        format: formats, e.g. native,specforge.
        port: port of the server, where several run; given several times, all of them draw.
        watch: with --json, a line of progress twice a second.
        detach: return at once.
        allow_volatile: let the dataset lie in memory (tmpfs).
        restart_server: how often a server that dies is launched again as it was; the run then goes on.
    """
    from console import headless
    from console.extraction import job
    from console.session import going_on

    with open_host(common) as session:
        place = host_path(output, common)
        asked = job(
            host_path(rows, common),
            place,
            asked_formats(format, session),
            asked_row_options(options, session),
            allow_volatile=allow_volatile,
            restart_server=restart_server,
            beside_ports=port[1:] if port else None,
        )
        run = session.extraction(place, asked)
        if run is not None and going_on(run):
            headless.say(f"attached to {run['id']}, which writes to {place} already")
        else:
            run = session.start("extract", asked, port[0] if port else None)
            headless.say(f"started {run['id']}")
        if detach:
            headless.out(run, common.json, lambda run: [run["id"]])
            return ExitCode.OK
        return _follow_extraction(session, run["id"], common.json, watch)


def _follow_extraction(session: Session, run_id: str, as_json: bool, watch: bool) -> int:
    from console import headless
    from console.words import figures, of_run

    run: dict[str, Any] = {}
    narration = headless.EventNarration()
    try:
        for run in session.follow(run_id):
            narration.show(run)
            if not run["progress"]:
                continue
            headless.ProgressLine.show(of_run.progress(run["progress"]))
            if watch and as_json:
                headless.out(run["progress"], True, of_run.extraction)
    except KeyboardInterrupt:
        headless.say(f"\n{run_id} goes on; the same command attaches to it again, `layertap stop {run_id}` stops it")
        return ExitCode.INTERRUPTED
    headless.ProgressLine.clear()
    code, result = session.finish(run)
    headless.out(result, as_json, lambda _: of_run.extraction(run))
    for name, what in (("bad_rows", "bad row"), ("overlong_rows", "overlong row")):
        if result[name]:
            rows = figures.counted(result[name], what)
            headless.say(f"{rows} gave no sample; `layertap logs {run_id}` says why")
    return code


@app.command
def pull(dataset: str, target: Path, /, *, samples: str | None = None, common: Common = COMMON) -> int:
    """Copy a dataset, finished or not, from the host to this machine; the same command again goes on.

    Args:
        dataset: folder of the dataset on the host.
        target: folder on this machine.
        samples: only these, e.g. 3,7,10-20.
    """
    import msgspec

    from console import headless
    from console.pull import Progress, parse_samples
    from console.pull import pull as copy
    from console.words import of_dataset, of_run

    def show(now: Progress) -> None:
        headless.ProgressLine.show(of_run.pulling(msgspec.structs.asdict(now)))

    chosen = parse_samples(samples) if samples is not None else None
    with open_host(common) as session:
        try:
            made = copy(session.host, host_path(Path(dataset), common), target.expanduser(), chosen, show)
        except KeyboardInterrupt:
            headless.say("\nwhat was fetched stays; the same command goes on with the rest")
            return ExitCode.INTERRUPTED
        finally:
            headless.ProgressLine.clear()
        headless.out(msgspec.to_builtins(made), common.json, of_dataset.pulled)
        return ExitCode.NOT_VERIFIED if made.failed else ExitCode.OK


@app.command
def verify(dataset: Path, /, *, sample: int | None = None, common: Common = COMMON) -> int:
    """Verify a dataset in every format that it holds, or a folder of dumps, reading every file; exit 1 where any fails.

    Args:
        dataset: folder of the dataset, one format's folder in it, or a folder of req_N.
        sample: only so many samples, chosen at random.
    """
    from console import headless
    from console.words import of_dataset, of_run

    if sample is not None and sample < 1:
        raise UsageError(f"--sample {sample}: give how many samples to verify, 1 or more, or leave it out for all")
    with open_host(common) as session:
        job = {"output": host_path(dataset, common), "sample": sample}
        run = session.start("verify", job)
        return headless.end_job(session, run, of_run.verifying, of_dataset.verified, common.json)


@app.command
def diff(a: Path, b: Path, /, *, common: Common = COMMON) -> int:
    """Compare two datasets by content: samples, masks and every state; exit 1 where they differ.

    Args:
        a: folder of a dataset.
        b: folder of another one on the same host; numbers, formats and order need not be the same.
    """
    from console import headless
    from console.words import of_dataset, of_run

    with open_host(common) as session:
        job = {"dataset": host_path(a, common), "other": host_path(b, common)}
        run = session.start("diff", job)
        return headless.end_job(session, run, of_run.comparing, of_dataset.compared, common.json)


@app.command
def export(
    dataset: Path,
    /,
    *,
    format: str,
    output: Path | None = None,
    draft_vocab: Positive | None = None,
    allow_volatile: bool = False,
    common: Common = COMMON,
) -> int:
    """Write a dataset in further formats, from native; the same command again goes on; exit 1 where a sample fails.

    Args:
        dataset: folder of the dataset.
        format: formats, e.g. specforge,speculators.
        output: folder of another dataset for them, on any file system; without it they go into this one.
        draft_vocab: tokens of the drafter's vocabulary, the most frequent in the loss: writes d2t and t2d too.
        allow_volatile: let that lie in memory (tmpfs).
    """
    from console import headless
    from console.words import of_dataset, of_run

    with open_host(common) as session:
        job = {
            "dataset": host_path(dataset, common),
            "formats": format.split(","),
            "output": host_path(output, common) if output else None,
            "allow_volatile": allow_volatile,
            "draft_vocab": draft_vocab,
        }
        run = session.start("export", job)
        return headless.end_job(session, run, of_run.exporting, of_dataset.exported, common.json)


@app.command
def sample(dataset: Path, number: int, /, *, trust_remote_code: bool = False, common: Common = COMMON) -> int:
    """Show one sample token by token: the loss mask, the states' norms, odd rows; exit 1 where it is not verified.

    Args:
        dataset: folder of the dataset.
        number: the sample's number.
        trust_remote_code: let the model's own tokenizer code run.
    """
    from console import headless
    from console.words import of_dataset

    with open_host(common) as session:
        place = host_path(dataset, common)
        model = session.host.request("dataset", path=place)["manifest"]["settings"]["model"]
        job = {"output": place, "number": number, "trusted_model": model if trust_remote_code else None}
        run = session.start("sample", job)
        return headless.end_job(session, run, lambda _: "reading …", of_dataset.sample, common.json)
