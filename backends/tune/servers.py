"""The servers that a tuning run launches, and stopping them together with it."""

from __future__ import annotations

import signal

from backends.runs import ASK_SECONDS, KILL_SECONDS, PORT_SECONDS, TERM_SECONDS, Run, Runs, Stopped, stop

# It stops its own server, with all that this may take, before it ends.
PATIENCE = ASK_SECONDS + TERM_SECONDS + KILL_SECONDS + PORT_SECONDS + 10.0


def stop_tuning(all_runs: Runs, run: Run, why: str) -> Stopped:
    """Stop a tuning run and its server, also where the run itself was killed before; see `backends.runs.stop`."""
    made = stop(run, why, signal.SIGINT, patience=PATIENCE)
    made.left += stop_servers(all_runs, run, f"{run.id} is stopped")
    return made


def stop_servers(all_runs: Runs, run: Run, why: str) -> list[str]:
    """Stop the servers of a tuning run, and what a stop that was cut short left; returns what is still there."""
    own = [server for server in all_runs.all("server") if server.spec.details.get("tune") == run.id]
    there = [server for server in own if server.alive() or server.processes()]
    return [f"{thing} of {server.id}" for server in there for thing in stop(server, why).left]
