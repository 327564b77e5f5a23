"""What a person sees while a stage runs: a live line on a terminal, else a line now and then."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

LIVE_SECONDS = 0.25
PLAIN_SECONDS = 10.0
SHOWN_METRICS = ("reward", "loss")


class MetricsTail:
    """The new lines of a growing metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Whole lines since the last call."""
        if not self._path.exists():
            return []
        # A resumed stage may cut off the lines after its checkpoint.
        self._offset = min(self._offset, self._path.stat().st_size)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [parsed for line in whole.split(b"\n") if (parsed := _parse(line)) is not None]


@dataclass
class Progress:
    """Where a stage stands, from its metrics."""

    started: float
    steps: int | None
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Take in one line of metrics; evaluation starts over with every model."""
        same = self.first is not None and line.get("model") == self.first.get("model")
        self.first = self.first if same else line
        self.last = line
        self.steps = line.get("steps", self.steps)

    @property
    def step(self) -> int:
        return int(self.last["step"]) if self.last else 0

    @property
    def seconds_left(self) -> float | None:
        """At the pace since the first step seen."""
        if not (self.first and self.last and self.steps) or self.last["step"] <= self.first["step"]:
            return None
        pace = (self.last["time"] - self.first["time"]) / (self.last["step"] - self.first["step"])
        return float(pace * (self.steps - self.last["step"]))

    def describe(self) -> str:
        """The step, the time left and the newest values, in words."""
        if self.last is None:
            return f"starting ({time.monotonic() - self.started:.0f} s)"
        parts = [f"step {self.step}/{self.steps}"]
        if "model" in self.last:
            parts.insert(0, str(self.last["model"]))
        if self.seconds_left is not None:
            parts.append(f"{clock(self.seconds_left)} left")
        parts += [f"{name} {self.last[name]:.4g}" for name in SHOWN_METRICS if name in self.last]
        return "  ".join(parts)


class Display:
    """Shows the stages of a run as they go by."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._steps: int | None = None
        self._tail: MetricsTail | None = None
        self._progress = Progress(0.0, None)
        self._live: Live | None = None
        self._next = 0.0

    def stage(self, name: str, number: int, total: int, steps: int | None) -> None:
        """Announce the stage that `watching` will follow."""
        self._title = f"[{number}/{total}] {name}"
        self._steps = steps

    @contextmanager
    def watching(self, metrics: Path) -> Iterator[None]:
        """Follow a stage's metrics; on leaving, say how long it took."""
        self._tail = MetricsTail(metrics)
        self._progress = Progress(time.monotonic(), self._steps)
        self._next = 0.0
        if self._console.is_terminal:
            # No refresh thread: children may be started only from a process with one thread.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        try:
            yield
            self.poll()
            self._say(f"done in {clock(time.monotonic() - self._progress.started)}")
        finally:
            if self._live:
                self._live.stop()
                self._live = None

    def poll(self) -> None:
        """Take in what the stage wrote, and show it if it is time to."""
        for line in self._tail.read() if self._tail else ():
            self._progress.add(line)
        if time.monotonic() < self._next:
            return
        if self._live:
            self._next = time.monotonic() + LIVE_SECONDS
            self._live.update(self._line(), refresh=True)
        else:
            self._next = time.monotonic() + PLAIN_SECONDS
            self._say(self._progress.describe())

    def _say(self, text: str) -> None:
        self._console.print(f"{self._title}  {text}", markup=False, highlight=False)

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._progress.steps or 1, completed=self._progress.step, width=24)
        line.add_row(self._title.replace("[", r"\["), bar, self._progress.describe())
        return line


def clock(seconds: float) -> str:
    """A duration as a person says it: `48 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and {"step", "time"} <= parsed.keys() else None
