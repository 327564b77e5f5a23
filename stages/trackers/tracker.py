"""The trackers of a stage: what each one must take, and how their failures are kept from training.

metrics.jsonl and the recorded samples have everything; a tracker is a copy for who likes to look at
it there. So one that cannot start, dies or hangs is named once and left out.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from parallel.errors import report_notice
from parallel.files import Checkpoint
from stages.metric_definitions import panel_of
from stages.sampling.sample_files import Row, read_samples

# The module and the class of each; a module is imported once it is wanted.
TRACKERS = {
    "wandb": ("stages.trackers.weights_and_biases", "WeightsAndBiases"),
    "tensorboard": ("stages.trackers.tensor_board", "TensorBoard"),
    "trackio": ("stages.trackers.local_trackio", "Trackio"),
}
CLOSE_SECONDS = 60.0  # that a stage waits for its trackers at its end
MOST_WAITING = 1000  # messages that a tracker has not taken yet
ROWS = 16  # samples of a checkpoint's step that are sent
COLUMNS = (
    *("step", "domain", "problem", "prompt", "response", "reward", "solved", "advantage"),
    *("finish_reason", "staleness"),
)


@dataclass(frozen=True)
class TrackedStage:
    """A stage as a tracker is given it; `settings` are the run's, as JSON."""

    run: str
    stage: str
    id: str  # under which it is resumed
    directory: Path
    project: str
    online: bool
    settings: Mapping[str, Any]


class Tracker(ABC):
    """A stage's run in a tracker; opened again under the same id when the stage is resumed."""

    @abstractmethod
    def __init__(self, stage: TrackedStage) -> None: ...

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's metrics, by `key`."""

    @abstractmethod
    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Take some samples of a step, of COLUMNS."""

    @abstractmethod
    def checkpoint(self, saved: Checkpoint, parents: Mapping[str, str]) -> None:
        """Take a checkpoint's lineage: its digest, and its parents' digests by their names."""

    @abstractmethod
    def close(self) -> None:
        """Flush everything and end the run."""


Send = Callable[[Tracker], None]


class Trackers:
    """All trackers of a stage. Each works in a thread of its own, which no step waits for."""

    def __init__(self, names: Sequence[str], stage: TrackedStage) -> None:
        self._workers = [_TrackerThread(name, stage) for name in dict.fromkeys(names)]

    def metrics(self, step: int, metrics: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Send a step's metrics; `labels` are the model and the domain of an evaluation's."""
        values = {key(name, labels): value for name, value in metrics.items()}
        self._send_to_all(lambda tracker: tracker.metrics(step, values))

    def checkpoint(self, saved: Checkpoint, parents: Mapping[str, str], samples: Path) -> None:
        """Send a checkpoint's lineage, and some of the samples of its step, where it has a file."""

        def send(tracker: Tracker) -> None:
            # Read in the tracker's thread: no step waits for the file.
            rows = read_samples(samples, COLUMNS) if samples.exists() else []
            if some := rows[:: -(-len(rows) // ROWS) or 1]:
                tracker.samples(saved.step, some)
            tracker.checkpoint(saved, parents)

        self._send_to_all(send)

    def close(self) -> None:
        """Let all of them end, for CLOSE_SECONDS at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        # All are asked before any is waited for, so that one deadline serves all.
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.say(f"did not end in {CLOSE_SECONDS:g} s")
        self._workers = []

    def _send_to_all(self, send: Send) -> None:
        for worker in self._workers:
            worker.send(send)


class _TrackerThread(Thread):
    """The thread of a tracker: it starts it, and hands it what is sent, in order."""

    def __init__(self, name: str, stage: TrackedStage) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)  # a hung one must not keep a process
        self._tracker_name, self._stage = name, stage
        self._queue: Queue[Send | None] = Queue(MOST_WAITING)
        self._lost = False
        self.start()

    def send(self, send: Send) -> None:
        """Hand it on; a tracker that falls far behind is left out."""
        if self._lost:
            return
        try:
            # Never a wait: a tracker without a network would hold up training.
            self._queue.put_nowait(send)
        except Full:
            self._lost = True
            self.say(f"is {MOST_WAITING} messages behind")

    def end(self) -> None:
        """Let it close the tracker once it has handed on everything."""
        with suppress(Full):
            self._queue.put_nowait(None)

    def say(self, what: str) -> None:
        """Report what is wrong with the tracker."""
        report_notice(
            f"{self._stage.stage} logs no more to {self._tracker_name}, which {what};"
            f" {self._stage.directory / 'metrics.jsonl'} has everything"
        )

    def run(self) -> None:
        """Start the tracker, and serve it until the end or its first error."""
        tracker = None
        try:
            tracker = _start(self._tracker_name, self._stage)
            while (send := self._queue.get()) is not None:
                send(tracker)
            tracker.close()
        except Exception as error:  # whatever a tracker raises, training does not depend on it
            self._lost = True
            self.say(f"failed: {error!r}")
            if tracker is not None:
                with suppress(Exception):  # keep what it has taken
                    tracker.close()


def _start(name: str, stage: TrackedStage) -> Tracker:
    module, class_name = TRACKERS[name]
    tracker: Tracker = getattr(import_module(module), class_name)(stage)
    return tracker


def key(name: str, labels: Mapping[str, str]) -> str:
    """Return a metric's key in a tracker, which groups by what is before the first slash."""
    if labels:
        about = [labels[label] for label in ("domain", "model") if label in labels]
        return "/".join(["evaluation", *about, name])
    return f"{panel_of(name)}/{name}"
