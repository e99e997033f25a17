"""An extraction as it is asked for: by what a person says, or as an earlier run was."""

from __future__ import annotations

from typing import Any

from backends.errors import UsageError
from capture.rows.chat import InputError
from capture.rows.tokenise import RowOptions
from console import VERSION
from console.session import going_on


def job(
    rows: str,
    output: str,
    formats: list[str],
    options: dict[str, Any],
    *,
    allow_volatile: bool = False,
    restart_server: int = 0,
    beside_ports: list[int] | None = None,
) -> dict[str, Any]:
    """What `Session.start("extract", ...)` takes; paths are the host's, `options` those of `RowOptions`.

    A server that dies is launched again up to `restart_server` times; the servers on `beside_ports` draw beside the
    first. Raises UsageError for options that do not go together.
    """
    if restart_server < 0:
        raise UsageError("--restart-server takes how often a dead server is launched again, 0 or more")
    try:
        RowOptions(**options)
    except InputError as error:
        raise UsageError(str(error)) from error
    return {
        "rows": rows,
        "output": output,
        "formats": formats,
        "options": options,
        "layertap": VERSION,
        "allow_volatile": allow_volatile,
        "restart_server": restart_server,
        "beside_ports": beside_ports or [],
    }


def again(run: dict[str, Any]) -> dict[str, Any]:
    """The same job as an extraction's run: it draws what failed or is missing, and leaves alone what is written.

    Raises UsageError for a run that does not say what it was asked.
    """
    details = run["details"]
    if "formats" not in details:
        raise UsageError(f"{run['id']} does not say what it was asked for; start it anew with the same rows and folder")
    return job(
        details["rows"],
        details["output"],
        details["formats"],
        details.get("options", {}),
        allow_volatile=details.get("allow_volatile", False),
        restart_server=details.get("restart_server", 0),
        beside_ports=details.get("beside_ports"),
    )


def live_port(server: dict[str, Any] | None) -> int | None:
    """The port of a server that runs, as a job that draws from it takes it."""
    return server["port"] if server is not None and going_on(server) else None


def trusted_model(server: dict[str, Any] | None) -> str | None:
    """The model whose own code somebody let run: that of a live server which was launched so."""
    if server is None or not going_on(server) or "--trust-remote-code" not in server["argv"]:
        return None
    return str(server["details"]["model"])
