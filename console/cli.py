"""The verbs of `layertap`. Heavy imports stay inside them, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter

from backends.errors import ExitCode, LayertapError, LeftBehind, RunDied, UsageError
from console import DEFAULT_PORT, VERSION

if TYPE_CHECKING:
    from backends.sglang import Overrides
    from console.demo import Follow, Say
    from console.session import Session


app = App(
    name="layertap",
    help="Verified EAGLE-3 training data out of a live SGLang server.",
    version=VERSION,
    help_format="plaintext",
    default_parameter=Parameter(negative_bool=(), negative_iterable=()),
)
LAYERS = Group("Layers", help="Which layers' states; name them in one way.")
SETTINGS = Group("Settings", help="What is changed of the profile.")
ROWS = Group("Rows", help="How rows are read.")


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every verb."""

    host: Annotated[str, Parameter(env_var="LAYERTAP_HOST")] = "local"
    """Host: what one would say to `ssh`, or a [host.NAME] of layertap.toml; paths are then that host's."""
    accept_new_host_key: str | None = None
    """Fingerprint (SHA256:...) of a host key that is not known yet and is right."""
    python: Annotated[str | None, Parameter(env_var="LAYERTAP_PYTHON")] = None
    """SGLang's Python on the host."""
    config: Annotated[Path | None, Parameter(env_var="LAYERTAP_CONFIG")] = None
    """layertap.toml to use."""
    json: bool = False
    """Print JSON."""


@Parameter(name="*")
@dataclass(frozen=True)
class RowOptions:
    """How rows are read."""

    prompt_column: Annotated[str | None, Parameter(group=ROWS)] = None
    """Column that holds the prompt."""
    response_column: Annotated[str | None, Parameter(group=ROWS)] = None
    """Column that holds the response."""
    max_length: Annotated[int | None, Parameter(group=ROWS)] = None
    """Most tokens of a sample; the server's own limit holds anyway."""
    overlong: Annotated[Literal["truncate", "skip"] | None, Parameter(group=ROWS)] = None
    """What becomes of longer rows; skipped ones are counted."""
    last_turn_only: Annotated[bool, Parameter(group=ROWS)] = False
    """Only the last assistant turn goes into the loss."""
    allow_ignored_roles: Annotated[bool, Parameter(group=ROWS)] = False
    """Take a chat template that renders what the assistant says like what the user says."""


@Parameter(name="*")
@dataclass(frozen=True)
class LayerOptions:
    """Which layers."""

    boundaries: Annotated[list[int] | None, Parameter(group=LAYERS, consume_multiple=True)] = None
    """What enters these layers, e.g. 3 31 59."""
    outputs: Annotated[list[int] | None, Parameter(group=LAYERS, consume_multiple=True)] = None
    """What these layers put out, e.g. 2 30 58."""
    eagle_ids: Annotated[list[int] | None, Parameter(group=LAYERS, consume_multiple=True)] = None
    """Ids as a drafter's config holds them."""
    draft: Annotated[str | None, Parameter(group=LAYERS)] = None
    """A drafter's config.json on the host."""

    def given(self) -> dict[str, Any]:
        """What was said."""
        return {name: value for name, value in vars(self).items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True)
class SettingOptions:
    """What is changed of a profile."""

    set: Annotated[tuple[str, ...], Parameter(group=SETTINGS)] = ()
    """A server argument, NAME=VALUE or NAME; NAME=unset removes it."""
    env: Annotated[tuple[str, ...], Parameter(group=SETTINGS)] = ()
    """An environment variable, NAME=VALUE."""
    memory: Annotated[str | None, Parameter(group=SETTINGS)] = None
    """What the tap may take for states under way, e.g. "48 GiB", or bytes."""
    writers: Annotated[int | None, Parameter(group=SETTINGS)] = None
    """Processes of the tap that write states."""

    def overrides(self) -> Overrides:
        """What was said."""
        from backends.sglang import Overrides
        from console.launching import pairs, tap_options

        return Overrides(
            args=pairs(list(self.set), "--set"),
            env=pairs(list(self.env), "--env"),
            tap=tap_options(self.memory, self.writers),
        )


