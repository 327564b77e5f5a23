"""What `braid run` would do with the options it is given, told without doing any of it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from pipeline.launch.launcher import Programs
from pipeline.launch.runner import engine_folders
from pipeline.report import tables as report
from pipeline.report.estimate import Estimate, estimate
from pipeline.report.memory import largest_memory
from pipeline.report.outlook import held, what_follows
from pipeline.run.directory import EngineDirectory, RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.ledger import Ledger, took
from pipeline.run.selection import as_found, chosen, following
from pipeline.run.stale import StaleStages, stale_among
from pipeline.run.states import StageState
from stages.settings import RunSettings


class DryRun:
    """A run as the command would find it: with the stages `taken` from another one, each with what
    the ledger would say of it, those made `anew` put aside, and `only` some asked for.

    Raises:
        StaleStages: the command would refuse what a stage that is asked for builds on.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: RunSettings,
        stages: Sequence[Stage],
        states: Mapping[str, StageState],
        taken: Mapping[str, str],
        only: Collection[str],
        anew: Collection[str],
    ) -> None:
        self._run, self._settings, self._stages = run, settings, stages
        self._anew = {stage.name for stage in following(stages, anew)}
        self._taken = {name: said for name, said in taken.items() if name not in self._anew}
        self._states = as_found(stages, states, taken, anew)
        wanted = chosen(run, stages, only)
        self._wanted = {stage.name for stage in wanted}
        if stale := stale_among(self._states, wanted):
            raise StaleStages(run, stages, stale)

    def plan(self, coloured: bool) -> str:
        """The stages, with what would happen to each, and how long that takes."""
        stages, states, left = self._stages, self._states, self._estimate()
        follows = {
            name: self._told(name, text) for name, text in what_follows(stages, states).items()
        }
        table = report.plan_table(self._settings, stages, states, follows, left, coloured)
        return f"{table}\n{report.left_line(left)}; {largest_memory(self._settings, stages)}"

    def commands(self, programs: Programs, side_by_side: int) -> Iterator[str]:
        """Those that would be started, a line each."""
        starting = self._starting()
        if not starting:
            yield "no command: nothing would be started"
            return
        for folder in engine_folders(self._run, side_by_side):
            for index in range(self._settings.engine.count if self._samples(starting) else 0):
                job = EngineDirectory(folder / str(index)).job
                yield f"engine {index}: {shlex.join(programs.engine(job))}"
        yield f"every stage, as ranks 0 to {self._settings.layout.ranks - 1}:"
        for stage in starting:
            directory = self._run.stage(stage.name)
            attempts = 0 if stage.name in self._anew else directory.attempts()
            yield f"  {shlex.join(programs.stage(directory.job(attempts + 1)))}"

    def _told(self, name: str, text: str) -> str:
        """What would happen to a stage, where the options have a say in it."""
        if name in self._taken:
            return f"is {self._taken[name]}"
        aside = name in self._anew and self._run.stage(name).path.exists()
        if name not in self._wanted and self._states[name].state != "done":
            return "is put aside, and left out by --only" if aside else "is left out by --only"
        return f"is put aside, and {text}" if aside else text

    def _starting(self) -> list[Stage]:
        cannot = held(self._stages, self._states)
        return [
            stage
            for stage in self._stages
            if stage.name in self._wanted
            and stage.name not in cannot
            and self._states[stage.name].state in ("pending", "failed")
        ]

    def _estimate(self) -> Estimate:
        before = took(Ledger(self._run.ledger).events())
        return estimate(self._run, self._settings, self._stages, self._states, before, self._wanted)

    @staticmethod
    def _samples(stages: Sequence[Stage]) -> bool:
        return any(stage.needs_engine for stage in stages)
