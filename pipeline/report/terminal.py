"""The console that commands print tables and progress on. Imports rich, which takes a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.text import visible

PLAIN_WIDTH = 1000  # where there is no terminal: whoever reads it breaks lines as they like


class Terminal(Console):
    """A console without markup, `:emoji:` or escape sequences other than rich's own.

    When its reader leaves it stops printing, where rich's console ends the process.
    """

    def __init__(self, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(file=file, width=width, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich moves the cursor of a live display with segments of control codes.
            if not segment.control:
                segment = Segment(visible(segment.text, keep="\n"), segment.style)
            yield segment

    def on_broken_pipe(self) -> None:
        self.quiet = True


def terminal(file: IO[str] | None = None) -> Terminal:
    """Return the console of a file, or of standard output; very wide if it is not a terminal."""
    console = Terminal(file)
    return console if console.is_terminal else Terminal(file, width=PLAIN_WIDTH)
