"""Checkpoints: found, held to their checksums, and loaded under any layout.

`step_N/` holds megatron-core's sharded weights and optimizer, `state.json` with the loop's own
state, and `checksums.json` with the SHA-256 of every file and the digest of the whole. What has the
name was whole when it got it (`parallel.checkpoint.save`); what a disk has done to it since is
found here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint.reader import CheckpointRefused
from parallel.distributed import gather, layout_sizes, on_main
from parallel.errors import UserError
from parallel.files import (
    CHECKSUMS,
    STATE,
    UnreadableCheckpoint,
    checkpoint_folders,
    digest_of,
    read_checkpoint,
    unreadable,
)
from parallel.model.policy import Policy, TrainedPolicy


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is damaged; the message names it and the reason."""


def newest_verified(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in `directory`, and what is wrong with each newer one.

    A damaged one is put aside as `damaged_step_N` for a person to look at. Collective.

    Raises:
        UnreadableCheckpoint: the newest one is there and cannot be read.
    """
    faults = []
    while (path := on_main(lambda: _newest(directory))) is not None:
        if (fault := _fault(path)) is None:
            break
        aside = on_main(partial(_put_aside, path))
        faults.append(f"damaged checkpoint: {fault}; it is put aside as {aside.name}")
    return path, faults


def training(policy: TrainedPolicy, checkpoint: Path) -> dict[str, Any]:
    """Continue from what `newest_verified` found: weights, optimizer, schedule, random numbers.

    Returns the loop's own state. The layout may be another than the one that saved; only the random
    numbers then go on afresh. Raises CheckpointError when the checkpoint is of another model or
    another kind of optimizer. Collective.
    """
    with _as_checkpoint_error(checkpoint):
        common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    _restore(policy, checkpoint, common["updates"])
    for name, other in policy.companions.items():
        _restore(other, checkpoint, common["companions"][name]["updates"], f"{name}.")
    if policy.averages:
        loaded = _read({"averages": checkpoint_state.averages(policy)}, checkpoint)
        for name, average in policy.averages.items():
            checkpoint_state.restore_weights(average, loaded["averages"][name])
    if common["layout"] == layout_sizes():
        loaded = _read({"random_numbers": checkpoint_state.random_numbers()}, checkpoint)
        checkpoint_state.restore_random_numbers(loaded["random_numbers"])
    return json.loads((checkpoint / STATE).read_text())


def weights(policy: Policy, checkpoint: Path, head: bool = True) -> None:
    """Take only the weights of `checkpoint`, as a child stage, a reference or a teacher does;
    without the `head`, that of the policy stays, as a critic's does.

    Raises CheckpointError when it is damaged: another stage's result has no substitute; and
    UnreadableCheckpoint when it cannot be read. Collective.
    """
    if fault := _fault(checkpoint):
        raise CheckpointError(
            f"damaged checkpoint: {fault}; remove {checkpoint} and resume the run: its stage goes "
            "on from the checkpoint before"
        )
    loaded = _read({"weights": checkpoint_state.weights(policy, head)}, checkpoint)
    checkpoint_state.restore_weights(policy, loaded["weights"])


def reason(error: BaseException) -> str:
    """What went wrong, without torch's wrapping."""
    if not isinstance(error, CheckpointException):
        return str(error)
    reasons = sorted({str(reason) for reason, _ in error.failures.values()})
    return "; ".join(reasons) or "the reason is in the log of rank 0"


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _restore(policy: TrainedPolicy, checkpoint: Path, updates: int, prefix: str = "") -> None:
    """Weights and optimizer of a model whose names in the checkpoint begin with `prefix`."""
    weights = checkpoint_state.under(prefix, {"weights": checkpoint_state.weights(policy)})
    checkpoint_state.restore_weights(policy, _read(weights, checkpoint)["weights"])
    # Apart from the weights, since an fp32 weight is read once more, as its own master.
    optimizer = {"optimizer": checkpoint_state.optimizer_to_load(policy)}
    loaded = _read(checkpoint_state.under(prefix, optimizer), checkpoint)
    checkpoint_state.restore_optimizer(policy, loaded["optimizer"], updates)


def _read(state: checkpoint_state.State, checkpoint: Path) -> dict[str, Any]:
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(checkpoint)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    with _as_checkpoint_error(checkpoint):
        return dist_checkpointing.load(state, str(checkpoint), strategy)


@contextmanager
def _as_checkpoint_error(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointRefused as refused:
        raise CheckpointError(str(refused)) from refused
    # torch wraps what a reader raised into a BaseException of its own.
    except CheckpointException as error:
        refusals = [each for each, _ in error.failures.values()]
        if found := [str(each) for each in refusals if isinstance(each, CheckpointRefused)]:
            raise CheckpointError(min(found)) from error
        raise CheckpointError(f"cannot read {checkpoint}: {reason(error)}") from error


def _newest(directory: Path) -> Path | None:
    folders = checkpoint_folders(directory)
    return folders[-1] if folders else None


def _put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint; never onto one that was put aside before."""
    aside, number = path.with_name(f"damaged_{path.name}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged_{path.name}.{number}")
    return path.rename(aside)


def _fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, the same on every rank; each reads its share.

    Raises:
        UnreadableCheckpoint: on every rank, where one cannot read what is there. That is no
            damage: the next try, or a chmod, may find the checkpoint whole.
    """
    faults, unread = [], ""
    try:
        faults = _own_faults(path)
    except UnreadableCheckpoint as error:
        unread = str(error)
    found = gather((faults, unread))
    if messages := sorted({message for _, message in found if message}):
        raise UnreadableCheckpoint(messages[0])
    return "; ".join(sorted({fault for faults, _ in found for fault in faults})) or None


def _own_faults(path: Path) -> list[str]:
    checkpoint = read_checkpoint(path)
    if checkpoint is None or checkpoint.digest != digest_of(checkpoint.files):
        return [f"{path / CHECKSUMS} is missing or damaged"]
    mine = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
    found = [_file_fault(path / name, checkpoint.files[name]) for name in mine]
    return [fault for fault in found if fault]


def _file_fault(path: Path, expected: str) -> str | None:
    try:
        return None if sha256(path) == expected else f"{path} does not match its checksum"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        raise unreadable(path, error) from error
