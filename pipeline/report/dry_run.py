"""What `braid run` would do with the options it is given, told without doing any of it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from pipeline.launch.launcher import Programs
from pipeline.launch.runner import engine_directories
from pipeline.report import tables as report
from pipeline.report.estimate import Estimate, estimate
from pipeline.report.memory import largest_memory
from pipeline.report.outlook import held, next_action
from pipeline.run.directory import EngineDirectory
from pipeline.run.graph import Stage
from pipeline.run.ledger import took
from pipeline.run.run import Run
from pipeline.run.select import StaleStages, planned_states, stale_among
from pipeline.run.states import StageState


class DryRun:
    """A run as the command would find it: with the stages `taken` from another one, each with what
    the ledger would say of it, those made `anew` put aside, and `only` some asked for.

    Raises:
        StaleStages: the command would refuse what a stage that is asked for builds on.
    """

    def __init__(
        self,
        run: Run,
        states: Mapping[str, StageState],
        reused: Mapping[str, str],
        only: Collection[str],
        rerun: Collection[str],
    ) -> None:
        self._run = run
        self._rerun = {stage.name for stage in run.downstream(rerun)}
        self._reused = {name: cause for name, cause in reused.items() if name not in self._rerun}
        self._states = planned_states(run, states, reused, rerun)
        wanted = run.chosen(only)
        self._wanted = {stage.name for stage in wanted}
        if stale := stale_among(self._states, wanted):
            raise StaleStages(run, stale)

    def plan(self, coloured: bool) -> str:
        """The stages, with what would happen to each, and how long that takes."""
        run, states, left = self._run, self._states, self._estimate()
        follows = {
            name: self._told(name, text) for name, text in next_action(run.stages, states).items()
        }
        table = report.plan_table(run, states, follows, left, coloured)
        return f"{table}\n{report.left_line(left)}; {largest_memory(run.settings, run.stages)}"

    def commands(self, programs: Programs, parallel: int) -> Iterator[str]:
        """Those that would be started, a line each."""
        starting = self._starting()
        if not starting:
            yield "no command: nothing would be started"
            return
        for directory in engine_directories(self._run, parallel):
            for index in range(self._run.settings.engine.count if self._samples(starting) else 0):
                job = EngineDirectory(directory / str(index)).job
                yield f"engine {index}: {shlex.join(programs.engine(job))}"
        yield f"every stage, as ranks 0 to {self._run.settings.layout.ranks - 1}:"
        for stage in starting:
            directory = self._run.stage(stage.name)
            attempts = 0 if stage.name in self._rerun else directory.attempts()
            yield f"  {shlex.join(programs.stage(directory.job(attempts + 1)))}"

    def _told(self, name: str, text: str) -> str:
        """What would happen to a stage, where the options have a say in it."""
        if name in self._reused:
            return f"is {self._reused[name]}"
        aside = name in self._rerun and self._run.stage(name).path.exists()
        if name not in self._wanted and self._states[name].state != "done":
            return "is put aside, and left out by --only" if aside else "is left out by --only"
        return f"is put aside, and {text}" if aside else text

    def _starting(self) -> list[Stage]:
        cannot = held(self._run.stages, self._states)
        return [
            stage
            for stage in self._run.stages
            if stage.name in self._wanted
            and stage.name not in cannot
            and self._states[stage.name].state in ("pending", "failed")
        ]

    def _estimate(self) -> Estimate:
        return estimate(self._run, self._states, took(self._run.events), self._wanted)

    @staticmethod
    def _samples(stages: Sequence[Stage]) -> bool:
        return any(stage.needs_engine for stage in stages)
