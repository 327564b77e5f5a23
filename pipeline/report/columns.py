"""Tables of plain text, for as many rows as a run has stages.

Rich measures, wraps and pads every cell, which takes longer for a thousand rows than all else that
`braid plan` and `braid status` do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.text import visible

GAP = "  "
ANSI = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}


@dataclass(frozen=True)
class Cell:
    """What stands in a row's column, in one of the styles of `ANSI`, or in none."""

    text: str
    style: str = ""


def table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str | Cell]], coloured: bool
) -> str:
    """The title, the headings and the rows, each column as wide as its longest cell."""
    cells = [[Cell(heading, "bold") for heading in headings]]
    cells += [[_clean(cell) for cell in row] for row in rows]
    widths = [max(len(cell.text) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join([visible(title), *(_line(row, widths, coloured) for row in cells)])


def takes_colour() -> bool:
    """Whether standard output is a terminal on which nobody has asked for none: no-color.org."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stdout.isatty() and not plain


def shortened(text: str, width: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= width else f"{text[: width - 2].rstrip()} …"


def _clean(cell: str | Cell) -> Cell:
    found = Cell(cell) if isinstance(cell, str) else cell
    return Cell(visible(found.text), found.style)


def _line(row: Sequence[Cell], widths: Sequence[int], coloured: bool) -> str:
    shown = [
        (f"\x1b[{ANSI[cell.style]}m{cell.text}\x1b[0m" if coloured and cell.style else cell.text)
        + " " * (width - len(cell.text))
        for cell, width in zip(row, widths, strict=True)
    ]
    return GAP.join(shown).rstrip()
