"""One fault made on a real server, and what Layertap says of it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from backends.sglang import Overrides
from backends.verdict.diagnose import Limits
from capture.layers import LayerChoice
from console.session import Session

PLUGIN = Path(__file__).parent / "plugin"
PROFILE = "embedded-llama"
START_SECONDS = 600.0  # until a fault that begins later must have begun; a machine may be slow
GRACE_SECONDS = 90.0  # behind the silence that a phase allows, a hang must be told by then
LOOK_SECONDS = 0.5
LEAVING = threading.Event()  # set where the table is not to be finished
FINAL_SECONDS = 10.0  # for which a server that has ended may be told in other words


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, and the truth about it.

    `expected` is the verdict, `remedy` the id of the signature that must speak. `fault` is the plugin's word; what
    else is done to the server, `act` does, once the server is in phase `when`. A hang is told within `GRACE_SECONDS`
    behind the silence that phase `budget` allows, anything else within `GRACE_SECONDS`; this time does not pass while
    the host is so busy that the server gets only a part of the CPU that it wants. `around` is entered before the launch
    and left after the stop. No verdict in `never` may be given on the way, once the fault has begun. `stacks` must
    stand in the stacks that are read then, and `then` is the verdict that the server must come to when it is over.
    """

    id: str
    cause: str
    expected: str
    remedy: str | None
    fault: str = ""
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    model: Callable[[Path, Session], str] | None = None
    around: Callable[[Path, Session], contextlib.AbstractContextManager[None]] | None = None
    act: Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]] | None = None
    when: str | None = None
    budget: str | None = None
    never: tuple[str, ...] = ()
    stacks: str | None = None
    then: str | None = None
    short: bool = False
    needs: Callable[[], str | None] | None = None  # why it cannot be made on this machine

    @property
    def alone(self) -> bool:
        """Whether another server beside it could disturb it: what goes by silence and CPU."""
        return self.expected not in ("crashed", "starting")


class Outcome(msgspec.Struct, kw_only=True):
    """A line of the table; `seconds` from the fault to the verdict. `right` is None where it could not be made here."""

    id: str
    cause: str
    expected: str
    expected_remedy: str | None
    verdict: str = ""
    remedy: str | None = None
    says: str | None = None
    seconds: float | None = None
    allowed: float | None = None
    right: bool | None = None
    why: str = ""


def profile(case: Case, work: Path) -> dict[str, Any]:
    """The user's profile that this case is launched by."""
    env = {"LAYERTAP_FAULT_MARK": str(work / "begun"), "LAYERTAP_FAULT_DISK": str(work), **case.env}
    args: dict[str, Any] = {}
    if case.fault:
        env |= {
            "PYTHONPATH": str(PLUGIN),
            "SGLANG_PLUGINS": "layertap,layertap_cpu,layertap_faults",
            "LAYERTAP_FAULT": case.fault,
        }
    if case.ranks > 1:
        args["tp-size"] = case.ranks
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join("01"[: case.ranks])
    return {"extends": PROFILE, "env": env, "args": args}