COMMON = Common()
LAYER_OPTIONS = LayerOptions()
SETTING_OPTIONS = SettingOptions()
ROW_OPTIONS = RowOptions()


@app.default
def console(
    *, read_only: bool = False, port: int | None = None, serve: int | None = None, common: Common = COMMON
) -> int:
    """Open the console on a host: link, server, GPUs, dumps and extraction live, and every verb by a key.

    Args:
        read_only: look, and change nothing.
        port: port of the server, where several run.
        serve: show it in a browser instead, on this port of the loopback address; needs layertap[web].
    """
    if serve is not None:
        from console import web

        web.serve(serve, _same_console(read_only, port, common))
        return ExitCode.OK
    in_browser = "TEXTUAL_DRIVER" in os.environ  # textual-serve's
    if not in_browser and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the console needs a terminal; `layertap status --watch` follows without one")
    from console import config
    from console.tui.app import run

    return run(
        common.host,
        config.load(common.config),
        common.python,
        common.accept_new_host_key,
        read_only=read_only,
        port=port,
    )


def _same_console(read_only: bool, port: int | None, common: Common) -> list[str]:
    """The words that open this very console."""
    options = {
        "--host": common.host,
        "--accept-new-host-key": common.accept_new_host_key,
        "--python": common.python,
        "--config": common.config,
        "--port": port,
    }
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    return [*words, "--read-only"] if read_only else words


@app.command
def launch(
    profile: str | None = None,
    *,
    model: str | None = None,
    port: int = DEFAULT_PORT,
    timeout: float = 3600.0,
    detach: bool = False,
    dry_run: bool = False,
    layers: LayerOptions = LAYER_OPTIONS,
    settings: SettingOptions = SETTING_OPTIONS,
    common: Common = COMMON,
) -> int:
    """Launch an SGLang server with the tap in it, and follow it until it is ready.

    Args:
        profile: a built-in profile or one of layertap.toml; without it, those that suit this host and model are listed.
        model: folder of the model on the host.
        port: port on the host's loopback address.
        timeout: seconds until the server must be ready.
        detach: return at once.
        dry_run: print the merged arguments, each with its reason, and start nothing.
    """
    from console import headless, words
    from console.launching import layer_choice, shown, suitable

    with _session(common) as session:
        if profile is None:
            headless.out(suitable(session, model), common.json, words.candidates)
            raise UsageError("say which profile to launch; + suits this host and model")
        merged = session.plan_launch(profile, model, port, settings.overrides())
        choice = layer_choice(layers.given(), merged.layers)
        differs = merged.match.differs(session.situation(merged.model)) if merged.match else None
        if dry_run:
            headless.out(shown(merged, choice.words(), differs), common.json, words.launch)
            return ExitCode.OK
        for one in differs or []:
            headless.say(f"warning: {profile}: {one}")
        if danger := session.hello["danger"]:
            headless.say(f"warning: {danger}")
        run = session.launch(merged, choice)
        headless.say(f"launched {run['id']} on port {port}; its log is {run['log']}")
        if detach:
            headless.out(run, common.json, lambda run: [run["id"]])
            return ExitCode.OK
        try:
            status = headless.wait_ready(session, run["id"], timeout)
        except KeyboardInterrupt:
            headless.say(f"\n{run['id']} goes on; `layertap status --watch` follows it, `layertap stop` stops it")
            return ExitCode.INTERRUPTED
        headless.out(status, common.json, words.server)
        verdict = status["verdict"]["verdict"]
        if verdict in ("starting", "slow_but_fine", "hang_suspected"):
            headless.say(f"not ready after {timeout:g} s; it goes on, `layertap status --watch` follows it")
            return ExitCode.TIMEOUT
        return ExitCode.OK if verdict in ("healthy", "degraded") else ExitCode.NOT_READY


