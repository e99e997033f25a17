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
    """Stop the live servers that a tuning run has launched; returns what is left of them."""
    own = [server for server in all_runs.all("server") if server.spec.details.get("tune") == run.id and server.alive()]
    return [f"{thing} of {server.id}" for server in own for thing in stop(server, why).left]
