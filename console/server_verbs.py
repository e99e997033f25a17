"""Verbs about hosts, servers and runs. Heavy imports stay inside them, so that `--help` is quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from backends.errors import ExitCode, LeftBehind, RunDied, UsageError
from console import DEFAULT_PORT
from console.options import (
    COMMON,
    LAYER_OPTIONS,
    SETTING_OPTIONS,
    Common,
    LayerOptions,
    Port,
    Seconds,
    SettingOptions,
    app,
    host_model,
    host_path,
    open_host,
)


@app.command
def launch(
    profile: str | None = None,
    *,
    model: str | None = None,
    port: Port = DEFAULT_PORT,
    timeout: Seconds = 3600.0,
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
    from console import headless
    from console.launching import layer_choice, shown, suitable
    from console.words import of_host, of_server

    model = host_model(model, common)
    with open_host(common) as session:
        if profile is None:
            headless.out(suitable(session, model), common.json, of_host.candidates)
            raise UsageError("say which profile to launch; + suits this host and model")
        merged = session.plan_launch(profile, model, port, settings.overrides())
        choice = layer_choice(layers.given(common), merged.layers)
        differs = merged.match.differs(session.situation(merged.model)) if merged.match else None
        if dry_run:
            session.check_layers(merged, choice)
            try:
                session.check_model(merged.model)
            except UsageError as error:  # it may come later
                headless.say(f"warning: {error}")
            headless.out(shown(merged, choice.words(), differs), common.json, of_server.launch)
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
        headless.out(status, common.json, of_server.server)
        return headless.ready_code(status, timeout)


@app.command
def tune(
    profile: str | None = None,
    *,
    model: str | None = None,
    only: str | None = None,
    seconds: Seconds = 5.0,
    timeout: Seconds = 3600.0,
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
    from console import config, headless, tuned
    from console.launching import layer_choice
    from console.session import going_on
    from console.words import of_run

    if run is None and profile is None:
        raise UsageError("say which profile to tune; `layertap launch` lists those that suit this host")
    model = host_model(model, common)
    with open_host(common) as session:
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
            said = tuned.given(model, layers.given(common), overrides)
            chosen = [word.strip() for word in only.split(",")] if only else []
            same = {"profile": profile, "model": merged.model, "only": chosen, "given": said}
            alive = [one for one in session.host.request("all", kind="tune") if going_on(one)]
            found = next((one for one in alive if one["details"] == same), None)
            told = f"attached to {found['id']}, which tunes {profile} already" if found else ""
            if not found:
                choice = layer_choice(layers.given(common), merged.layers)
                found = session.tune(merged, choice, chosen, seconds, timeout, said)
                told = f"started {found['id']}; its log is {found['log']}"
        try:
            if run is None:
                headless.say(told)
            ended = headless.follow_job(session, found["id"], of_run.tuning)
            code = session.finish(ended)[0]
        except KeyboardInterrupt:
            if going_on(session.host.request("run", run_id=found["id"])):  # it came before the run was followed
                session.stop(found["id"], "Ctrl+C")
            ended, code = session.host.request("run", run_id=found["id"]), ExitCode.INTERRUPTED
            if "trials" not in (ended["result"] or {}):  # it had not begun to try
                raise
        made = tuned.shown(ended["result"], name)
        if write and made["profile_toml"]:
            path = common.config or config.default_path()
            tuned.write(path, name, made["profile_toml"])
            made["written"] = str(path)
        headless.out(made, common.json, of_run.tuned)
        return code


@app.command
def status(*, port: Port | None = None, watch: bool = False, common: Common = COMMON) -> int:
    """Show the server with phases, verdict and evidence, the dumps and the newest extraction.

    Args:
        port: port of the server, where several run.
        watch: show it again every second until Ctrl+C, also while the link is down.
    """
    from console import headless
    from console.feed import Feed
    from console.words import of_snapshot

    with open_host(common) as session:
        now = session.snapshot(port)
        headless.out(now, common.json, of_snapshot.snapshot)
        if watch:
            feed = Feed(common.host, lambda _: session, port, last=now, logs=False)
            feed.start()
            try:
                while True:
                    time.sleep(1)
                    headless.out(feed.snapshot(), common.json, of_snapshot.snapshot)
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
    port: Port | None = None,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    common: Common = COMMON,
) -> int:
    """Print the log of a run, of the newest server without one; secrets are masked.

    Args:
        run: id of a run, or its beginning.
        port: port of the server, where several run.
        follow: go on as the log grows, until Ctrl+C.
    """
    from console import headless

    with open_host(common) as session:
        found = session.host.request("run", run_id=run) if run else session.newest_server(port)
        rest = b""
        try:
            for data in headless.follow_log(session, found["log"], follow):
                whole, _, rest = (rest + data).rpartition(b"\n")
                if whole:
                    sys.stdout.write(headless.log_text(whole) + "\n")
                    sys.stdout.flush()
            sys.stdout.write(headless.log_text(rest))
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
    port: Port = DEFAULT_PORT,
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
    from console import headless
    from console.doctor import Wanted, examine, measured, measuring
    from console.words import of_host

    with open_host(common) as session:
        wanted = Wanted(profile, host_model(model, common), port, host_path(output, common) if output else None)
        report = examine(session, wanted)
        if active:
            run = session.start("doctor", measuring(session, wanted))
            run = headless.follow_job(session, run["id"], lambda now: f"{now['what']} …")
            report = measured(session, report, session.finish(run)[1])
        headless.out(report, common.json, of_host.doctor)
        return ExitCode.NOT_VERIFIED if report["counts"]["fail"] else ExitCode.OK


@app.command
def stacks(run: str | None = None, *, port: Port | None = None, common: Common = COMMON) -> int:
    """Read where every rank, the detokenizer and the launcher of a server stand, and which rank differs.

    Args:
        run: id of a server run; without it, the live server.
        port: port of the server, where several run.
    """
    from console import headless
    from console.words import of_server

    with open_host(common) as session:
        run_id = run or session.host.request("server", port=port)["id"]
        headless.out(session.host.request("stacks", run_id=run_id), common.json, of_server.stacks)
        return ExitCode.OK


@app.command
def diagnose(file: Path, /, *, json: bool = False) -> int:
    """Say what a server's log shows, without its host: what, since when, evidence, what to do; exit 1 where it is bad.

    Args:
        file: log of an SGLang server, on this machine.
        json: print JSON.
    """
    import msgspec

    from backends.verdict.log_report import report
    from console import headless
    from console.words import of_server

    made = report(file.expanduser(), time.time())
    headless.out(msgspec.to_builtins(made), json, of_server.diagnosis)
    return ExitCode.OK if made.fine else ExitCode.NOT_VERIFIED


@app.command
def hosts(*, common: Common = COMMON) -> int:
    """List the hosts that --host takes, and how each is: reached or not, its SGLang, its GPUs."""
    from concurrent.futures import ThreadPoolExecutor

    from console import config, headless
    from console.hosts import known, look
    from console.words import of_host

    loaded = config.load(common.config)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: look(name, loaded, common.python), known(loaded)))
    headless.out({"schema": 1, "hosts": found}, common.json, of_host.hosts)
    return ExitCode.OK


@app.command
def runs(run: str | None = None, *, common: Common = COMMON) -> int:
    """List the runs of the host, the newest first, or show one of them with what happened to it.

    Args:
        run: id of a run, or its beginning.
    """
    from console import headless
    from console.words import of_run

    with open_host(common) as session:
        if run:
            headless.out(session.host.request("run", run_id=run), common.json, of_run.run)
        else:
            found = session.host.request("all")
            headless.out({"schema": 1, "runs": found}, common.json, lambda _: of_run.runs(found, time.time()))
        return ExitCode.OK


@app.command
def bundle(
    run: str | None = None, *, port: Port | None = None, output: Path | None = None, common: Common = COMMON
) -> int:
    """Gather logs, state, evidence and versions of a run in one file to send to somebody, secrets masked.

    Args:
        run: id of a run, or its beginning; the newest server and extraction without it.
        port: port of the server, where several run.
        output: the file, a .tar.gz in this folder without it.
    """
    from console import headless
    from console.bundle import seen, write
    from console.words import of_snapshot

    with open_host(common) as session:
        status = "\n".join(of_snapshot.snapshot(seen(session, run, port))) + "\n"
        path = write(session, {"status.txt": status}, run, output, port=port)
        headless.out({"schema": 1, "path": str(path)}, common.json, lambda made: [made["path"]])
        return ExitCode.OK


@app.command
def stop(run: str | None = None, *, port: Port | None = None, common: Common = COMMON) -> int:
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

    with open_host(common) as session:
        run_id = run or session.host.request("server", port=port)["id"]
        made = session.stop(run_id, "layertap stop")
        headless.out(made, common.json, lines)
        if made["left"]:
            raise LeftBehind(f"{run_id} left something behind: {'; '.join(made['left'])}")
        return ExitCode.OK