@app.command
def tune(
    profile: str | None = None,
    *,
    model: str | None = None,
    only: str | None = None,
    seconds: float = 5.0,
    timeout: float = 3600.0,
    name: str | None = None,
    write: bool = False,
    run: str | None = None,
    layers: LayerOptions = LAYER_OPTIONS,
    settings: SettingOptions = SETTING_OPTIONS,
    common: Common = COMMON,
) -> int:
    """Try variants of a profile on the host, each a launch of its own under the same load, and show the fastest.

    It goes on when the link is lost; the same command attaches to it again. Ctrl+C stops it, and shows what is known.

    Args:
        profile: the profile to start from.
        model: folder of the model on the host.
        only: names of variants or stages (attention, moe, prefill, overlap, nccl), e.g. moe,prefill-16k.
        seconds: how long one of the three rounds of the load should take.
        timeout: seconds in which each server must be ready.
        name: name of the profile that comes of it; PROFILE-tuned without it.
        write: write that profile to layertap.toml; one that is there is never changed.
        run: id of a tuning run: instead of starting one, follow it, or show what it came to.
    """
    from console import config, headless, tuned, words
    from console.launching import layer_choice
    from console.session import going_on

    if run is None and profile is None:
        raise UsageError("say which profile to tune; `layertap launch` lists those that suit this host")
    with _session(common) as session:
        if run is not None:
            found = session.host.request("run", run_id=run)
            if found["kind"] != "tune":
                raise UsageError(f"{found['id']} is no tuning run; `layertap runs` lists them")
            profile = found["details"]["profile"]
        assert profile is not None
        name = name or f"{profile}-tuned"
        if write:
            tuned.refuse_taken(name, session.profiles)
        if run is None:
            overrides = settings.overrides()
            merged = session.plan_launch(profile, model, DEFAULT_PORT, overrides)
            said = tuned.given(model, layers.given(), overrides)
            chosen = [word.strip() for word in only.split(",")] if only else []
            same = {"profile": profile, "model": merged.model, "only": chosen, "given": said}
            alive = [one for one in session.host.request("all", kind="tune") if going_on(one)]
            found = next((one for one in alive if one["details"] == same), None)
            told = f"attached to {found['id']}, which tunes {profile} already" if found else ""
            if not found:
                choice = layer_choice(layers.given(), merged.layers)
                found = session.tune(merged, choice, chosen, seconds, timeout, said)
                told = f"started {found['id']}; its log is {found['log']}"
        try:
            if run is None:
                headless.say(told)
            ended = headless.follow_job(session, found["id"], words.tuning)
            code = session.finish(ended)[0]
        except KeyboardInterrupt:
            if going_on(session.host.request("run", run_id=found["id"])):  # it came before the run was followed
                session.stop(found["id"], "Ctrl+C")
            ended, code = session.host.request("run", run_id=found["id"]), ExitCode.INTERRUPTED
            if not ended["result"]:
                raise
        made = tuned.shown(ended["result"], name)
        if write and made["profile_toml"]:
            path = common.config or config.default_path()
            tuned.write(path, name, made["profile_toml"])
            made["written"] = str(path)
        headless.out(made, common.json, words.tuned)
        return code


@app.command
def status(*, port: int | None = None, watch: bool = False, common: Common = COMMON) -> int:
    """Show the server with phases, verdict and evidence, the dumps and the newest extraction.

    Args:
        port: port of the server, where several run.
        watch: show it again every second until Ctrl+C, also while the link is down.
    """
    from console import headless, words
    from console.feed import Feed

    with _session(common) as session:
        now = session.snapshot(port)
        headless.out(now, common.json, words.snapshot)
        if watch:
            feed = Feed(common.host, lambda _: session, port, last=now, logs=False)
            feed.start()
            try:
                while True:
                    time.sleep(1)
                    headless.out(feed.snapshot(), common.json, words.snapshot)
            except KeyboardInterrupt:
                return ExitCode.INTERRUPTED
        if now["server"] is None:
            raise RunDied("no server of ours ever ran here; `layertap launch` one")
        codes = {
            "crashed": ExitCode.RUN_DIED,
            "stopped": ExitCode.RUN_DIED,
            "unknown": ExitCode.NOT_READY,
            "hang_suspected": ExitCode.NOT_READY,
        }
        return codes.get(now["server"]["verdict"]["verdict"], ExitCode.OK)


