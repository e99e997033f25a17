"""Real faults on the embedded engine, and whether Layertap says what they are: the table of verdicts against truth.

usage: python -m tests.diagnosis_table [CASE ...] [--short] [--patience 0.1] [--json]

Exit code 1 where a verdict is wrong. Seconds count from the fault to the verdict. `--patience` is a factor on the
silence that a phase allows (`LAYERTAP_PATIENCE`): 1 is what users have, and takes most of an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from console.config import Config
from console.hosts import LOCAL, open_session
from tests.diagnosis_table.cases import CASES
from tests.diagnosis_table.trial import LEAVING, Case, Outcome, Trial, profile

PATIENCE = 0.1
SIDE_BY_SIDE = 2
MARKS = {True: "right", False: "WRONG", None: "not made"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis_table", description=__doc__)
    parser.add_argument("case", nargs="*", choices=[[], *(case.id for case in CASES)])
    parser.add_argument("--short", action="store_true", help="only those that take seconds")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="a factor on silence that is allowed")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    cases = [case for case in CASES if case.short or not asked.short]
    cases = [case for case in cases if not asked.case or case.id in asked.case]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its servers are stopped then, too
    folder = Path(tempfile.mkdtemp(prefix="layertap-diagnosis-"))
    try:
        outcomes = run(cases, folder, asked.patience, quiet=asked.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.json:
        print(json.dumps(msgspec.to_builtins({"schema": 1, "patience": asked.patience, "table": outcomes})))
    else:
        wrong = sum(outcome.right is False for outcome in outcomes)
        made = sum(outcome.right is not None for outcome in outcomes)
        print(
            f"{made - wrong} of {made} right" + (f", {len(outcomes) - made} not made" if made < len(outcomes) else "")
        )
    return int(any(outcome.right is False for outcome in outcomes))


def run(cases: list[Case], folder: Path, patience: float, quiet: bool) -> list[Outcome]:
    """All of them: first those that disturb each other not, then one at a time."""
    for name in ("STATE", "CACHE", "CONFIG"):
        os.environ[f"XDG_{name}_HOME"] = str(folder / name.lower())
    os.environ["LAYERTAP_PATIENCE"] = str(patience)

    def one(case: Case) -> Outcome:
        work = folder / case.id
        work.mkdir()
        session = open_session(LOCAL, Config(profile={case.id: profile(case, work)}), None)
        try:
            outcome = Trial(case, session, work, patience).run()
        except Exception as error:
            outcome = Outcome(id=case.id, cause=case.cause, expected=case.expected, expected_remedy=case.remedy)
            outcome.right, outcome.why = False, f"{type(error).__name__}: {error}"
        finally:
            session.host.close()
        if not quiet:
            print(line(outcome), flush=True)
        return outcome

    if not quiet:
        print(row("cause", "expected", "verdict", "seconds", ""), flush=True)
    together = [case for case in cases if not case.alone]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            outcomes = list(pool.map(one, together))
        except KeyboardInterrupt:
            LEAVING.set()
            pool.shutdown(cancel_futures=True)
            raise
    return outcomes + [one(case) for case in cases if case.alone]


def line(outcome: Outcome) -> str:
    """An outcome as a line, with another below it for what is wrong."""
    expected = f"{outcome.expected} {outcome.expected_remedy or ''}"
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    text = row(outcome.cause, expected, f"{outcome.verdict} {outcome.remedy or ''}", seconds, MARKS[outcome.right])
    more = [f"    {outcome.why}"] if outcome.why else []
    return "\n".join([text, *more, *([f"    {outcome.says}"] if outcome.right is False and outcome.says else [])])


def row(cause: str, expected: str, verdict: str, seconds: str, mark: str) -> str:
    return f"{cause:<82} {expected:<34} {verdict:<34} {seconds:>7}  {mark}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
