"""The banner: on every screen of a host, the most severe thing first, and gone once it is over."""

from __future__ import annotations

from typing import Any

import pytest
from consoles import console, shown, until, until_shown
from scenes import HOT, SCENES, XID

from console.tui.widgets.banner import Banner, worst

SIZE = (120, 40)


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["escape", "l", "x", "r"])
async def test_it_is_on_every_screen_and_goes(key: str) -> None:
    app = console("live", {"all": []})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: bool(app.screen.query(Banner)) and not app.screen.query_one(Banner).display)
        app.feed.scene["alarms"] = [HOT]
        await until_shown(pilot, HOT["cause"])
        assert HOT["remedy"] in " ".join(shown(app).split())
        app.feed.scene["alarms"] = []
        await until(pilot, lambda: not app.screen.query_one(Banner).display)


def said(**known: Any) -> str:
    content, _ = worst(SCENES["live"] | known)
    return "" if content is None else content.plain


def test_the_most_severe_thing_speaks() -> None:
    assert said() == ""
    assert said(alarms=[XID, HOT]).startswith(f"! {XID['cause']} since ")
    assert "and 1 more" in said(alarms=[XID, HOT])
    assert said(alarms=[HOT]).startswith("? ")
    assert worst(SCENES["live"] | {"alarms": [HOT]})[1] and not worst(SCENES["live"] | {"alarms": [XID, HOT]})[1]
    failed = SCENES["failed"]["link"]
    assert said(link=failed, alarms=[XID]) == f"! {failed['why']} -- R connects again"
    assert said(trouble="the agent said no", alarms=[XID]) == "! the agent said no"
