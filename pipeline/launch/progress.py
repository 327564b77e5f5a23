"""What a person sees while a stage runs: a live line on a terminal, else a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.run.metrics import LABELS, Line, MetricsTail, newest_lines
from pipeline.text import clock

LIVE_SECONDS = 0.25
PLAIN_SECONDS = 10.0
CLOCKS_DIFFER_SECONDS = 1.0  # ours from that of the files, at most
LATEST_BYTES = 1 << 15
SHOWN_METRICS = ("reward", "loss")
ACCURACY = "accuracy"


@dataclass
class Progress:
    """Where a stage stands, from its metrics."""

    started: float
    steps: int | None
    first: Line | None = None
    last: Line | None = None

    def add(self, line: Line) -> None:
        """Take in one line of metrics."""
        self.first = self.first or line
        self.last = line
        self.steps = line.get("steps", self.steps)

    @property
    def step(self) -> int:
        return int(self.last["step"]) if self.last else 0

    @property
    def seconds_left(self) -> float | None:
        """At the pace since the first step seen; None before there is one, or after the clock was
        set back."""
        if not (self.first and self.last and self.steps) or self.last["step"] <= self.first["step"]:
            return None
        pace = (self.last["time"] - self.first["time"]) / (self.last["step"] - self.first["step"])
        left = float(pace * (self.steps - self.last["step"]))
        # Not finite where the times lie further apart than a float reaches.
        return left if pace >= 0 and math.isfinite(left) else None

    def describe(self, awaited: str = "the first step") -> str:
        """The step, the time left and the newest values, in words; before there are any, what is
        waited for."""
        if self.last is None:
            return f"starting: {awaited} ({time.monotonic() - self.started:.0f} s)"
        labels = [self.last[name] for name in LABELS if name in self.last]
        unit = "problem" if labels else "step"  # a measurement counts what it has asked
        parts = [f"{unit} {self.step}/{self.steps}", *labels]
        if self.step == self.steps:
            # Its checkpoint may take minutes; a measurement leaves next to nothing.
            parts += [] if labels else [f"saving step {self.step}"]
        elif self.seconds_left is not None:
            parts.append(f"{clock(self.seconds_left)} left")
        parts += [f"{name} {self.last[name]:.4g}" for name in SHOWN_METRICS if name in self.last]
        if ACCURACY in self.last:
            parts.append(f"{ACCURACY} {100 * self.last[ACCURACY]:.1f} %")
        return "  ".join(parts)


class StageView:
    """One stage as it goes by."""

    def __init__(self, screen: Screen, title: str, steps: int | None, metrics: Path) -> None:
        self._screen = screen
        self._title = title
        self._metrics = metrics
        self._begun = time.time()
        self._engines: Sequence[Path] = ()
        self._tail = MetricsTail(metrics)
        self._progress = Progress(time.monotonic(), steps)
        self._next = 0.0

    def expect(self, engines: Sequence[Path]) -> None:
        """Name the files that the engines, which the stage samples from, write when they are
        ready."""
        self._engines = engines

    def poll(self) -> None:
        """Take in what the stage wrote, and show it if it is time to."""
        for line in self._tail.read():
            self._progress.add(line)
        if time.monotonic() < self._next:
            return
        if self._screen.redraw():
            self._next = time.monotonic() + LIVE_SECONDS
        else:
            self._next = time.monotonic() + PLAIN_SECONDS
            self.say(self._progress.describe(self._awaited()))

    def say(self, text: str) -> None:
        """Print a line about the stage that stays."""
        self._screen.say(f"{self._title}  {text}")

    def say_done(self) -> None:
        """Print how long the stage took."""
        self.say(f"done in {clock(time.monotonic() - self._progress.started)}")

    def line(self) -> Table:
        """Its line of the screen."""
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._progress.steps or 1, completed=self._progress.step, width=24)
        line.add_row(Text(self._title), bar, Text(self._progress.describe(self._awaited())))
        return line

    def _awaited(self) -> str:
        """What a stage without a line of metrics is at. It touches their file when it has loaded
        its model."""
        touched = self._metrics.stat().st_mtime if self._metrics.exists() else 0.0
        ready = sum(address.exists() for address in self._engines)
        parts = [] if touched >= self._begun - CLOCKS_DIFFER_SECONDS else ["the ranks load"]
        if ready < len(self._engines):
            parts.append(f"{ready} of {len(self._engines)} engines ready")
        return ", ".join(parts) or f"the first {'rollout' if self._engines else 'step'}"


class Screen:
    """Context in which stages are shown: on a terminal, a line for each that it redraws."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._views: list[StageView] = []
        # No refresh thread: children may be started only from a process with one thread.
        live = Live(console=console, auto_refresh=False, transient=True)
        self._live = live if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            with suppress(OSError):
                self._live.stop()

    def say(self, line: str) -> None:
        """Print a line that stays. A terminal that is gone is no reason to end a stage."""
        try:
            self.console.print(line, markup=False, highlight=False)
        except OSError:
            self.console.quiet = True

    @contextmanager
    def watching(self, title: str, steps: int | None, metrics: Path) -> Iterator[StageView]:
        """Show a stage while it runs, and how long it took if it ends well."""
        view = StageView(self, title, steps, metrics)
        self._views.append(view)
        try:
            yield view
        finally:
            self._views.remove(view)
        view.say_done()

    def redraw(self) -> bool:
        """Draw every stage's line anew; returns whether there is a terminal for it."""
        if self._live is None:
            return False
        try:
            self._live.update(Group(*(view.line() for view in self._views)), refresh=True)
        except OSError:
            self.console.quiet = True
        return True


@contextmanager
def watching(console: Console, title: str, steps: int | None, metrics: Path) -> Iterator[StageView]:
    """Show a single stage."""
    with Screen(console) as screen, screen.watching(title, steps, metrics) as view:
        yield view


def latest(metrics: Path) -> str:
    """Where a running stage stands, from the last lines of its metrics, however many there are."""
    progress = Progress(time.monotonic(), None)
    for line in newest_lines(metrics, LATEST_BYTES):
        progress.add(line)
    return progress.describe() if progress.last else "starting"
