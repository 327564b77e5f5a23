"""The tables and the console that commands print on."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from parallel.settings import EngineSettings, LayoutSettings
from pipeline.run.graph import Stage
from pipeline.text import visible

ANSI = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
STATE_STYLES = {
    "done": "green",
    "running": "cyan",
    "submitted": "blue",
    "failed": "red",
    "stale": "yellow",
    "pending": "dim",
}
DEEPEST = 12  # levels of indentation; every round of a run adds some more
WRAPPED = 100  # columns of a table that wraps, also where nobody reads it on a terminal
PLAIN_WIDTH = 1000  # where there is no terminal: whoever reads it breaks lines as they like
# Experts have their own parallelism, so both lines of a layout multiply to all ranks.
OF_DENSE_LAYERS = ("data", "tensor", "pipeline", "virtual_pipeline", "context")
OF_EXPERTS = ("expert", "expert_tensor")


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and a style of `ANSI` or none."""

    text: str
    style: str = ""


def table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    right: Collection[int] = (),
    coloured: bool | None = None,
) -> str:
    """Return the title, the headings and the rows, each column as wide as its longest cell.

    An empty title or no headings are left out; columns of `right` are aligned to the right.
    `coloured` defaults to whether standard output is a terminal that takes colour.
    """
    if coloured is None:
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
        coloured = sys.stdout.isatty() and not plain  # no-color.org
    cells = [[Cell(heading, "bold") for heading in headings]] if headings else []
    cells += [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    texts = [[visible(cell.text) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [visible(title)] if title else []
    for row, line in zip(cells, texts, strict=True):
        padded = []
        for index, (cell, text, width) in enumerate(zip(row, line, widths, strict=True)):
            gap = " " * (width - len(text))
            if coloured and cell.style:
                text = f"\x1b[{ANSI[cell.style]}m{text}\x1b[0m"
            padded.append(gap + text if index in right else text + gap)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def wrapped_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    right: Collection[int] = (),
    width: int = WRAPPED,
) -> str:
    """Return a table whose columns beyond `width` continue in another one below.

    Each begins with the first column; one that is too wide alone stays so.
    """
    columns = list(zip(headings, *rows, strict=True))
    label_width, *widths = [max(len(visible(_text(cell))) for cell in column) for column in columns]
    column_groups: list[list[int]] = [[]]
    used = label_width
    for index, wide in enumerate(widths, start=1):
        if column_groups[-1] and used + 2 + wide > width:
            column_groups.append([])
            used = label_width
        column_groups[-1].append(index)
        used += 2 + wide
    tables = []
    for number, group in enumerate(column_groups):
        picked = [0, *group]
        tables.append(
            table(
                "" if number else title,
                [headings[index] for index in picked],
                [[row[index] for index in picked] for row in rows],
                [place for place, index in enumerate(picked) if index in right],
            )
        )
    return "\n\n".join(tables)


def markdown_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    right: Collection[int] = (),
) -> str:
    """Return the title and the table in GitHub's Markdown."""
    rule = ["---:" if index in right else "---" for index in range(len(headings))]
    lines = [
        [visible(_text(cell)).replace("|", "\\|") for cell in row] for row in (headings, *rows)
    ]
    table_lines = [f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:])]
    return "\n".join([f"**{visible(title)}**", "", *table_lines])


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def layout_text(layout: LayoutSettings) -> str:
    """Return a layout in words: `4 ranks: data 2, tensor 2; experts: expert 4`."""
    text = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    for before, names in ((": ", OF_DENSE_LAYERS), ("; experts: ", OF_EXPERTS)):
        sizes = [(name, getattr(layout, name)) for name in names]
        if shared := ", ".join(f"{name} {size}" for name, size in sizes if size > 1):
            text += before + shared
    return text


def engines_text(engine: EngineSettings) -> str:
    """Return the engines in words: `2 engines x data 2 x tensor 4`."""
    count = f"{engine.count} engine{'s' if engine.count > 1 else ''}"
    if engine.data > 1:
        count += f" x data {engine.data}"
    return f"{count} x tensor {engine.tensor}" if engine.tensor > 1 else count


def indented(stages: Sequence[Stage]) -> dict[str, str]:
    """Return the stages' names, indented by their depth below the cold start, at most DEEPEST."""
    depths: dict[str, int] = {}
    for stage in stages:  # dependencies come first
        depths[stage.name] = 1 + max((depths[name] for name in stage.waits_for), default=-1)
    return {name: f"{'  ' * min(depth, DEEPEST)}{name}" for name, depth in depths.items()}


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
