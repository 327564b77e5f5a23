"""Digests of a run's trained tensors, whose files may differ, and of what its other stages left."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel.files import whole_checkpoints
from pipeline.config.validate import load
from pipeline.run.bundle.writer import finished_output
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run


def digests(run: Path) -> dict[str, str]:
    """Return a digest of every stage's newest checkpoint, by `stage/step_N`.

    A digest covers names, dtypes, shapes and bits of all tensors, the optimizer's included.
    """
    found = {}
    for stage in sorted((run / "stages").iterdir()):
        if whole := whole_checkpoints(stage / "checkpoints"):
            found[f"{stage.name}/step_{whole[-1].step}"] = _digest(whole[-1].path)
    return found


def outputs(run: Path) -> dict[str, str | None]:
    """Return the digest of the output of every stage that leaves no checkpoints, by stage.

    It covers collected samples, the results of evaluations and gates, and the exported files.
    """
    whole = Run(run, load(RunDirectory(run).settings_file, to_start=False))
    return {stage.name: finished_output(whole, stage) for stage in whole.stages if not stage.trains}


def _digest(checkpoint: Path) -> str:
    tensors = _tensors(checkpoint)
    if not tensors:
        raise ValueError(f"{checkpoint} holds no tensor")
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    held = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in held.items()
        if isinstance(kind, TensorStorageMetadata)
    }
    distributed_checkpoint.load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors
