"""The supervisor of an extraction: watches it, and with `--restart-server` keeps its server going.

It runs on the host and outlives every console and link. What the watch sees goes into the run's history. A dead server
is launched again as it was, and the driver goes on from the ledger, so every sample is there once.

usage: python -m backends.supervise RUN_FOLDER
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import ExitCode, LayertapError, LeftBehind, RunDied
from backends.jobs import read_job, sources
from backends.launch import relaunch
from backends.runs import Run, Runs, start_child, stop, supervise, write_json
from backends.sample import Sampler
from backends.verdict import patience
from backends.verdict.alarms import AlarmWatch
from backends.verdict.alarms import Limits as AlarmLimits
from backends.verdict.diagnose import Limits
from backends.verdict.sights import sight, write_alarms
from backends.verdict.watch import ServerWatch, earlier_start, settled
from capture import events
from capture.stop import ASKED

LOOK_SECONDS = 2.0
DEATH_SECONDS = 10.0  # in which a server that the driver lost is seen to be dead
SOON_SECONDS = 0.5  # between two looks for its death, and for a stop
DRAIN_SECONDS = 60.0  # in which a driver that is asked to ends
READY_SECONDS = 3600.0  # that a server has to come up again
PAUSE_SECONDS = 5.0  # before the second attempt, twice as many before each further one: a mount may come back
LONGEST_PAUSE = 300.0
TOLD = ("id", "severity", "cause", "evidence", "remedy")  # of an alarm, in the history


class StopAsked(Exception):
    """Somebody asked the run to stop."""


class Supervisor:
    """Sees to one extraction. `restarts` of its server are left."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.runs = Runs(run.folder.parents[1])
        self.most = self.restarts = int(run.spec.details.get("restart_server", 0))
        self.causes: list[str] = []  # of which its servers died
        self.sampler = Sampler(self.runs)
        self.limits = patience.scaled(AlarmLimits())
        self.alarms = AlarmWatch(self.limits)
        self.blind = False  # whether a look failed, which is told once
        first, *others = self._servers()
        self.watch = self._watch(first)
        self.others = [self._watch(server) for server in others]  # looked at only where the first one is dead

    def see_to(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the driver, and start it again once its server was brought back; returns the run's exit code."""
        while True:
            code = self._follow(child)
            if code != ExitCode.RUN_DIED or self.run.stop_asked:
                return code
            try:
                cause = self._death()
                if cause is None or not self.most:
                    return code
                self._bring_back(cause)
                child = start_child(self.run)
            except StopAsked:
                return self._end(ExitCode.INTERRUPTED, ASKED)
            except (LayertapError, OSError) as error:
                return self._end(ExitCode.RUN_DIED, str(error))
            if self.run.stop_asked:  # between its last look and run.json, where a stop finds the driver
                child.send_signal(signal.SIGINT)

    def _follow(self, child: subprocess.Popen[bytes]) -> int:
        """Look at the server as long as the driver runs; returns its exit code.

        A driver that waits for servers of which all are dead, and does not notice, is ended, as one that lost them.
        """
        dead_since: float | None = None
        while True:
            try:
                return child.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                seen = self._look()
            now = time.monotonic()
            dead = seen is not None and seen["verdict"]["verdict"] == "crashed" and all(map(is_dead, self.others))
            dead_since = (dead_since or now) if dead else None
            if dead_since and now - dead_since > self.limits.linger:
                return self._end_driver(child)

    def _end_driver(self, child: subprocess.Popen[bytes]) -> int:
        ids = " and ".join(watch.run.id for watch in (self.watch, *self.others))
        lost = f"the server {ids} is dead; `layertap launch` it"
        if self.others:
            lost = f"the servers {ids} are dead; `layertap launch` one"
        reason = f"{lost}, then give the command again"
        self._tell("server_lost", reason=reason)
        child.terminate()
        try:
            child.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        write_json(self.run.folder / "result.json", {"error": reason})
        return ExitCode.RUN_DIED

    # --- The server ---

    def _bring_back(self, cause: str) -> None:
        """Launch the server again, which died of `cause`. Raises RunDied where it does not come up, StopAsked."""
        self.causes.append(cause)
        if not self.restarts:
            raise RunDied(died_again(self.causes))
        reasons: list[str] = []
        pause = PAUSE_SECONDS
        while self.restarts:
            if reasons:
                self._rest(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)
            self.restarts -= 1
            attempt, begun = self.most - self.restarts, time.monotonic()
            dead = self.watch.run
            self._show("relaunching")
            self._tell("relaunch", server=dead.id, attempt=attempt, most=self.most, cause=cause)
            try:
                self._launch(dead)
            except LayertapError as error:
                cause = str(error)
                reasons.append(cause)
                self._tell("relaunch_failed", attempt=attempt, most=self.most, reason=cause)
            else:
                seconds = round(time.monotonic() - begun, 1)
                self._tell("relaunched", server=self.watch.run.id, instead_of=dead.id, seconds=seconds)
                return
        raise RunDied(gave_up(reasons))

    def _death(self) -> str | None:
        """Of what the server died; None where it did not, or where somebody stopped it."""
        for seen in self._looks(SOON_SECONDS, DEATH_SECONDS):
            if self.watch.run.stop_asked:
                return None
            if seen["verdict"]["verdict"] in ("crashed", "stopped"):
                return str(seen["verdict"]["cause"])
        return None

    def _launch(self, dead: Run) -> None:
        """Launch a server as `dead` was, and wait until it is ready. Raises LayertapError with the reason."""
        left = stop(dead, "it is dead", dead=True).left
        if left:
            raise LeftBehind(f"of {dead.id} there is still: {'; '.join(left)}")
        if self.run.stop_asked or dead.stop_asked:  # while its remains were ended
            raise StopAsked
        self.watch = self._watch(relaunch(self.runs, dead))
        server = self.watch.run
        self._draw_from(server)
        for seen in self._looks(LOOK_SECONDS, READY_SECONDS):
            if server.stop_asked:
                raise StopAsked
            if settled(seen):
                verdict = seen["verdict"]
                if verdict["verdict"] in ("healthy", "degraded"):
                    self._draw_from(server)
                    return
                raise RunDied("; ".join(filter(None, (verdict["cause"], verdict["remedy"]))))
        raise RunDied(f"it was not ready after {READY_SECONDS:g} s")

    def _draw_from(self, server: Run) -> None:
        """Tell the next driver, and whoever stops the server, of whom is drawn: its replicas, once it has said so."""
        first, *more = sources(self.runs, server)
        job = {name: value for name, value in read_job(self.run).items() if name != "beside"}
        write_json(self.run.folder / "job.json", job | first | ({"beside": more} if more else {}))

    def _looks(self, pause: float, seconds: float) -> Iterator[dict[str, Any]]:
        """One look at the server after another, for so many seconds. Raises StopAsked."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if seen := self._look():
                yield seen
            self._rest(pause)

    def _look(self) -> dict[str, Any] | None:
        """Look at the server, and tell what is wrong with the run; None where that failed, which ends no run."""
        seen = None
        try:
            seen = self.watch.look()
            self._judge(seen)
        except Exception:
            if not self.blind:
                traceback.print_exc()
            self.blind = True
        return seen

    def _judge(self, seen: dict[str, Any]) -> None:
        sample = self.sampler.sample(self.watch.run.id, [self.run.spec.details["output"]])
        new, over = self.alarms.add(sight(self.watch, seen, sample, self.run), time.time())
        for alarm in new:
            self._tell("trouble", **{name: getattr(alarm, name) for name in TOLD})
        for alarm in over:
            self._tell("trouble_over", id=alarm.id, seconds=round(time.time() - alarm.since, 1))
        write_alarms(self.run, self.alarms.alarms)

    def _rest(self, seconds: float) -> None:
        """Wait. Raises StopAsked."""
        deadline = time.monotonic() + seconds
        while not self.run.stop_asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, SOON_SECONDS))
        if self.run.stop_asked:
            raise StopAsked

    def _watch(self, server: Run) -> ServerWatch:
        earlier = earlier_start(self.runs, server)
        return ServerWatch(server, self.sampler.gpus, earlier, patience.scaled(Limits()), first_answer=0.0)

    def _servers(self) -> list[Run]:
        """Those that are drawn from, each once: a server's replicas are one run."""
        job = read_job(self.run)
        ids = [source["server"]["run"] for source in (job, *job.get("beside", ()))]
        return [self.runs.get(id) for id in dict.fromkeys(ids)]

    # --- The run ---

    def _show(self, phase: str) -> None:
        """Show in progress.json what goes on without a driver; its result is none yet."""
        (self.run.folder / "result.json").unlink(missing_ok=True)
        path = self.run.folder / "progress.json"
        progress = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        write_json(path, progress | {"phase": phase})

    def _tell(self, event: str, **facts: Any) -> None:
        events.append(self.run.folder, event, **facts)
        self._say(f"{event.replace('_', ' ')}: {', '.join(f'{name} {fact}' for name, fact in facts.items())}")

    def _end(self, code: ExitCode, why: str) -> int:
        """The run's end, where no driver is there to tell it; returns the exit code."""
        self._tell("error", reason=why)
        write_json(self.run.folder / "result.json", {"error": why})
        return code

    @staticmethod
    def _say(text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)  # noqa: T201


def is_dead(watch: ServerWatch) -> bool:
    """Whether nothing can be drawn from a server any more; not where it cannot be looked at, which ends no run."""
    try:
        return watch.look()["verdict"]["verdict"] in ("crashed", "stopped")
    except Exception:
        return False


def gave_up(reasons: list[str]) -> str:
    """Why a server is not launched once more, after attempts that failed for these reasons."""
    attempts = "once" if len(reasons) == 1 else f"{len(reasons)} times"
    return f"the server was launched again {attempts} and did not come up{_same(reasons)}: {reasons[-1]}"


def died_again(causes: list[str]) -> str:
    """Why a server that came up each time is not launched once more, after it died of these causes."""
    return (
        f"the server died {len(causes)} times{_same(causes)}: {causes[-1]}; it was launched again as often as "
        f"--restart-server allows, see its log (layertap logs)"
    )


def _same(reasons: list[str]) -> str:
    return ", the same way each time" if len(reasons) > 1 and len(set(reasons)) == 1 else ""


if __name__ == "__main__":
    os.umask(0o077)
    folder = Path(sys.argv[1])
    sys.exit(supervise(folder, lambda run, child: Supervisor(run).see_to(child)))
