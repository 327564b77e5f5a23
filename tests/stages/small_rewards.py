"""Rewards that workers import: quick to load, and wrong in every way that a reward can be."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from stages.data.problem import Problem
from stages.rewards.reward import Steps


def length(problem: Problem, response: str) -> float:
    return float(len(response))


def characters(problem: Problem, response: str) -> float:
    """Practically no two responses are equal."""
    return sum(map(ord, response)) / 1000


def parity(problem: Problem, response: str) -> float:
    """Some groups are flat."""
    return float(len(response) % 2)


def parity_or_failure(problem: Problem, response: str) -> float:
    """1 or none at all."""
    if parity(problem, response) == 0:
        raise ZeroDivisionError(response)
    return 1.0


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def does(problem: Problem, response: str) -> Any:
    """Do what the response says."""
    what, _, rest = response.partition(" ")
    if what == "raise":
        raise ZeroDivisionError(rest)
    if what == "much":
        raise ZeroDivisionError("x" * int(rest))
    if what == "mute":
        raise Mute
    if what == "print":
        print("x" * int(rest))
    if what == "exit":
        sys.exit(rest)
    if what == "die":
        os._exit(int(rest))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(1000)
    if what == "child":  # hangs in a process of its own, whose number it leaves behind
        Path(rest).write_text(str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")))
        time.sleep(1000)
    if what == "daemon":  # leaves behind what has left it
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(rest).write_text(str(os.getpid()))
                time.sleep(1000)
            os._exit(0)
        return 1.0
    if what == "fork":  # both return
        os.fork()
    if what == "spin":
        while True:
            pass
    if what == "eat":
        return float(len("x" * (1 << 36)))
    if what == "reserve":
        return float(len(bytearray(int(rest))))
    if what == "sleep":
        time.sleep(float(rest))
        return float(rest)
    if what == "meet":  # waits for seven others in the same directory
        Path(rest).touch()
        while len(list(Path(rest).parent.iterdir())) < 8:
            time.sleep(0.01)
        return 8.0
    if what == "modules":
        return float(rest in sys.modules)
    strange = {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "huge": 1e308}
    return strange[what] if what in strange else float(len(response))


def notes(problem: Problem, response: str) -> float:
    """Return the number of calls with this problem, which it counts in the problem's fields."""
    seen: Any = problem.fields
    seen["calls"] = seen.get("calls", 0) + 1
    return float(seen["calls"])


def lines(problem: Problem, response: str) -> Steps:
    """Return one step for each line, whose reward is its length."""
    ends = [place + 1 for place, character in enumerate(response) if character == ","]
    ends.append(len(response))
    starts = [0, *ends[:-1]]
    return Steps(ends, [float(end - start) for start, end in zip(starts, ends, strict=True)])


def lost(problem: Problem, response: str) -> Steps:
    return Steps([1, 3], [1.0, float("nan")])


def backwards(problem: Problem, response: str) -> Steps:
    return Steps([2, 1], [0.0, 0.0])


def explained_parity(problem: Problem, response: str) -> tuple[float, str]:
    """Parity, with the number of characters."""
    return parity(problem, response), f"{len(response)} characters"


def half_a_pair(problem: Problem, response: str) -> tuple[float, str]:
    return 1.0, "half a pair: \ud83d"


def raises_half_a_pair(problem: Problem, response: str) -> float:
    class Strange(Exception):
        def __repr__(self) -> str:
            return "half a pair: \ud83d"

    raise Strange


def talkative(_problem: Problem, _response: str) -> tuple[float, str]:
    return 1.0, "x" * 5000


def silent(_problem: Problem, _response: str) -> tuple[float, str]:
    return 1.0, ""


def three_values(_problem: Problem, _response: str) -> tuple[float, str, str]:
    return 1.0, "a", "b"


def two_numbers(_problem: Problem, _response: str) -> tuple[float, float]:
    return 1.0, 2.0
