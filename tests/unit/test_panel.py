"""Lines of a panel that are wider than it."""

from __future__ import annotations

import pytest

from console.tui.widgets.panel import folded, line


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("fits", 4, ["fits"]),
        ("", 4, [""]),
        ("failed 2 · waiting 337 · sent 48 · odd 3", 26, ["failed 2 · waiting 337", "  sent 48 · odd 3"]),
        ("outputs of layers 2, 30 (boundaries 3, 31)", 28, ["outputs of layers 2, 30", "  (boundaries 3, 31)"]),
        (
            "~ RUNNING   a.jsonl -> /d/b  native + specforge",
            40,
            ["~ RUNNING   a.jsonl -> /d/b", "  native + specforge"],
        ),
        ("  in a list, and long", 14, ["  in a list,", "    and long"]),
        ("x" * 25, 12, ["x" * 12, f"  {'x' * 10}", "  xxx"]),
        ("大" * 10, 11, ["大" * 5, "  大大大大", "  大"]),
        ("x" * 99, 12, ["x" * 12, f"  {'x' * 10}", f"  {'x' * 10}", f"  {'x' * 9}…"]),
        ("no room", 3, ["no…"]),
    ],
)
def test_a_line_is_folded(text: str, width: int, rows: list[str]) -> None:
    assert [row.plain for row in folded(line(text), width)] == rows


def test_styles_stay_with_their_text() -> None:
    first, second = folded(line("verified 9", " · ", ("failed 2", "bold")), 12)
    assert [span.style for span in first.spans] == []
    assert [(second.plain[span.start : span.end], span.style) for span in second.spans] == [("failed 2", "bold")]
