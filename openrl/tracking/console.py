"""A terminal that shows text literally."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from openrl.errors import printable


class PlainConsole(Console):
    """A console in which neither markup nor control characters act: names, paths and rows of data
    come from elsewhere."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)