@app.command
def logs(
    run: str | None = None,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    common: Common = COMMON,
) -> int:
    """Print the log of a run, of the newest server without one; secrets are masked.

    Args:
        run: id of a run, or its beginning.
        follow: go on as the log grows, until Ctrl+C.
    """
    from backends.sglang import mask_text
    from console import headless

    with _session(common) as session:
        found = session.host.request("run", run_id=run) if run else session.newest_server()
        rest = b""
        try:
            for data in headless.follow_log(session, found["log"], follow):
                whole, _, rest = (rest + data).rpartition(b"\n")
                if whole:
                    sys.stdout.write(mask_text(whole.decode(errors="replace")) + "\n")
                    sys.stdout.flush()
            sys.stdout.write(mask_text(rest.decode(errors="replace")))
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        return ExitCode.OK


@app.command
def doctor(
    *,
    active: bool = False,
    profile: str | None = None,
    model: str | None = None,
    output: Path | None = None,
    port: int = DEFAULT_PORT,
    common: Common = COMMON,
) -> int:
    """Check a host before a launch, and say what to do; exit 1 where something fails. Changes nothing.

    Args:
        active: measure too, in a minute or two: writing to disk, copies to the GPUs, an all-reduce over them.
        profile: one that will be launched; its arguments, GPUs and settings of NCCL are then looked at.
        model: folder of the model on the host.
        output: folder that a dataset will go to; what it takes is known from the newest plan for it.
        port: port that a server will have.
    """
    from console import headless, words
    from console.doctor import Wanted, examine, measured, measuring

    with _session(common) as session:
        wanted = Wanted(profile, model, port, _path(output, common) if output else None)
        report = examine(session, wanted)
        if active:
            run = session.start("doctor", measuring(session, wanted))
            run = headless.follow_job(session, run["id"], lambda now: f"{now['what']} …")
            report = measured(session, report, session.finish(run)[1])
        headless.out(report, common.json, words.doctor)
        return ExitCode.NOT_VERIFIED if report["counts"]["fail"] else ExitCode.OK


@app.command
def stacks(run: str | None = None, *, port: int | None = None, common: Common = COMMON) -> int:
    """Read where every rank, the detokenizer and the launcher of a server stand, and which rank differs.

    Args:
        run: id of a server run; without it, the live server.
        port: port of the server, where several run.
    """
    from console import headless, words

    with _session(common) as session:
        run_id = run or session.host.request("server", port=port)["id"]
        headless.out(session.host.request("stacks", run_id=run_id), common.json, words.stacks)
        return ExitCode.OK


@app.command
def diagnose(file: Path, *, json: bool = False) -> int:
    """Say what a server's log shows, without its host: what, since when, evidence, what to do; exit 1 where it is bad.

    Args:
        file: log of an SGLang server, on this machine.
        json: print JSON.
    """
    import msgspec

    from backends.log_report import report
    from console import headless, words

    made = report(file.expanduser(), time.time())
    headless.out(msgspec.to_builtins(made), json, words.diagnosis)
    return ExitCode.OK if made.fine else ExitCode.NOT_VERIFIED


@app.command
def hosts(*, common: Common = COMMON) -> int:
    """List the hosts that --host takes, and how each is: reached or not, its SGLang, its GPUs."""
    from concurrent.futures import ThreadPoolExecutor

    from console import config, headless, words
    from console.hosts import known, look

    loaded = config.load(common.config)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: look(name, loaded, common.python), known(loaded)))
    headless.out({"schema": 1, "hosts": found}, common.json, words.hosts)
    return ExitCode.OK


@app.command
def runs(run: str | None = None, *, common: Common = COMMON) -> int:
    """List the runs of the host, the newest first, or show one of them with what happened to it.

    Args:
        run: id of a run, or its beginning.
    """
    from console import headless, words

    with _session(common) as session:
        if run:
            headless.out(session.host.request("run", run_id=run), common.json, words.run)
        else:
            found = session.host.request("all")
            headless.out({"schema": 1, "runs": found}, common.json, lambda _: map(words.run_line, found))
        return ExitCode.OK


