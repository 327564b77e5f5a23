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

    def count(self, number: int) -> int:
        """How often this one came."""
        return self._received.count(number)

    def check(self) -> None:
        """Raises Stopped when one came; who asks to stop goes before time that is up."""
        for number in sorted(self._received, key=lambda number: number == TIME_IS_UP):
            raise Stopped(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
