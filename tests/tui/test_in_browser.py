"""`layertap --serve`: the console in a real browser, on the loopback address only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from helpers import until

from backends.ports import free_port

LAYERTAP = Path(sys.executable).with_name("layertap")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[int]:
    port = free_port()
    home = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("STATE", "CACHE", "CONFIG")}
    serving = subprocess.Popen(
        [LAYERTAP, "--serve", str(port), "--read-only"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | home | {"LAYERTAP_PYTHON": sys.executable},
        start_new_session=True,
    )
    try:
        until(lambda: answers(port), "it serves")
        yield port
    finally:
        os.killpg(serving.pid, signal.SIGINT)
        try:
            serving.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(serving.pid, signal.SIGKILL)
            serving.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_page_takes_nothing_from_elsewhere(served: int) -> None:
    page = urllib.request.urlopen(f"http://127.0.0.1:{served}/", timeout=30).read().decode()
    assert f"127.0.0.1:{served}" in page
    assert "https://" not in page


def test_it_listens_on_the_loopback_address_alone(served: int) -> None:
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = {line.split()[1] for line in listening if line.split()[3] == "0A"}
    assert {one.partition(":")[0] for one in addresses if int(one.partition(":")[2], 16) == served} == {"0100007F"}


def test_a_browser_shows_the_console(served: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium: the console in a browser is not looked at (apt install chromium)")
    debugging = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"--user-data-dir={profile}",
             "--window-size=1200,800", f"--remote-debugging-port={debugging}", f"http://127.0.0.1:{served}/"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            until(lambda: answers(debugging), "the browser is up", 120)
            # The page marks its body as soon as the terminal has painted something that the console sent.
            until(lambda: "-first-byte" in asyncio.run(body_class(debugging)), "the console's first screen", 120)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


async def body_class(debugging: int) -> str:
    """The classes of the page's body, asked of the browser."""
    asked = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": "document.body.className"}}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{debugging}/json") as answer:
            pages = await answer.json(content_type=None)
        page = next((one for one in pages if one["type"] == "page"), None)
        if page is None:
            return ""
        async with session.ws_connect(page["webSocketDebuggerUrl"]) as link:
            await link.send_json(asked)
            said = await link.receive_json()
    return str(said["result"]["result"].get("value", ""))
