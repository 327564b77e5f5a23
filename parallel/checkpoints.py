"""Checkpoints: written beside, made whole, renamed; what has the name is complete.

`step_N/` holds megatron-core's sharded model and optimizer, `state.json` with the loop's own state,
and `checksums.json` with the SHA-256 of every file and the digest of the whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from torch.distributed.checkpoint.api import CheckpointException

from parallel.distributed import barrier, broadcast, is_main
from parallel.files import CHECKSUMS, read_checkpoint, whole_checkpoints, write_atomically
from parallel.policy import Policy, TrainedPolicy

# Lets the optimizer's state be loaded under another layout.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is damaged; the message names it and the reason."""


def save(
    policy: TrainedPolicy, directory: Path, step: int, state: dict[str, Any], keep_last: int
) -> Path:
    """Write `directory`/step_N, then drop all but the newest `keep_last`. Collective.

    `state` is the loop's own state, JSON. Raises CheckpointError or OSError (a full disk, a
    read-only directory) with nothing of an earlier checkpoint touched.
    """
    final = directory / f"step_{step}"
    unfinished = directory / f"tmp_step_{step}"
    if is_main():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()
    _write_shards(policy, unfinished)
    barrier()
    if is_main():
        write_atomically(unfinished / "state.json", json.dumps({**state, "step": step}))
        _write_checksums(unfinished)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        _sync(directory)
        for old in whole_checkpoints(directory)[:-keep_last]:
            shutil.rmtree(old.path)
    barrier()
    return final


def load_training(policy: TrainedPolicy, checkpoint: Path) -> dict[str, Any]:
    """Continue from `checkpoint`: weights, optimizer, schedule. Returns the loop's own state."""
    _verify(checkpoint)
    loaded = _read_shards(_sharded_state(policy), checkpoint)
    policy.chunks[0].load_state_dict(loaded["model"], strict=True)
    policy.optimizer.load_state_dict(loaded["optimizer"])
    policy.schedule.load_state_dict(loaded["schedule"])
    return json.loads((checkpoint / "state.json").read_text())


def load_weights(policy: Policy, checkpoint: Path) -> None:
    """Take only the weights of `checkpoint`, as a child stage, a reference or a teacher does."""
    _verify(checkpoint)
    model = policy.chunks[0].sharded_state_dict(metadata=METADATA)
    loaded = _read_shards({"model": model}, checkpoint)
    policy.chunks[0].load_state_dict(loaded["model"], strict=True)
    policy.weights_changed()


def _write_shards(policy: TrainedPolicy, directory: Path) -> None:
    strategy = get_default_save_sharded_strategy("torch_dist")
    try:
        dist_checkpointing.save(
            _sharded_state(policy), str(directory), strategy, content_metadata=METADATA
        )
    # torch wraps what a shard's writer raised into a BaseException of its own, which tells only the
    # first rank why, and turns a failed write of the common part into a RuntimeError.
    except (CheckpointException, OSError, RuntimeError) as error:
        free = shutil.disk_usage(directory).free >> 20
        shutil.rmtree(directory, ignore_errors=True)  # or what was written would keep the disk full
        raise CheckpointError(
            f"cannot write {directory} ({free} MiB are free there): {_reason(error)}"
        ) from error


def _read_shards(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(state, str(checkpoint))
    except CheckpointException as error:
        raise CheckpointError(f"cannot read {checkpoint}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return str(error)
    reasons = sorted({str(reason) for reason, _ in error.failures.values()})
    return "; ".join(reasons) or "the reason is in the log of rank 0"


def _sharded_state(policy: TrainedPolicy) -> dict[str, Any]:
    model = policy.chunks[0].sharded_state_dict(metadata=METADATA)
    for part in policy.optimizer.chained_optimizers:
        _materialise(part.optimizer)
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, metadata=METADATA),
        "schedule": policy.schedule.state_dict(),
    }


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its optimizer state, as its first step would.

    megatron-core reads and fills that state by its structure, and cannot create momentum buffers.
    """
    names = ("exp_avg", "exp_avg_sq") if "betas" in optimizer.defaults else ("momentum_buffer",)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(parameter)
            if "betas" in optimizer.defaults:
                state.setdefault("step", torch.tensor(0.0))


def _write_checksums(directory: Path) -> None:
    files = {
        str(path.relative_to(directory)): _sha256(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    content = json.dumps({"digest": digest, "files": files}, indent=1)
    write_atomically(directory / CHECKSUMS, content)
    _sync(directory)


def _verify(path: Path) -> None:
    """Raise CheckpointError on every rank when a file of the checkpoint is missing or changed."""
    fault = broadcast(_fault(path) if is_main() else None)
    if fault is not None:
        raise CheckpointError(f"damaged checkpoint: {fault}; remove {path} to use an older one")


def _fault(path: Path) -> str | None:
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        return f"{path / CHECKSUMS} is missing or not readable"
    for name, expected in checkpoint.files.items():
        if not (path / name).exists():
            return f"{path / name} is missing"
        if _sha256(path / name) != expected:
            return f"{path / name} does not match its checksum"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
