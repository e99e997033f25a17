"""The command `layertap`: its verbs, put together, and its exit code."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import CycloptsError, CycloptsPanel, UnusedCliTokensError

from backends.errors import ExitCode, LayertapError, UsageError
from console import data_verbs, server_verbs  # noqa: F401 - they register their verbs
from console.options import COMMON, Common, Port, app, host_path, open_host
from console.words.printable import printable

if TYPE_CHECKING:
    from console.demo import Follow, Say
    from console.session import Session


@app.default
def console(
    *, read_only: bool = False, port: Port | None = None, serve: Port | None = None, common: Common = COMMON
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
        return Demo(session, host_path(output, common), profile, say, follow)

    if headless or common.json or os.environ.get("CI") or not (sys.stdin.isatty() and sys.stdout.isatty()):
        with open_host(common) as session:
            outcome = show_demo(lambda say, follow: make(session, say, follow))
    else:
        from console.tui import demo
        from console.tui.app import known_hosts

        loaded = config.load(common.config)
        hosts = known_hosts(loaded, common.python, common.accept_new_host_key)
        outcome = demo.show(hosts, common.host, loaded.console, make)
    out(outcome, common.json, lines)
    return code(outcome)


def _too_many(verb: list[str], words: list[str]) -> str:
    """What is wrong with words that nothing takes."""
    if verb:
        return f"{' '.join(verb)} takes no {words[0]!r} there; see `layertap {' '.join(verb)} --help`"
    close = difflib.get_close_matches(words[0], [name for name in app if not name.startswith("-")], 1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"no command is called {words[0]!r}{meant or '; see `layertap --help`'}"


def main() -> None:
    """Entry point: run a verb, end with its exit code."""
    try:
        code = app(result_action="return_value", exit_on_error=False, print_error=False)
    except UnusedCliTokensError as error:
        sys.stderr.write(f"layertap: {_too_many(list(error.command_chain or []), error.unused_tokens or [])}\n")
        code = ExitCode.USAGE
    except CycloptsError as error:
        (error.console or app.error_console).print(CycloptsPanel(error))
        code = ExitCode.USAGE
    except LayertapError as error:
        sys.stderr.write(f"layertap: {printable(str(error))}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = ExitCode.OK
    except Exception:
        import traceback

        sys.stderr.write(f"{printable(traceback.format_exc())}layertap: this is a bug of ours\n")
        code = ExitCode.OUR_BUG
    sys.exit(int(code) if isinstance(code, int) else 0)
