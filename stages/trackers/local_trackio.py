"""trackio: a local database and dashboard with the interface of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio

from parallel.files import Checkpoint
from stages.sampling.sample_files import Row
from stages.trackers.tracker import COLUMNS, TrackedStage, Tracker


class Trackio(Tracker):
    """A stage's run, in trackio's own directory."""

    def __init__(self, stage: TrackedStage) -> None:
        self._run = trackio.init(
            project=stage.project,
            group=stage.run,
            name=stage.id,
            resume="allow",
            config={"stage": stage.stage, "seed": stage.settings["seed"]},
            embed=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        cells = [[row[name] for name in COLUMNS] for row in rows]
        self._run.log({"samples": trackio.Table([*COLUMNS], cells)}, step=step)

    def checkpoint(self, saved: Checkpoint, parents: Mapping[str, str]) -> None:
        lines = [f"digest {saved.digest}", *map(" ".join, parents.items())]
        self._run.log({"lineage": trackio.Markdown("\n\n".join(lines))}, step=saved.step)

    def close(self) -> None:
        self._run.finish()
