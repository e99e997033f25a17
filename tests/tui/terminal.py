"""A real terminal: a program in tmux, its keys, and what stands on its screen."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0  # seconds


class Terminal:
    """Runs a command in a tmux server of its own. What it says after the screen is gone stays visible."""

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        folder: Path,
        size: tuple[int, int] = (120, 40),
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("there is no tmux: the console is not tried in a real terminal (apt install tmux)")
        self.name = f"layertap-{uuid.uuid4().hex[:8]}"
        self._left = folder / f"{self.name}.code"
        words = " ".join(f"'{word}'" for word in command)
        script = folder / f"{self.name}.sh"
        script.write_text(f"{words}\necho $? > {self._left}\nexec sleep 1000000\n")
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), "sh", str(script),
                   environment=_without_size(environment) | {"TERM": "xterm-256color"}, folder=folder)  # fmt: skip

    def press(self, *keys: str) -> None:
        """Press keys by their tmux names, such as `C-q`, `Enter` and `x`."""
        for key in keys:
            self._tmux("send-keys", "-t", "0", key)

    def tab(self) -> None:
        """To the next field, and wait until it has the focus: what is typed sooner may still go to the one before."""
        before = self._below()
        self.press("Tab")
        self.wait(lambda _: self._below() != before, "the focus to move")

    def _below(self) -> list[str]:
        """The screen with its styles, without the line at the top, which has seconds in it."""
        return self._tmux("capture-pane", "-t", "0", "-p", "-e").splitlines()[1:]

    def type(self, text: str) -> None:
        """Type a text as it is."""
        self._tmux("send-keys", "-t", "0", "-l", text)

    @property
    def screen(self) -> str:
        """What stands there, a line a row."""
        return self._tmux("capture-pane", "-t", "0", "-p")

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return int(self._left.read_text()) if self._left.exists() and self._left.read_text().strip() else None

    def until(self, *texts: str, seconds: float = PATIENCE) -> str:
        """Wait until all texts are on the screen; returns it."""
        return str(
            self.wait(lambda screen: screen if all(text in screen for text in texts) else None, repr(texts), seconds)
        )

    def until_gone(self, text: str, seconds: float = PATIENCE) -> None:
        """Wait until a text is no longer there."""
        self.wait(lambda screen: text not in screen, f"{text!r} to go", seconds)

    def wait(self, true: Callable[[str], Any], what: str, seconds: float = PATIENCE) -> Any:
        """Wait for something to be true of the screen."""
        deadline = time.monotonic() + seconds
        while not (found := true(self.screen)):
            assert time.monotonic() < deadline, f"waited for {what}; the screen is\n{self.screen}"
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """End it, whatever it does."""
        self._tmux("kill-server")

    def _tmux(self, *words: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self.name, *words], env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"tmux {words[0]}: {done.stderr}"
        return done.stdout


def _without_size(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the size that readline, once it is loaded, leaves there for every child."""
    return {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
