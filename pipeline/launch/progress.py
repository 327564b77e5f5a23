"""The progress display of running stages: a live line on a terminal, else a periodic line."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.run.metrics import LABELS, Line, MetricsTail, newest_lines
from pipeline.text import clock

LIVE_SECONDS = 0.25
PLAIN_SECONDS = 10.0
REPEAT_SECONDS = 60.0  # between equal lines: one now and then shows that the launcher lives
CLOCKS_DIFFER_SECONDS = 1.0  # at most, between this machine and the file system
LATEST_BYTES = 1 << 15
# On-policy, the loss of a policy gradient is about 0 by construction.
OF_REWARDED, OF_OTHERS = ("reward", "entropy", "teacher_kl"), ("loss",)
ACCURACY = "accuracy"


@dataclass
class Progress:
    """The progress of a stage, from its metrics."""

    started: float
    steps: int | None
    first: Line | None = None
    last: Line | None = None
    step: int = 0

    def add(self, line: Line) -> None:
        """Add one line of metrics."""
        self.first = self.first or line
        self.last, self.step = line, int(line["step"])
        self.steps = line.get("steps", self.steps)

    @property
    def seconds_left(self) -> float | None:
        """The time left at the pace since the first step seen.

        None before there are two steps, and after the clock was set back.
        """
        if not (self.first and self.last and self.steps) or self.last["step"] <= self.first["step"]:
            return None
        pace = (self.last["time"] - self.first["time"]) / (self.last["step"] - self.first["step"])
        left = float(pace * (self.steps - self.last["step"]))
        # A damaged line may have times whose difference overflows.
        return left if pace >= 0 and math.isfinite(left) else None

    def describe(self, awaited: str = "the first step") -> str:
        """Return the step, the time left and the newest values; before those, what is `awaited`."""
        if self.last is None:
            return f"starting: {awaited} ({time.monotonic() - self.started:.0f} s)"
        labels = [self.last[name] for name in LABELS if name in self.last]
        unit = "problem" if labels else "step"  # an evaluation counts problems
        columns = [f"{unit} {self.step}/{self.steps}", *labels]
        if self.step == self.steps:
            # A checkpoint may take minutes; an evaluation writes one small file.
            columns += [] if labels else [f"saving step {self.step}"]
        elif self.seconds_left is not None:
            columns.append(f"{clock(self.seconds_left)} left")
        return "  ".join([*columns, *self._values(self.last)])

    def result(self) -> str:
        """Return the last step of a finished stage and its values; nothing for an evaluation."""
        if self.last is None or any(name in self.last for name in LABELS):
            return ""
        return "  ".join([f"  step {self.step}/{self.steps}", *self._values(self.last)])

    def _values(self, line: Line) -> Iterator[str]:
        for name in OF_REWARDED if "reward" in line else OF_OTHERS:
            if name in line:
                yield f"{name} {line[name]:.4g}"
        if "kept" in line:
            yield f"kept {line['kept']:.0f} of {line['drawn']:.0f}"
        if ACCURACY in line:
            yield f"{ACCURACY} {100 * line[ACCURACY]:.1f} %"


class StageView:
    """The display of one running stage."""

    def __init__(self, screen: Screen, title: str, steps: int | None, metrics: Path) -> None:
        self._screen = screen
        self._title = title
        self._metrics = metrics
        self._start_time = time.time()
        self._engines: Sequence[Path] = ()
        self._tail = MetricsTail(metrics)
        self.started = time.monotonic()
        self._progress = Progress(self.started, steps)
        self._next = 0.0
        self._last_text, self._repeat = "", 0.0

    def expect(self, engines: Sequence[Path]) -> None:
        """Set the address files that the stage's engines write when they are ready."""
        self._engines = engines

    def poll(self) -> None:
        """Read the stage's new metrics, and show them when the next update is due."""
        self._read()
        if time.monotonic() < self._next:
            return
        if self._screen.redraw():
            self._next = time.monotonic() + LIVE_SECONDS
        else:
            self._next = time.monotonic() + PLAIN_SECONDS
            self._say_progress()

    def _say_progress(self) -> None:
        text, now = self._progress.describe(self._awaited()), time.monotonic()
        if text != self._last_text or now >= self._repeat:
            self._last_text, self._repeat = text, now + REPEAT_SECONDS
            self.say(text)

    def finish(self) -> None:
        """Print how long the stage took, and its last values."""
        self._read()
        self.say(f"done in {clock(time.monotonic() - self.started)}{self._progress.result()}")

    def _read(self) -> None:
        for line in self._tail.read():
            self._progress.add(line)

    def say(self, text: str) -> None:
        """Print a permanent line about the stage."""
        self._screen.say(f"{self._title}  {text}")

    def line(self) -> Table:
        """Return the stage's line of the screen."""
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._progress.steps or 1, completed=self._progress.step, width=24)
        line.add_row(Text(self._title), bar, Text(self._progress.describe(self._awaited())))
        return line

    def _awaited(self) -> str:
        """Return what a stage without metrics yet waits for."""
        # A stage touches its metrics file when it has loaded its model.
        touched = self._metrics.stat().st_mtime if self._metrics.exists() else 0.0
        ready = sum(address.exists() for address in self._engines)
        pending = [] if touched >= self._start_time - CLOCKS_DIFFER_SECONDS else ["the ranks load"]
        if ready < len(self._engines):
            pending.append(f"{ready} of {len(self._engines)} engines ready")
        return ", ".join(pending) or f"the first {'rollout' if self._engines else 'step'}"


class Screen:
    """A context in which stages are shown; on a terminal each has one live line."""

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

    def __exit__(self, *_: object) -> None:
        if self._live:
            with suppress(OSError):
                self._live.stop()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        try:  # a lost terminal must not end the stage
            self.console.print(line, markup=False, highlight=False)
        except OSError:
            self.console.quiet = True

    @contextmanager
    def watching(self, title: str, steps: int | None, metrics: Path) -> Iterator[StageView]:
        """Show a stage while it runs, and its duration and last values if it succeeds."""
        view = StageView(self, title, steps, metrics)
        self._views.append(view)
        try:
            yield view
        finally:
            self._views.remove(view)
        view.finish()

    def redraw(self) -> bool:
        """Redraw every stage's line; return whether the output is a terminal."""
        if self._live is None:
            return False
        try:
            self._live.update(Group(*(view.line() for view in self._views)), refresh=True)
        except OSError:
            self.console.quiet = True
        return True


def latest(metrics: Path) -> str:
    """Return a running stage's progress in words, from the last lines of its metrics."""
    progress = Progress(time.monotonic(), None)
    for line in newest_lines(metrics, LATEST_BYTES):
        progress.add(line)
    return progress.describe() if progress.last else "starting"
