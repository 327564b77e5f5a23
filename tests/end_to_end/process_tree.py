"""The processes of one run, found by their parents, and the role of each.

A name alone does not find them: other runs may be on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class TreeProcess:
    """A process, by number and start: clock ticks since boot, since numbers are reused."""

    number: int
    parent: int
    started: int
    arguments: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """The process's environment."""
        text = Path(f"/proc/{self.number}/environ").read_bytes().decode(errors="replace")
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


Tree = dict[int, TreeProcess]
Finder = Callable[[Tree], list[TreeProcess]]


def everything() -> Tree:
    """Return all live processes of this machine by number."""
    found = (_read(entry) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {process.number: process for process in found if process is not None}


def tree(roots: Iterable[int]) -> Tree:
    """Return the processes `roots` and all their descendants."""
    alive = everything()
    children: dict[int, list[int]] = {}
    for process in alive.values():
        children.setdefault(process.parent, []).append(process.number)
    found: Tree = {}
    waiting = [number for number in roots if number in alive]
    while waiting:
        number = waiting.pop()
        found[number] = alive[number]
        waiting += children.get(number, [])
    return found


def _read(entry: Path) -> TreeProcess | None:
    try:
        # The name, in parentheses, may hold anything.
        state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
        # A forked rank has set its title, which is one argument to the kernel.
        titled = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
        arguments = titled.split("\0") if "\0" in titled else titled.split(" ")
    except OSError:  # it has just ended
        return None
    if state in "ZX":
        return None
    return TreeProcess(int(entry.name), int(parent), int(rest[17]), tuple(arguments))


def _of(module: str) -> Finder:
    """Return a finder of a module's processes, without the copies of themselves that they fork."""

    def find(tree: Tree) -> list[TreeProcess]:
        return [each for each in tree.values() if _runs(each, module) and not _forked(each, tree)]

    return find


def _rank(number: int) -> Finder:
    ranks = _of("stages.main")

    def is_it(rank: TreeProcess) -> bool:
        # A forked rank shows the environment of its fork server.
        return _variable(rank, "RANK") == str(number) or _log(rank) == f"rank_{number}.log"

    return lambda tree: [each for each in ranks(tree) if is_it(each)]


def _engine_children(tree: Tree) -> list[TreeProcess]:
    engines = {each.number for each in _of("parallel.engine.server")(tree)}
    return [each for each in tree.values() if each.parent in engines]


def _workers(tree: Tree) -> list[TreeProcess]:
    nursery = "stages.rewards.forkserver"
    return [each for each in tree.values() if _runs(each, nursery) and _forked(each, tree)]


def _runs(process: TreeProcess, module: str) -> bool:
    return ("-m", module) in pairwise(process.arguments)


def _forked(process: TreeProcess, tree: Tree) -> bool:
    parent = tree.get(process.parent)
    return parent is not None and parent.arguments == process.arguments


def _variable(process: TreeProcess, name: str) -> str | None:
    try:
        return process.variables.get(name)
    except OSError:  # it has just ended
        return None


def _log(process: TreeProcess) -> str | None:
    try:
        return Path(f"/proc/{process.number}/fd/1").readlink().name
    except OSError:
        return None


# What may be killed. A finder is given the processes below the launcher, and below whatever else
# the run was started with.
KILLED: dict[str, Finder] = {
    "launcher": _of("pipeline.cli"),
    "fork server": _of("parallel.machine.forkserver"),
    "rank 0": _rank(0),
    "rank 1": _rank(1),
    "engine": _of("parallel.engine.server"),
    "engine's child": _engine_children,
    "reward nursery": _of("stages.rewards.forkserver"),
    "reward worker": _workers,
}
