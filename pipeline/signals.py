"""The signals that ask a launcher to stop, noted until it is at a place where it can."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from pipeline.errors import BraidError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIME_IS_UP = signal.SIGUSR1  # what `--signal=B:USR1@...` has Slurm send before the walltime ends


class Stopped(BraidError):
    """A signal asked the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number


class Signals:
    """Context in which signals that ask to stop are only noted: an exception from a handler could
    fall between starting a process and remembering it."""

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Any] = {}
        self._received: list[int] = []

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def count(self) -> int:
        """How many came."""
        return len(self._received)

    def check(self) -> None:
        """Raises Stopped when one came."""
        if self._received:
            raise Stopped(self._received[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
