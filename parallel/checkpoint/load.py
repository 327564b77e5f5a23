"""Checkpoints, verified by their checksums and loaded under any layout.

`step_N/` holds megatron-core's sharded weights and optimizer, `state.json` with the loop's state,
and `checksums.json` with the SHA-256 of every file and the digest of the whole. A checkpoint is
whole when it gets its name (`parallel.checkpoint.save`); later damage by a disk is found here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallel.checkpoint import state as checkpoint_state
from parallel.distributed import gather, layout_sizes, on_main, reason
from parallel.files import (
    CHECKSUMS,
    STATE,
    CheckpointError,
    CheckpointRefused,
    UnreadableCheckpoint,
    checkpoint_directories,
    digest_of,
    read_checkpoint,
    sha256,
    unreadable,
)
from parallel.model.policy import Policy, TrainedPolicy


def newest_intact(directory: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint in `directory`, and a message for each damaged newer one.

    A damaged one is renamed to `damaged_step_N` for a person to look at. Raises
    UnreadableCheckpoint where the newest one exists and cannot be read. Collective.
    """
    damaged: list[str] = []
    while paths := on_main(lambda: checkpoint_directories(directory)):
        if (damage := _damage(paths[-1])) is None:
            return paths[-1], damaged
        aside = on_main(partial(_put_aside, paths[-1]))
        damaged.append(f"damaged checkpoint: {damage}; it is put aside as {aside.name}")
    return None, damaged


def training_state(policy: TrainedPolicy, checkpoint: Path) -> dict[str, Any]:
    """Load weights, optimizer, schedule and random numbers; return the loop's state. Collective.

    The layout may differ from the one that saved; then the random numbers are not restored.

    Waits for: every rank; data-parallel ranks each read a share of the files, and exchange it.
    Unblocked by: the same call on every rank.

    Raises:
        CheckpointError: the checkpoint is of another model or another kind of optimizer.
    """
    with _as_checkpoint_error(checkpoint):
        common = _on_every_rank(partial(dist_checkpointing.load_common_state_dict, str(checkpoint)))
    _restore(policy, checkpoint, common["updates"])
    for name, other in policy.companions.items():
        _restore(other, checkpoint, common["companions"][name]["updates"], f"{name}.")
    if policy.averages:
        with checkpoint_state.on_device(policy):
            loaded = _read(checkpoint, "averages", checkpoint_state.averages(policy))
            for name, average in policy.averages.items():
                checkpoint_state.restore_weights(average, loaded[name])
    if common["layout"] == layout_sizes(policy.bridge.config):
        states = _read(checkpoint, "random_numbers", checkpoint_state.random_numbers())
        checkpoint_state.restore_random_numbers(states)
    return json.loads((checkpoint / STATE).read_text())


def weights(policy: Policy, checkpoint: Path, head: bool = True) -> None:
    """Load only the weights of `checkpoint`, as a child stage, a reference or a teacher does.

    A directory with a config.json is a Hugging Face checkpoint. Without `head` the policy keeps its
    own, as a critic does. Collective.

    Raises:
        WeightsError: the Hugging Face checkpoint is of another model.
        CheckpointError: it is damaged; the result of another stage has no substitute.
        UnreadableCheckpoint: it cannot be read.
    """
    if (checkpoint / "config.json").is_file():
        policy.load_hugging_face(checkpoint)
        return
    check_intact(checkpoint)
    loaded = _read(checkpoint, "weights", checkpoint_state.weights(policy, head))
    checkpoint_state.restore_weights(policy, loaded)


def check_intact(checkpoint: Path) -> None:
    """Compare the files of a checkpoint with their checksums. Collective.

    Raises:
        CheckpointError: it is damaged; the result of another stage has no substitute.
        UnreadableCheckpoint: it cannot be read.
    """
    if damage := _damage(checkpoint):
        raise CheckpointError(
            f"damaged checkpoint: {damage}; remove {checkpoint} and resume the run: its stage "
            "continues from the checkpoint before"
        )


