"""The first screen of `braid look`: a run's health, its stages and their curves, kept current."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from parallel.errors import UserError
from pipeline.report.drawing import tree
from pipeline.report.health import symptoms
from pipeline.report.overview import HEADINGS, Overview, health_lines, metric_rows
from pipeline.report.tables import Cell
from pipeline.report.waits import HEADINGS as WAITS
from pipeline.report.waits import waits, waits_cells
from pipeline.run.run import Run
from pipeline.text import visible
from stages.sampling.sample_files import Row

SECONDS = 2.0  # between two looks at a run's files
Regrade = Callable[[str, Sequence[Row]], list[dict[str, Any]]]
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


class OverviewScreen(Screen[None]):
    """The health line, and a line of each stage: state, curve, speed, where its seconds go."""

    BINDINGS: ClassVar = [
        Binding("enter", "samples", "samples", priority=True),
        Binding("c", "metrics", "metrics"),
        Binding("w", "waits", "waits"),
    ]
    CSS = "#health { padding: 1 1 1 1; height: auto; } DataTable { height: 1fr; }"

    def __init__(self, run: Run, regrade: Regrade) -> None:
        super().__init__()
        self._run, self._regrade = run, regrade

    def compose(self) -> ComposeResult:
        """Yield the health, the table and the keys."""
        yield Static(id="health")
        yield DataTable(id="stages", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the table, and look again as long as it is shown."""
        self.sub_title = self._run.name
        self._table.add_columns(*HEADINGS)
        self._fill()
        self.set_interval(SECONDS, self._refresh)

    def _refresh(self) -> None:
        if self.app.screen is self:  # not while it is covered
            self._fill()

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#stages", DataTable)

    def _fill(self) -> None:
        found = Overview.of(self._run.refresh())
        health = symptoms(self._run, found.states, found.lines)
        lines = [text_of(each) for each in health_lines(health)]
        self.query_one("#health", Static).update(Text("\n").join(lines))
        row = self._table.cursor_row
        self._table.clear()
        for name, cells in found.rows():
            self._table.add_row(*map(text_of, cells), key=name)
        self._table.move_cursor(row=row)

    @property
    def _chosen(self) -> str:
        return list(tree(self._run.stages))[self._table.cursor_row]

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


class TableScreen(Screen[None]):
    """One table, kept current; `rows` gives it."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss", "back")]
    headings: tuple[str, ...] = ()

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def compose(self) -> ComposeResult:
        """Yield the table and the keys."""
        yield DataTable(cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the table, and look again as long as it is shown."""
        self.query_one(DataTable).add_columns(*self.headings)
        self._fill()
        self.set_interval(SECONDS, self._fill)

    def _fill(self) -> None:
        table: DataTable[Text] = self.query_one(DataTable)
        row = table.cursor_row
        table.clear()
        for cells in self.rows():
            table.add_row(*map(text_of, cells))
        table.move_cursor(row=row)

    def rows(self) -> list[list[str | Cell]]:
        """Return the cells of every row now."""
        raise NotImplementedError


class MetricsScreen(TableScreen):
    """Every metric of a stage: its curve, its values, and its healthy ones."""

    headings = METRIC_HEADINGS

    def __init__(self, run: Run, stage: str) -> None:
        super().__init__(run)
        self._stage = stage

    def rows(self) -> list[list[str | Cell]]:
        """Return a row for each metric."""
        return [*metric_rows(Overview.of(self._run.refresh()).lines[self._stage])]


class WaitsScreen(TableScreen):
    """Every process of what runs: its phase, whom it waits for, since when."""

    headings = WAITS

    def rows(self) -> list[list[str | Cell]]:
        """Return a row for each process."""
        run = self._run.refresh()
        return waits_cells(waits(run, Overview.of(run).states))