@app.command
def bundle(run: str | None = None, *, output: Path | None = None, common: Common = COMMON) -> int:
    """Gather logs, state, evidence and versions of a run in one file to send to somebody, secrets masked.

    Args:
        run: id of a run, or its beginning; the newest server and extraction without it.
        output: the file, a .tar.gz in this folder without it.
    """
    from console import headless, words
    from console.bundle import write

    with _session(common) as session:
        status = "\n".join(words.snapshot(session.snapshot())) + "\n"
        path = write(session, {"status.txt": status}, run, output)
        headless.out({"schema": 1, "path": str(path)}, common.json, lambda made: [made["path"]])
        return ExitCode.OK


@app.command
def stop(run: str | None = None, *, port: int | None = None, common: Common = COMMON) -> int:
    """Stop a server (with what draws from it) or any run, and prove that nothing is left.

    Args:
        run: id of a run; without it, the live server.
        port: port of the server, where several run.
    """
    from console import headless

    def lines(made: dict[str, Any]) -> Iterator[str]:
        yield f"{made['id']} stopped in {made['seconds']} s ({made['how']})"
        for left in made["left"]:
            yield f"  left: {left}"

    with _session(common) as session:
        run_id = run or session.host.request("server", port=port)["id"]
        made = session.stop(run_id, "layertap stop")
        headless.out(made, common.json, lines)
        if made["left"]:
            raise LeftBehind(f"{run_id} left something behind: {'; '.join(made['left'])}")
        return ExitCode.OK


@app.command(name="try")
def try_prompt(
    text: str,
    *,
    chat: bool = False,
    port: int | None = None,
    common: Common = COMMON,
) -> int:
    """Send one prompt and show its tokens and what came out of every layer.

    Args:
        text: the prompt, taken as it is.
        chat: take it as a user's message, through the chat template.
        port: port of the server, where several run.
    """
    from console import headless, words

    with _session(common) as session:
        run = headless.follow_job(
            session, session.start("try", {"text": text, "chat": chat}, port)["id"], lambda _: "drawing …"
        )
        code, result = session.finish(run)
        headless.out(result, common.json, words.tried)
        return code


@app.command
def probe(*, against_hf: bool = False, port: int | None = None, common: Common = COMMON) -> int:
    """Show by drawing that a server is safe to draw from: alone, in a batch, on every rank; exit 6 where it is not.

    Args:
        against_hf: compare with a Hugging Face forward on the host's CPU too, where its memory holds the model.
        port: port of the server, where several run.
    """
    from console import headless, words

    with _session(common) as session:
        run = headless.follow_job(
            session,
            session.start("probe", {"against_hf": against_hf}, port)["id"],
            lambda now: f"{now['what']} …",
        )
        code, result = session.finish(run)
        headless.out(result, common.json, words.probed)
        return code


