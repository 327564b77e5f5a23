"""TensorBoard: a directory of events for a stage, for `tensorboard --logdir runs/NAME/stages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from parallel.files import Checkpoint
from stages.sampling.sample_files import Row
from stages.trackers.tracker import TrackedStage, Tracker


class TensorBoard(Tracker):
    """A stage's events; those of a resumed stage are in a further file of its directory."""

    def __init__(self, stage: TrackedStage) -> None:
        self._writer = SummaryWriter(str(stage.directory / "tensorboard"))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        texts = (f"    {row['prompt']}\n\n    {row['response']}" for row in rows)
        heads = (f"reward {row['reward']}, {row['finish_reason']}" for row in rows)
        blocks = (f"{head}\n\n{text}" for head, text in zip(heads, texts, strict=True))
        self._writer.add_text("samples", "\n\n---\n\n".join(blocks), step)

    def checkpoint(self, saved: Checkpoint, parents: Mapping[str, str]) -> None:
        lines = [f"step {saved.step}: {saved.digest}"]
        lines += [f"from {name}: {digest}" for name, digest in parents.items()]
        self._writer.add_text("lineage", "\n\n".join(lines), saved.step)

    def close(self) -> None:
        self._writer.close()
