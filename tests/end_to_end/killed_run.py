"""A run that is killed at given moments, and resumed each time that this has ended it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.files import whole_checkpoints
from tests.end_to_end.moments import Moment, StagePosition, position
from tests.end_to_end.process_tree import KILLED, everything, tree
from tests.runs import braid
from tests.warm_runs import WarmBraid

LOOK_SECONDS = 0.05
SPACING_SECONDS = 2.0  # between two kills, so that the launcher has noticed the first
LATE_SECONDS = 30.0  # that a kill may come after its moment, once its stage has ended
PATIENCE_SECONDS = 600.0  # from one step of a stage to the next
ENDING_SECONDS = 120.0  # that what a killed launcher had started may take to end


class Unclean(Exception):
    """A kill has ended the run otherwise than it should, or left something behind."""


@dataclass
class Kill:
    """A kill `seconds` after the run's start, `at` a stage's attempt and step.

    `saved` is the newest checkpoint's step, or 0; `outcome`: whether the attempt continued.
    """

    moment: Moment
    at: StagePosition
    saved: int
    seconds: float
    outcome: str = "unknown"


class KilledRun:
    """`braid` with the arguments `begin` in `directory`, and with `resume` as often as it takes.

    `warm` runs the command that is resumed after the last kill, if any, instead of a process.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        begin: Sequence[str],
        resume: Sequence[str],
        warm: WarmBraid | None = None,
    ) -> None:
        self.path = directory / name
        self.kills: list[Kill] = []
        self.resumed = 0
        self._directory = directory
        self._resume = resume
        self._warm = warm
        self._all_struck = False
        self._seen: set[tuple[int, int]] = set()  # number and start of the run's processes
        self._began = time.monotonic()
        self._next = self._began  # when the next kill may be
        self._here: StagePosition | None = None
        self._arrived = self._began  # when it got there
        self._unexplained: list[str] = []  # what was killed since the last command
        self._launched = self._launch(*begin)

    def kill(self, moment: Moment, order: Sequence[str]) -> Kill | None:
        """Kill a process at a moment, and return the kill; None where no such process is left.

        The kill comes earlier where this run reaches the next step sooner than the watched run did,
        and later where there is no such process yet. `order` is that of the run's stages.
        """
        wanted = (order.index(moment.stage), moment.step)
        due, within = math.inf, False
        while self._is_running():
            found, now = position(self.path), time.monotonic()
            here = (order.index(found.stage), found.step) if found else (-1, 0)
            if due == math.inf and here >= wanted:
                due, within = now + moment.seconds, here == wanted
            if (now >= due or (within and here > wanted)) and self._strike(moment):
                return self.kills[-1]
            if here[0] > wanted[0] and now > due + LATE_SECONDS:
                return None  # later stages may have no such process
            time.sleep(LOOK_SECONDS)
        return None

    def finish(self) -> None:
        """Wait for the run's end, and check what it left."""
        while self._is_running():
            time.sleep(LOOK_SECONDS)
        self._check_nothing_left()
        self._check_resumed_steps()
        self._set_outcomes()

    def kill_at(self, moments: Sequence[Moment], order: Sequence[str]) -> None:
        """Kill at every moment, wait for the run's end, and leave nothing running."""
        try:
            struck = [self.kill(moment, order) for moment in moments]
            self._all_struck = True
            self.finish()
        finally:
            self.close()
        assert all(struck), self.kills

    def output(self) -> str:
        """Return the output of the last command so far."""
        return self._log().read_text()

    def close(self) -> None:
        """Leave nothing running."""
        if self._launched.poll() is None:
            self._launched.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launched.wait(ENDING_SECONDS)
        self._launched.kill()
        self._launched.wait()

    def _launch(self, *arguments: str) -> subprocess.Popen[str]:
        self._directory.mkdir(parents=True, exist_ok=True)
        return braid(self._directory, *arguments, log=self._log())

    def _log(self) -> Path:
        return self._directory / f"braid_{self.resumed}.log"

    def _is_running(self) -> bool:
        """Return False at the run's end; resume the run where a kill ended it.

        Raises:
            Unclean: it ended in another way than it should, or nothing happens.
        """
        status = self._launched.poll()
        if status == 0:
            return False
        if status is not None:
            self._check_clean_end(status)
            self._check_nothing_left()
            self._unexplained = []
            self.resumed += 1
            if self._all_struck and self._warm is not None:
                self._log().write_text(self._warm(self._directory, *self._resume))
                return False
            self._launched = self._launch(*self._resume)
        here, now = position(self.path), time.monotonic()
        if here != self._here:
            self._here, self._arrived = here, now
        if now > self._arrived + PATIENCE_SECONDS:
            raise Unclean(f"nothing happened for {PATIENCE_SECONDS:g} s at {here}")
        return True

    def _strike(self, moment: Moment) -> bool:
        if time.monotonic() < self._next:
            return False
        alive = tree([self._launched.pid])
        self._seen |= {(each.number, each.started) for each in alive.values()}
        victims = sorted(KILLED[moment.process](alive), key=lambda each: each.number)
        at = position(self.path)
        if not victims or at is None:
            return False
        victim, saved = victims[int(moment.which * len(victims))], self._saved(at.stage)
        try:
            os.kill(victim.number, signal.SIGKILL)
        except ProcessLookupError:
            return False
        now = time.monotonic()
        self._next = now + SPACING_SECONDS
        self._unexplained.append(moment.process)
        self.kills.append(Kill(moment, at, saved, now - self._began))
        return True

    def _check_clean_end(self, status: int) -> None:
        output = self.output()
        if not self._unexplained:
            raise Unclean(f"it ended though nothing was killed, with status {status}:\n{output}")
        if status == -signal.SIGKILL and "launcher" in self._unexplained:
            return
        own_words = "\n".join(line for line in output.splitlines() if not line.startswith("    |"))
        explained = "braid resume" in own_words and "Traceback" not in own_words
        if status != 1 or not explained:
            killed = ", ".join(self._unexplained)
            raise Unclean(f"killed: {killed}; it ended with status {status}:\n{output}")

    def _saved(self, stage: str) -> int:
        whole = whole_checkpoints(self.path / "stages" / stage / "checkpoints")
        return whole[-1].step if whole else 0

    def _check_resumed_steps(self) -> None:
        """Check that attempts continue from the newest checkpoint, and no done stage reruns."""
        done: set[str] = set()
        causes: dict[tuple[str, int], str] = {}
        for event in self._events():
            if event["state"] == "running" and event["stage"] in done:
                raise Unclean(f"{event['stage']} was done, and is repeated")
            if event["state"] == "running":
                causes.setdefault((event["stage"], event["attempt"]), event["cause"])
            if event["state"] == "done":
                done.add(event["stage"])
        for kill in self.kills:
            cause = causes.get((kill.at.stage, kill.at.attempt + 1), "")
            step = int(cause.removeprefix("from step ")) if cause.startswith("from step ") else 0
            if cause and step < kill.saved:
                raise Unclean(f"{kill.at.stage} had saved step {kill.saved}, and continued {cause}")

    def _set_outcomes(self) -> None:
        ended = {
            (event["stage"], event["attempt"]): event["state"]
            for event in self._events()
            if event["state"] in ("done", "failed")
        }
        for kill in self.kills:
            done = ended.get((kill.at.stage, kill.at.attempt)) == "done"
            kill.outcome = "continued" if done and kill.moment.process != "launcher" else "resumed"

    def _events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "ledger.jsonl").read_text().splitlines()]

    def _check_nothing_left(self) -> None:
        """Check that every process of the run ends with it."""
        deadline = time.monotonic() + ENDING_SECONDS
        while left := [
            each
            for each in everything().values()
            if (each.number, each.started) in self._seen
            or any(f"{self.path}/" in argument for argument in each.arguments)
        ]:
            if time.monotonic() > deadline:
                raise Unclean(f"left behind: {[each.arguments for each in left]}")
            time.sleep(LOOK_SECONDS)
