"""A checkbox whose state is a sign, not only a colour."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Checkbox


class Check(Checkbox):
    """`[x]` or `[ ]`, one line high."""

    def __init__(self, label: str, *, id: str) -> None:
        super().__init__(label, id=id, compact=True)

    def render(self) -> Content:
        """Sign and label."""
        style = self.get_visual_style("toggle--label")
        sign = Content.styled("[x]" if self.value else "[ ]", style)
        return Content.assemble(sign, Content(self.label.plain).pad(1, 1).stylize_before(style))