class Trial:
    """Launches a case's server, makes the fault, and looks until the verdict is the right one or time is up."""

    def __init__(self, case: Case, session: Session, work: Path, patience: float) -> None:
        self.case, self.session, self.work = case, session, work
        self.budget = Limits().silence[case.budget] * patience if case.budget else 0.0
        self.outcome = Outcome(id=case.id, cause=case.cause, expected=case.expected, expected_remedy=case.remedy)
        self.began: float | None = None
        self.ended: float | None = None
        self.told: dict[str, Any] | None = None  # the right verdict, and when it was first given
        self.busy = 0.0  # seconds in which the host kept the server from what it would do

    def run(self) -> Outcome:
        """Do it; the server is stopped, whatever happens."""
        if why := self.case.needs and self.case.needs():
            self.outcome.why = why
            return self.outcome
        with contextlib.ExitStack() as over:
            over.callback(lambda: (self.work / "begun").unlink(missing_ok=True))
            if self.case.around:
                over.enter_context(self.case.around(self.work, self.session))
            run = self._launch()
            over.callback(lambda: self.session.stop(run["id"], "the trial is over"))
            self._follow(run["id"], over)
        return self.outcome

    def _launch(self) -> dict[str, Any]:
        model = self.case.model(self.work, self.session) if self.case.model else None
        port = self.session.host.request("free_port")
        merged = self.session.plan_launch(self.case.id, model, port, Overrides())
        return self.session.launch(merged, LayerChoice(**(merged.layers or {})))

    def _follow(self, run_id: str, over: contextlib.ExitStack) -> None:
        launched, acted = time.time(), False
        while not LEAVING.is_set():
            now = self.session.status(run_id)
            if self.case.act and not acted and self._ripe(now):
                over.enter_context(self.case.act(now))
                acted, self.began = True, time.time()
            if self.began is None:
                self.began = self._begun(launched)
            if self.began is not None and self._settled(now):
                return
            if self.began is None and time.time() - launched > START_SECONDS:
                self._say(now, None, False, "the fault did not begin")
                return
            if self.began is None and now["verdict"]["verdict"] in ("crashed", "stopped"):
                self._say(now, None, False, "the server ended before the fault began")
                return
            if any(line.startswith("the host is busy") for line in now["verdict"]["evidence"]):
                self.busy += LOOK_SECONDS
            time.sleep(LOOK_SECONDS)

    def _ripe(self, now: dict[str, Any]) -> bool:
        if self.case.when == "ready":
            return bool(now["verdict"]["verdict"] == "healthy")
        return self.case.when in (None, now["phase"])

    def _begun(self, launched: float) -> float | None:
        """When the fault began: at the launch for one that lies in what is launched."""
        if self.case.act:
            return None
        if not self.case.fault:
            return launched
        with contextlib.suppress(FileNotFoundError):
            return (self.work / "begun").stat().st_mtime
        return None

    def _settled(self, now: dict[str, Any]) -> bool:
        """Whether there is an outcome."""
        assert self.began is not None
        seconds = time.time() - self.began
        verdict = now["verdict"]["verdict"]
        if verdict in self.case.never:
            self._say(now, seconds, False, f"it was called {verdict}")
            return True
        told = (verdict, _remedy(now)) == (self.case.expected, self.case.remedy)
        if told and self.case.budget and seconds < self.budget:
            self._say(now, seconds, False, "it was told before the silence was as long as is allowed")
            return True
        if told and self._stacks_told(now):
            self.told = self.told or now | {"seconds": seconds}
        if self.told and self.case.then in (None, verdict):
            self._say(self.told, self.told["seconds"], True, "")
            return True
        if verdict in ("crashed", "stopped"):
            self.ended = self.ended or time.time()
            if time.time() - self.ended > FINAL_SECONDS:
                self._say(now, seconds, False, "it is told otherwise")
                return True
        # What lies in the launch itself shows once the start has come that far.
        in_launch = self.case.when is None and not self.case.fault
        starts = START_SECONDS if in_launch or self.told else 0.0
        if seconds - self.busy > self.budget + GRACE_SECONDS + starts:
            self._say(now, seconds, False, "the stacks do not say it" if told else "time is up")
            return True
        return False

    def _stacks_told(self, now: dict[str, Any]) -> bool:
        """Whether the stacks that were read say what they should."""
        if self.case.stacks is None:
            return True
        return now["stacks"] is not None and self.case.stacks in Path(now["stacks"]).read_text()

    def _say(self, now: dict[str, Any], seconds: float | None, right: bool, why: str) -> None:
        verdict = now["verdict"]
        self.outcome.verdict, self.outcome.remedy = verdict["verdict"], _remedy(now)
        self.outcome.says = f"{verdict['cause']}: {verdict['remedy']}" if verdict["cause"] else None
        self.outcome.seconds = None if seconds is None else round(seconds, 1)
        self.outcome.allowed = round(self.budget + GRACE_SECONDS, 1)
        self.outcome.right, self.outcome.why = right, why


def _remedy(now: dict[str, Any]) -> str | None:
    return next(iter(now["verdict"]["findings"]), None)


# --- What is done to a server ---


@contextlib.contextmanager
def sent(process: str, number: signal.Signals, now: dict[str, Any]) -> Iterator[None]:
    """Send a signal to one of the server's processes, by its title."""
    found = process_of(now, process)
    found.send_signal(number)
    try:
        yield
    finally:
        if number == signal.SIGSTOP:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(signal.SIGCONT)


def process_of(now: dict[str, Any], title: str) -> psutil.Process:
    """The process of a server that bears a title."""
    pid = msgspec.json.decode((Path(now["folder"]) / "run.json").read_bytes())["child"]["pid"]
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].strip() == title:
                return process
    raise LookupError(f"{now['id']} has no process {title}")


@contextlib.contextmanager
def listened_on(now: dict[str, Any]) -> Iterator[None]:
    """Take the server's port before it does."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", now["port"]))
        taken.listen()
        yield
