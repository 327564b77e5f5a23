"""The walks of docs/architecture.md: the code that runs on two ways through the floors, traced.

`python -m tools.walks` prints the table; `python -m tools.walks WALK` a walk's files, each with the
number of its functions that ran. Every function of the floors counts that is called between the
walk's begin and its end, in any thread, also while a module is imported. Each walk is traced in a
process of its own, so that no import is already made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.structure import FLOORS, REPOSITORY

OPTIMIZED = 0x2  # the flag of a function's code; bodies of modules and classes lack it
TRACED_STEP = "tests/stages/test_expert.py::test_the_kl_coefficient_is_controlled_and_resumed"


@dataclass(frozen=True)
class Walk:
    """The functions that ran: (file, qualified name).

    Example: a method and two functions in two files.
        >>> walk = Walk([("stages/loop.py", "Loop.run"), ("stages/loop.py", "save"), ("a.py", "b")])
        >>> len(walk.files), len(walk.functions), len(walk.classes)
        (2, 3, 1)
    """

    functions: list[tuple[str, str]]

    @property
    def files(self) -> Mapping[str, int]:
        """The number of functions of each file, the most first."""
        return dict(Counter(file for file, _ in self.functions).most_common())

    @property
    def classes(self) -> set[tuple[str, str]]:
        """The classes whose methods ran."""
        methods = ((file, name.rpartition(".")[0]) for file, name in self.functions)
        return {(file, owner) for file, owner in methods if owner and "<locals>" not in owner}


class Tracer:
    """A profile function that records the functions of the floors."""

    def __init__(self, root: Path = REPOSITORY) -> None:
        self._prefixes = tuple(f"{root / floor}/" for floor in FLOORS)
        self._root = len(f"{root}/")
        # By identity: equal functions of two files have equal codes.
        self._codes: dict[int, CodeType] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._codes[id(frame.f_code)] = frame.f_code

    def start(self) -> None:
        """Record from now on, in this thread and in those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> Walk:
        """Stop recording; return what ran."""
        sys.setprofile(None)
        threading.setprofile(None)
        functions = {
            (code.co_filename[self._root :], code.co_qualname)
            for code in self._codes.values()
            if code.co_filename.startswith(self._prefixes)
            and code.co_flags & OPTIMIZED
            and not code.co_name.startswith("<")
        }
        return Walk(sorted(functions))


def dry_run() -> Walk:
    """Trace `braid run configs/quickstart.yaml --dry-run`, with the imports of its commands."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as runs:
        tracer.start()
        from pipeline.cli import main

        config = REPOSITORY / "configs" / "quickstart.yaml"
        main(["run", str(config), "--dry-run", "--runs-dir", runs])
        return tracer.stop()


def grpo_step() -> Walk:
    """Trace the first GRPO step of a test: fake engines, the rest real, one rank.

    Raises:
        RuntimeError: the test did not reach its first step.
    """
    import pytest

    from stages.sampling.step import OnPolicyStage

    walks: list[Walk] = []
    step = OnPolicyStage.step

    def traced(stage: OnPolicyStage, number: int) -> dict[str, float]:
        if walks:
            return step(stage, number)
        tracer = Tracer()
        tracer.start()
        try:
            return step(stage, number)
        finally:
            walks.append(tracer.stop())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnPolicyStage, "step", traced)
        pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(REPOSITORY), TRACED_STEP])
    if not walks:
        raise RuntimeError(f"{TRACED_STEP} ran no step of a GRPO stage")
    return walks[0]


WALKS: dict[str, tuple[str, Callable[[], Walk]]] = {
    "dry-run": ("`braid run configs/quickstart.yaml --dry-run`", dry_run),
    "grpo-step": ("one GRPO step, from prompts to the weight sync", grpo_step),
}


def traced_apart(walk: str) -> Walk:
    """Trace a walk in a fresh process.

    Raises:
        subprocess.CalledProcessError: it failed; its output is on standard error.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tools.walks", "--here", walk]
    process = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return Walk([(file, name) for file, name in json.loads(process.stdout.splitlines()[-1])])


def table() -> str:
    """Return the table of docs/architecture.md."""
    lines = ["| walk | files | functions | classes |", "|---|---:|---:|---:|"]
    for name, (title, _) in WALKS.items():
        walk = traced_apart(name)
        numbers = (len(walk.files), len(walk.functions), len(walk.classes))
        lines.append(f"| {title} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walk", nargs="?", choices=WALKS, help="print this walk's files")
    parser.add_argument("--here", choices=WALKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        walk = WALKS[options.here][1]()
        print("\n" + json.dumps(walk.functions))
    elif options.walk:
        files = traced_apart(options.walk).files
        print(*(f"{count:4} {file}" for file, count in files.items()), sep="\n")
    else:
        print(table())
