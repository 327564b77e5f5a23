"""Outputs from outside a run, at a path.

A path may be a stage's directory of another run, a checkpoint, or a Hugging Face checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from parallel.files import HUGGING_FACE, Checkpoint, read_checkpoint, weights_digest
from stages.directory import StageDirectory


def outside_model(path: Path) -> Checkpoint | None:
    """Return the model or the collected responses at a path; None without either.

    The digest changes when they do.
    """
    directory = StageDirectory(path)
    if directory.checkpoints.is_dir() or directory.collection.is_file():
        return directory.output()
    if (path / HUGGING_FACE).is_file():
        return Checkpoint(path, 0, weights_digest(path), {})
    return read_checkpoint(path)