@app.command
def plan(
    rows: Path,
    *,
    output: Path | None = None,
    format: str | None = None,
    model: str | None = None,
    layers: int = 3,
    show: list[str] | None = None,
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
        trust_remote_code: let the model's own tokenizer code run.
    """
    from console import headless, words

    with _session(common) as session:
        job = {
            "rows": _path(rows, common),
            "output": _path(output, common) if output else None,
            "formats": _formats(format, session),
            "model": model and _path(Path(model), common),
            "layers": layers,
            "show": show or [],
            "trust_remote_code": trust_remote_code,
            "options": _row_options(options, session),
        }
        run = headless.follow_job(session, session.start("plan", job)["id"], lambda now: f"{now['rows']:,} rows read …")
        code, result = session.finish(run)
        headless.out(result, common.json, words.chosen_rows if show else words.plan)
        return code


@app.command
def extract(
    rows: Path,
    *,
    output: Path,
    format: str | None = None,
    port: list[int] | None = None,
    watch: bool = False,
    detach: bool = False,
    allow_volatile: bool = False,
    restart_server: int = 0,
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

    with _session(common) as session:
        place = _path(output, common)
        run = session.extraction(place)
        if run is not None and going_on(run):
            headless.say(f"attached to {run['id']}, which writes to {place} already")
        else:
            asked = job(
                _path(rows, common),
                place,
                _formats(format, session),
                _row_options(options, session),
                allow_volatile=allow_volatile,
                restart_server=restart_server,
                beside_ports=port[1:] if port else None,
            )
            run = session.start("extract", asked, port[0] if port else None)
            headless.say(f"started {run['id']}")
        if detach:
            headless.out(run, common.json, lambda run: [run["id"]])
            return ExitCode.OK
        return _follow_extraction(session, run["id"], common.json, watch)


def _follow_extraction(session: Session, run_id: str, as_json: bool, watch: bool) -> int:
    from console import headless, words

    run: dict[str, Any] = {}
    narration = headless.EventNarration()
    try:
        for run in session.follow(run_id):
            narration.show(run)
            if not run["progress"]:
                continue
            headless.ProgressLine.show(words.progress(run["progress"]))
            if watch and as_json:
                headless.out(run["progress"], True, words.extraction)
    except KeyboardInterrupt:
        headless.say(f"\n{run_id} goes on; the same command attaches to it again, `layertap stop {run_id}` stops it")
        return ExitCode.INTERRUPTED
    headless.ProgressLine.clear()
    code, result = session.finish(run)
    headless.out(result, as_json, lambda _: words.extraction(run))
    if result["bad_rows"]:
        headless.say(f"{result['bad_rows']} bad rows gave no sample; `layertap logs {run_id}` names them")
    return code


@app.command
def pull(dataset: str, target: Path, *, samples: str | None = None, common: Common = COMMON) -> int:
    """Copy a dataset, finished or not, from the host to this machine; the same command again goes on.

    Args:
        dataset: folder of the dataset on the host.
        target: folder on this machine.
        samples: only these, e.g. 3,7,10-20.
    """
    import msgspec

    from console import headless, words
    from console.pull import Progress, parse_samples
    from console.pull import pull as copy

    def show(now: Progress) -> None:
        headless.ProgressLine.show(words.pulling(msgspec.structs.asdict(now)))

    chosen = parse_samples(samples) if samples is not None else None
    with _session(common) as session:
        try:
            made = copy(session.host, _path(Path(dataset), common), target.expanduser(), chosen, show)
        except KeyboardInterrupt:
            headless.say("\nwhat was fetched stays; the same command goes on with the rest")
            return ExitCode.INTERRUPTED
        finally:
            headless.ProgressLine.clear()
        headless.out(msgspec.to_builtins(made), common.json, words.pulled)
        return ExitCode.NOT_VERIFIED if made.failed else ExitCode.OK


@app.command
def verify(dataset: Path, *, sample: int | None = None, common: Common = COMMON) -> int:
    """Verify a dataset in every format that it holds, or a folder of dumps, reading every file; exit 1 where any fails.

    Args:
        dataset: folder of the dataset, one format's folder in it, or a folder of req_N.
        sample: only so many samples, chosen at random.
    """
    from console import headless, words

    with _session(common) as session:
        job = {"output": _path(dataset, common), "sample": sample}
        run = headless.follow_job(session, session.start("verify", job)["id"], words.verifying)
        code, result = session.finish(run)
        headless.out(result, common.json, words.verified)
        return code


@app.command
def diff(a: Path, b: Path, *, common: Common = COMMON) -> int:
    """Compare two datasets by content: samples, masks and every state; exit 1 where they differ.

    Args:
        a: folder of a dataset.
        b: folder of another one on the same host; numbers, formats and order need not be the same.
    """
    from console import headless, words

    with _session(common) as session:
        job = {"dataset": _path(a, common), "other": _path(b, common)}
        run = headless.follow_job(session, session.start("diff", job)["id"], words.comparing)
        code, result = session.finish(run)
        headless.out(result, common.json, words.compared)
        return code


@app.command
def export(
    dataset: Path,
    *,
    format: str,
    output: Path | None = None,
    allow_volatile: bool = False,
    common: Common = COMMON,
) -> int:
    """Write a dataset in further formats, from native; the same command again goes on; exit 1 where a sample fails.

    Args:
        dataset: folder of the dataset.
        format: formats, e.g. specforge,speculators.
        output: folder of another dataset for them, on any file system; without it they go into this one.
        allow_volatile: let that lie in memory (tmpfs).
    """
    from console import headless, words

    with _session(common) as session:
        job = {
            "dataset": _path(dataset, common),
            "formats": format.split(","),
            "output": _path(output, common) if output else None,
            "allow_volatile": allow_volatile,
        }
        run = headless.follow_job(session, session.start("export", job)["id"], words.exporting)
        code, result = session.finish(run)
        headless.out(result, common.json, words.exported)
        return code


@app.command
def sample(dataset: Path, number: int, *, trust_remote_code: bool = False, common: Common = COMMON) -> int:
    """Show one sample token by token: the loss mask, the states' norms, odd rows; exit 1 where it is not verified.

    Args:
        dataset: folder of the dataset.
        number: the sample's number.
        trust_remote_code: let the model's own tokenizer code run.
    """
    from console import headless, words

    with _session(common) as session:
        place = _path(dataset, common)
        model = session.host.request("dataset", path=place)["manifest"]["settings"]["model"]
        job = {"output": place, "number": number, "trusted_model": model if trust_remote_code else None}
        run = headless.follow_job(session, session.start("sample", job)["id"], lambda _: "reading …")
        code, result = session.finish(run)
        headless.out(result, common.json, words.sample)
        return code


@app.command
def demo(
    output: Path = Path("layertap-demo"),
    *,
    profile: str = "embedded-kimi-k2_5",
    headless: bool = False,
    common: Common = COMMON,
) -> int:
    """Run the main job on the embedded engine: launch, extract, verify, stop; on a CPU, in about a minute.

    In a terminal the console shows it, and leaving that stops its server.

    Args:
        output: folder of the dataset; an earlier demo there is replaced.
        profile: one of the embedded profiles.
        headless: in words only, also in a terminal.
    """
    from console import config
    from console.demo import Demo, code, lines
    from console.headless import out, show_demo

    def make(session: Session, say: Say, follow: Follow) -> Demo:
        return Demo(session, _path(output, common), profile, say, follow)

    if headless or common.json or os.environ.get("CI") or not (sys.stdin.isatty() and sys.stdout.isatty()):
        with _session(common) as session:
            outcome = show_demo(lambda say, follow: make(session, say, follow))
    else:
        from console.tui import demo
        from console.tui.app import known_hosts

        loaded = config.load(common.config)
        hosts = known_hosts(loaded, common.python, common.accept_new_host_key)
        outcome = demo.show(hosts, common.host, loaded.console, make)
    out(outcome, common.json, lines)
    return code(outcome)


@contextmanager
def _session(common: Common) -> Iterator[Session]:
    """A session with the host that is meant."""
    from console import config
    from console.hosts import open_session, terminal

    session = open_session(
        common.host, config.load(common.config), common.python, common.accept_new_host_key, terminal()
    )
    try:
        for note in session.host.state.notes:
            sys.stderr.write(f"layertap: {note}\n")
        yield session
    finally:
        session.host.close()


def _formats(asked: str | None, session: Session) -> list[str]:
    return asked.split(",") if asked else list(session.defaults.format)


def _row_options(options: RowOptions, session: Session) -> dict[str, Any]:
    defaults = session.defaults
    if (options.prompt_column is None) != (options.response_column is None):
        raise UsageError("--prompt-column and --response-column go together")
    return {
        "prompt_column": options.prompt_column,
        "response_column": options.response_column,
        "max_length": options.max_length or defaults.max_length,
        "overlong": options.overlong or defaults.overlong,
        "last_turn_only": options.last_turn_only,
        "allow_ignored_roles": options.allow_ignored_roles,
    }


def _path(path: Path, common: Common) -> str:
    """A path as the host takes it: absolute on this machine, where the agent stands elsewhere; else as it was given."""
    return os.path.abspath(path.expanduser()) if common.host == "local" else str(path)


def main() -> None:
    """Entry point: run a verb, end with its exit code."""
    try:
        code = app(result_action="return_value", exit_on_error=False, print_error=True)
    except CycloptsError:
        code = ExitCode.USAGE
    except LayertapError as error:
        sys.stderr.write(f"layertap: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = ExitCode.OK
    except Exception:
        import traceback

        traceback.print_exc()
        sys.stderr.write("layertap: this is a bug of ours\n")
        code = ExitCode.OUR_BUG
    sys.exit(int(code) if isinstance(code, int) else 0)
