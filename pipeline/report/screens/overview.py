"""The first screen of `braid look`: a run's health, its stages and their curves, kept current."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static
from textual.worker import Worker

from parallel.errors import UserError
from pipeline.report.compare.comparison import held_out_gains
from pipeline.report.drawing import tree
from pipeline.report.view.findings import Health
from pipeline.report.view.health import judged
from pipeline.report.view.overview import HEADINGS, Overview, health_lines, metric_rows
from pipeline.report.view.sample_text import Regrade
from pipeline.report.view.waits import HEADINGS as WAITS
from pipeline.report.view.waits import waits, waits_cells
from pipeline.run.run import Run
from pipeline.tables import Cell
from pipeline.text import visible

SECONDS = 2.0  # between two looks at a run's files
METRIC_HEADINGS = ("metric", "curve", "first → last", "healthy")


class LookApp(App[None]):
    """`braid look RUN` on a terminal; with a stage it opens that stage's samples."""

    TITLE = "braid look"
    BINDINGS: ClassVar = [
        Binding("q", "quit", "quit"),
        Binding("d", "toggle_dark", "dark or light"),
    ]

    def __init__(self, run: Run, stage: str | None, regrade: Regrade) -> None:
        """Raise UserError where a stage is named that has no samples.

        `regrade` returns the grades that samples of a stage earn now.
        """
        super().__init__()
        self.run_shown, self.regrade = run, regrade
        self._opened = None if stage is None else samples_screen(run, stage, regrade)

    def on_mount(self) -> None:
        """Show the run, and the stage that was asked for above it."""
        self.push_screen(OverviewScreen(self.run_shown, self.regrade))
        if self._opened is not None:
            self.push_screen(self._opened)

    def action_toggle_dark(self) -> None:
        """Change between the dark and the light theme."""
        dark = self.theme == "textual-dark"
        self.theme = "textual-light" if dark else "textual-dark"


def samples_screen(run: Run, stage: str, regrade: Regrade) -> Screen[None]:
    """Return the screen of a stage's samples; raise UserError where it has none."""
    # It needs pyarrow, which a login node may lack, and which takes a fifth of a second to import.
    from pipeline.report.screens.samples import SamplesScreen

    return SamplesScreen(run, stage, regrade)


def text_of(cell: str | Cell) -> Text:
    """Return a cell of our tables as one of textual's."""
    text, style = (cell, "") if isinstance(cell, str) else (cell.text, cell.style)
    return Text(visible(text), style=style)


class FollowingScreen[Content](Screen[None]):
    """A table that follows a run: `read` gives what `show` shows, again every few seconds.

    It reads in a thread: the files of a long run take a second, in which keys must not wait.
    """

    headings: tuple[str, ...] = ()

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._reading: Worker[None] | None = None

    def on_mount(self) -> None:
        """Read the run, and again as long as the screen is shown."""
        self.table.add_columns(*self.headings)
        self._read_again()
        self.set_interval(SECONDS, self._follow)

    @property
    def table(self) -> DataTable[Text]:
        """The screen's table."""
        return self.query_one(DataTable)

    def _follow(self) -> None:
        if self.app.screen is self and self._reading is not None and self._reading.is_finished:
            self._read_again()

    def _read_again(self) -> None:
        self._reading = self.run_worker(self._read_and_show())

    async def _read_and_show(self) -> None:
        content = await asyncio.to_thread(self.read)
        if not self.query(DataTable):  # the screen was left meanwhile
            return
        row = self.table.cursor_row
        self.table.clear()
        self.show(content)
        self.table.move_cursor(row=row)

    def read(self) -> Content:
        """Return what the run's files say now; it runs in a thread."""
        raise NotImplementedError

    def show(self, content: Content) -> None:
        """Fill the empty table."""
        raise NotImplementedError


class OverviewScreen(FollowingScreen[tuple[Overview, Health]]):
    """The health line, and a line of each stage: state, curve, speed, where its seconds go."""

    BINDINGS: ClassVar = [
        Binding("enter", "samples", "samples", priority=True),
        Binding("c", "metrics", "metrics"),
        Binding("w", "waits", "waits"),
    ]
    CSS = "#health { padding: 1 1 1 1; height: auto; } DataTable { height: 1fr; }"
    headings = HEADINGS

    def __init__(self, run: Run, regrade: Regrade) -> None:
        super().__init__(run)
        self._regrade, self.sub_title = regrade, run.name

    def compose(self) -> ComposeResult:
        """Yield the health, the table and the keys."""
        yield Static(id="health")
        yield DataTable(id="stages", cursor_type="row")
        yield Footer()

    def read(self) -> tuple[Overview, Health]:
        """Return the overview and what is out of its range."""
        overview = Overview.of(self._run.refresh())
        states = overview.states
        gains = held_out_gains(self._run, states)
        return overview, judged(self._run, states, overview.lines, gains)

    def show(self, content: tuple[Overview, Health]) -> None:
        """Show the health and a row for each stage."""
        overview, health = content
        lines = [text_of(cell) for cell in health_lines(health)]
        self.query_one("#health", Static).update(Text("\n").join(lines))
        for name, cells in overview.rows():
            self.table.add_row(*map(text_of, cells), key=name)

    @property
    def _chosen(self) -> str:
        return list(tree(self._run.stages))[self.table.cursor_row]

    def action_samples(self) -> None:
        """Show the chosen stage's samples."""
        try:
            screen = samples_screen(self._run, self._chosen, self._regrade)
        except UserError as error:
            self.notify(visible(str(error)), severity="warning", markup=False)
        else:
            self.app.push_screen(screen)

    def action_metrics(self) -> None:
        """Show every metric of the chosen stage."""
        self.app.push_screen(MetricsScreen(self._run, self._chosen))

    def action_waits(self) -> None:
        """Show what every process does."""
        self.app.push_screen(WaitsScreen(self._run))


class TableScreen(FollowingScreen[list[list[str | Cell]]]):
    """A screen that is one table, whose cells `read` gives."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        """Yield the table and the keys."""
        yield DataTable(cursor_type="row")
        yield Footer()

    def show(self, content: list[list[str | Cell]]) -> None:
        """Add a row for each list of cells."""
        for cells in content:
            self.table.add_row(*map(text_of, cells))


class MetricsScreen(TableScreen):
    """Every metric of a stage: its curve, its values, and its healthy ones."""

    headings = METRIC_HEADINGS

    def __init__(self, run: Run, stage: str) -> None:
        super().__init__(run)
        self._stage = stage

    def read(self) -> list[list[str | Cell]]:
        """Return a row for each metric."""
        return [*metric_rows(Overview.of(self._run.refresh()).lines[self._stage])]


class WaitsScreen(TableScreen):
    """Every process of what runs: its phase, whom it waits for, since when."""

    headings = WAITS

    def read(self) -> list[list[str | Cell]]:
        """Return a row for each process."""
        run = self._run.refresh()
        cells = waits_cells(waits(run, Overview.of(run).states))
        return cells or [["no stage is running", *[""] * (len(WAITS) - 1)]]