def _restore(policy: TrainedPolicy, checkpoint: Path, updates: int, prefix: str = "") -> None:
    """Load weights and optimizer of a model whose names in the checkpoint begin with `prefix`."""
    weights = _read(checkpoint, "weights", checkpoint_state.weights(policy), prefix)
    checkpoint_state.restore_weights(policy, weights)
    # Not in one call with the weights: an fp32 weight is read a second time, as its own master.
    optimizer = _read(checkpoint, "optimizer", checkpoint_state.optimizer_to_load(policy), prefix)
    checkpoint_state.restore_optimizer(policy, optimizer, updates)


def _read(checkpoint: Path, section: str, shards: Any, prefix: str = "") -> Any:
    strategy = FullyParallelLoadStrategyWrapper(
        _CollectiveLoad(), parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    state = checkpoint_state.under(prefix, {section: shards})
    with _as_checkpoint_error(checkpoint):
        return dist_checkpointing.load(state, str(checkpoint), strategy)[section]


class _CollectiveLoad(TorchDistLoadShardedStrategy):
    """The reading of a rank's share of a checkpoint, where an error is raised on every rank.

    megatron-core 0.19.2 reads without collectives (no_dist=True in strategies/torch.py), so that
    one rank's error is its own, and the others wait for the shards that it would send them.
    """

    def load(self, *arguments: Any) -> Any:
        """Return the loaded state; raise CheckpointException with all ranks' errors. Collective."""
        return _on_every_rank(partial(super().load, *arguments))


def _on_every_rank(read: Callable[[], Any]) -> Any:
    """Return what each rank reads; raise CheckpointException with all ranks' errors. Collective."""
    state, failures = None, {}
    try:
        state = read()
    except CheckpointException as error:
        failures = {dist.get_rank(): failure for failure in error.failures.values()}
    except (OSError, CheckpointingException) as error:
        failures = {dist.get_rank(): (error, extract_tb(error.__traceback__))}
    if failures := {rank: f for every in gather(failures) for rank, f in every.items()}:
        raise CheckpointException("read", failures)
    return state


@contextmanager
def _as_checkpoint_error(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    # torch wraps a reader's error into CheckpointException, a BaseException
    # (torch 2.13, distributed/checkpoint/api.py).
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        if refused := [failure for failure in failures if isinstance(failure, CheckpointRefused)]:
            raise min(refused, key=str) from error
        raise CheckpointError(
            f"cannot read {checkpoint}: {reason(error)}; restore the settings of model and "
            "optimizer that it was saved with, or rerun its stage with --from"
        ) from error


def _put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, never onto one that was renamed before."""
    aside, number = path.with_name(f"damaged_{path.name}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged_{path.name}.{number}")
    return path.rename(aside)


def _damage(path: Path) -> str | None:
    """Return the damage of a checkpoint, the same on every rank; each rank reads its share.

    Raises:
        UnreadableCheckpoint: on every rank, where one cannot read a file that exists. That is not
            damage: after another try, or a chmod, the checkpoint may be whole.
    """
    damaged, unread = [], ""
    try:
        damaged = _own_damage(path)
    except UnreadableCheckpoint as error:
        unread = str(error)
    damages, messages = zip(*gather((damaged, unread)), strict=True)
    if any(messages):
        raise UnreadableCheckpoint(min(filter(None, messages)))
    return "; ".join(sorted(set().union(*damages))) or None


def _own_damage(path: Path) -> list[str]:
    checkpoint = read_checkpoint(path)
    if checkpoint is None or checkpoint.digest != digest_of(checkpoint.files):
        return [f"{path / CHECKSUMS} is missing or damaged"]
    mine = sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()]
    damaged = []
    for name in mine:
        try:
            if sha256(path / name) != checkpoint.files[name]:
                damaged.append(f"{path / name} does not match its checksum")
        except FileNotFoundError:
            damaged.append(f"{path / name} is missing")
        except OSError as error:
            raise unreadable(path / name, error) from error
    return damaged
