"""A table of rows that is moved in by the keys of vim."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.color import Color, ColorParseError
from textual.widgets import DataTable

from console.words.printable import printable


class Table(DataTable[Any]):
    """Rows to choose from. Cells are made by `cell`: a plain string would be read as markup."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False, id="table.down"),
        Binding("k", "cursor_up", "Up", show=False, id="table.up"),
        Binding("g", "scroll_top", "First", show=False, id="table.first"),
        Binding("G", "scroll_bottom", "Last", show=False, id="table.last"),
        Binding("ctrl+d", "page_down", "A page down", show=False, id="table.page_down"),
        Binding("ctrl+u", "page_up", "A page up", show=False, id="table.page_up"),
    ]

    def __init__(self, **known: Any) -> None:
        super().__init__(cursor_type="row", **known)


def cell(text: str, style: str | Style = "", **known: Any) -> Text:
    """A cell, with escapes for what a terminal would obey."""
    return Text(printable(text), style, **known)


def theme_style(app: App[Any], variable: str, *, bold: bool = False) -> Style:
    """A colour of the theme for a cell; none where the theme leaves it to the terminal."""
    try:
        return Style(color=Color.parse(app.theme_variables[variable]).rich_color, bold=bold)
    except (KeyError, ColorParseError):
        return Style(bold=bold)
