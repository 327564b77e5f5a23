"""Weights & Biases: a group for a run, a run for a stage, tables of samples, lineage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory

import wandb
from wandb.sdk.data_types._private import MEDIA_TMP

from parallel.files import Checkpoint
from stages.sampling.sample_files import Row
from stages.trackers.tracker import COLUMNS, TrackedStage, Tracker


class WeightsAndBiases(Tracker):
    """A stage's run; offline by default, for `wandb sync`."""

    def __init__(self, stage: TrackedStage) -> None:
        self._run = wandb.init(
            project=stage.project,
            group=stage.run,
            job_type=stage.stage.partition(".")[0],
            name=f"{stage.run}/{stage.stage}",
            id=stage.id,
            resume="allow",
            mode="online" if stage.online else "offline",
            dir=stage.directory,
            config=dict(stage.settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Tables go through a directory that wandb makes at its import. megatron-core imports it, so
        # the forks of a server would share one, which the first to end removes for all.
        self._media = TemporaryDirectory(prefix="wandb-media-")
        MEDIA_TMP.name = self._media.name
        # Not wandb's own step, which must grow: a resumed stage repeats some.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        cells = [[row[name] for name in COLUMNS] for row in rows]
        table = wandb.Table(columns=[*COLUMNS], data=cells)
        self._run.log({"step": step, "samples": table})

    def checkpoint(self, saved: Checkpoint, parents: Mapping[str, str]) -> None:
        about = {"digest": saved.digest, "step": saved.step, "parents": dict(parents)}
        artifact = wandb.Artifact(self._run.id, "checkpoint", metadata=about)
        artifact.add_reference(saved.path.absolute().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=[f"step-{saved.step}"])

    def close(self) -> None:
        self._run.finish()
        self._media.cleanup()
