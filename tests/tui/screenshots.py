"""Take the README's pictures from the running product: a real demo on the embedded engine, looked at on its way.

usage: python tests/tui/screenshots.py FOLDER        (make screenshots)
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from consoles import shown
from textual.pilot import Pilot

from console.config import Config, ConsoleConfig
from console.demo import Demo
from console.hosts import LOCAL
from console.tui.app import known_hosts
from console.tui.demo import DemoConsole

SIZE = (120, 34)
PATIENCE = 600.0  # seconds
ENGINE = Path(sys.executable).parents[2] / ".venv-engine" / "bin" / "python"


async def until(pilot: Pilot[Any], *texts: str) -> None:
    """Wait until all texts are on the screen."""
    async with asyncio.timeout(PATIENCE):
        while not all(text in shown(pilot.app) for text in texts):  # type: ignore[arg-type]
            await asyncio.sleep(0.2)


async def take(folder: Path, output: Path) -> None:
    """The pictures, one a screen."""
    hosts = known_hosts(Config(), str(ENGINE), None)
    app = DemoConsole(
        hosts,
        LOCAL,
        ConsoleConfig(animations=False),
        lambda session, say, follow: Demo(session, str(output), "embedded-kimi-k2_5", say, follow),
    )

    def save(name: str) -> None:
        (folder / f"{name}.svg").write_text(app.export_screenshot(title="Layertap"), encoding="utf-8")

    try:
        async with app.run_test(size=SIZE, notifications=False) as pilot:
            await until(pilot, "STARTING", "> ")
            save("starting")
            await until(pilot, "READY", "DONE", "24 / 24")
            save("dashboard")
            for key, name, texts in (
                ("l", "logs", ["Prefill batch"]),
                ("s", "server", ["safe to draw from"]),
                ("a", "samples", ["written"]),
            ):
                await pilot.press(key)
                await until(pilot, *texts)
                save(name)
                if name == "samples":
                    await pilot.press("enter")
                    await until(pilot, "aux_0")
                    save("sample")
                    await pilot.press("escape")
                await pilot.press("escape")
    finally:
        app.stop_demo()
        app.feed.close()


def main(folder: Path) -> None:
    """Take them with a home of their own, so that they tell of nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="layertap-pictures-") as name:
        for kind in ("STATE", "CACHE", "CONFIG"):
            os.environ[f"XDG_{kind}_HOME"] = f"{name}/{kind.lower()}"
        asyncio.run(take(folder, Path(name) / "layertap-demo"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
