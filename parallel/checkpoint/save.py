"""Checkpoints are written beside the training, made whole, and only then given their name.

While a stage trains on, a thread of every rank writes that rank's files to `tmp_step_N` and takes
their checksums. When the threads of all ranks are done, the ranks together add the metadata and the
checksums and rename the folder to `step_N`. A thread and not megatron-core's forked process, since
a fork that is killed hangs its rank.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint.load import CheckpointError, reason, sha256
from parallel.checkpoint.state import METADATA
from parallel.distributed import gather, layout_sizes, on_main
from parallel.files import CHECKSUMS, STATE, digest_of, whole_checkpoints, write_atomically
from parallel.model.policy import Policy, TrainedPolicy
from parallel.status_pipe import LOST_PEER


class Saver:
    """The checkpoints of one stage, written one at a time. All but `writing` is collective."""

    def __init__(
        self, directory: Path, keep_last: int = 1, keep_best: int = 0, asynchronous: bool = True
    ) -> None:
        """Not `asynchronous`, `begin` returns when the checkpoint has its name."""
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._asynchronous = asynchronous
        self._begun: _Writing | None = None
        self._removal = threading.Thread()
        on_main(self._remove_leftovers)

    @property
    def writing(self) -> bool:
        """Whether this rank still writes or removes; when none does, it is time to `finish`."""
        return self._removal.is_alive() or (self._begun is not None and self._begun.alive)

    def begin(
        self, policy: Policy, step: int, state: dict[str, Any], score: float | None = None
    ) -> None:
        """Start to write `step_N`, as the policy and the loop's own `state`, JSON, are now. Of a
        policy that does not train these are its weights.

        The highest scores are the best. Raises CheckpointError or OSError (a full disk, a read-only
        directory) with nothing of an earlier checkpoint touched; so does `finish`.
        """
        self.finish()
        folder = self._directory / f"tmp_step_{step}"
        document = json.dumps({**state, "step": step, "score": score})
        on_main(lambda: folder.mkdir(parents=True))
        self._begun = _Writing(policy, folder, document, copy=self._asynchronous)
        if self._asynchronous:
            self._begun.start()
        else:
            self._begun.run()
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun, if anything was, and give it its name.

        What is no longer kept is removed meanwhile; the process does not end before that is done.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            files = begun.finish()
            on_main(lambda: self._name(begun, files))

    def _name(self, begun: _Writing, files: dict[str, str]) -> None:
        write_atomically(begun.folder / STATE, begun.document)
        for path in begun.folder.rglob("*"):
            name = str(path.relative_to(begun.folder))
            if path.is_file() and name not in files:
                files[name] = sha256(path)
        content = {"digest": digest_of(files), "files": dict(sorted(files.items()))}
        write_atomically(begun.folder / CHECKSUMS, json.dumps(content, indent=1))
        _sync(begun.folder)
        final = self._directory / begun.folder.name.removeprefix("tmp_")
        shutil.rmtree(final, ignore_errors=True)
        begun.folder.rename(final)
        _sync(self._directory)
        self._retain()

    def _retain(self) -> None:
        paths = {whole.step: whole.path for whole in whole_checkpoints(self._directory)}
        scores = {step: _score(path) for step, path in paths.items()}
        dropped = scores.keys() - kept(scores, self._keep_last, self._keep_best)
        # Renamed first: a kill must leave nothing half removed under the name of a whole one.
        useless = [paths[s].rename(self._directory / f"tmp_dropped_{s}") for s in dropped]
        self._removal = threading.Thread(target=_remove, args=(useless,))
        self._removal.start()
        if not self._asynchronous:
            self._removal.join()

    def _remove_leftovers(self) -> None:
        """A killed stage's unfinished checkpoints."""
        _remove(list(self._directory.glob("tmp_*")))


class _Writing:
    """One checkpoint on its way to the disk."""

    def __init__(self, policy: Policy, folder: Path, document: str, copy: bool) -> None:
        """Plan who writes what; with `copy`, training may change the policy from now on."""
        self.folder = folder
        self.document = document
        self._error: str | None = None
        self._files: dict[str, str] = {}
        self._thread = threading.Thread(target=self.run, daemon=True)
        state = _state(policy)
        in_use = {_memory(tensor) for tensor in _tensors(state)}
        with _as_checkpoint_error(folder):
            self._request = dist_checkpointing.save(
                state,
                str(folder),
                _strategy(),
                async_sharded_save=True,
                content_metadata=dict(METADATA),
            )
            self._buckets = self._request.preload_fn() if self._request.preload_fn else []
        if copy:
            self._buckets = _without(in_use, self._buckets)

    @property
    def alive(self) -> bool:
        """Whether the thread still writes."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Write in a thread of its own."""
        self._thread.start()

    def run(self) -> None:
        """Write this rank's files and take their checksums."""
        try:
            if self._request.async_fn is not None:
                rank, _, answers = self._request.async_fn_args
                self._request.async_fn(rank, self._buckets, answers)
            self._files = {name: sha256(self.folder / name) for _, name, _ in self._buckets}
        except Exception as error:  # told by `finish`, on every rank
            self._error = reason(error)
        self._buckets = []

    def finish(self) -> dict[str, str]:
        """Wait for every rank's files and add the metadata; returns the checksums of the files."""
        if self._thread.ident is not None:
            self._thread.join()
        outcomes = gather((self._error, self._files))
        if errors := sorted({error for error, _ in outcomes if error}):
            raise on_main(lambda: _failure(self.folder, "; ".join(errors)))
        with _as_checkpoint_error(self.folder):
            for finalize in self._request.finalize_fns:
                finalize()
        return {name: checksum for _, files in outcomes for name, checksum in files.items()}


def kept(scores: Mapping[int, float | None], last: int, best: int) -> set[int]:
    """The steps to keep of `scores`: the `last` newest, and the `best` with the highest scores.

    A step without a score, or with NaN for one, is never among the best; of two equal ones the
    newer is. `last` is at least 1.
    """
    newest = sorted(scores)[-last:]
    comparable = {
        step: score for step, score in scores.items() if score is not None and not math.isnan(score)
    }
    ranked = sorted(comparable, key=lambda step: (comparable[step], step), reverse=True)
    return {*newest, *ranked[:best]}


def _state(policy: Policy) -> dict[str, Any]:
    if not isinstance(policy, TrainedPolicy):
        return {"weights": checkpoint_state.weights(policy)}
    return {
        **checkpoint_state.trained(policy),
        "averages": checkpoint_state.averages(policy),
        "companions": checkpoint_state.companions(policy),
        "random_numbers": checkpoint_state.random_numbers(),
        "layout": layout_sizes(),
    }


def _strategy() -> FullyParallelSaveStrategyWrapper:
    """What several ranks hold alike, they share out among them."""
    return FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    shards = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
    return [shard.data for shard in shards if torch.is_tensor(shard.data)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _without(in_use: set[int], buckets: list[Any]) -> list[Any]:
    """The buckets with a copy of every tensor whose memory the policy still uses.

    megatron-core has copied what was on a GPU, and on a CPU only what was a part of another tensor.
    """

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if _memory(tensor) in in_use else tensor

    return [
        (path, name, (blobs, [(item, own(tensor)) for item, tensor in tensors]))
        for path, name, (blobs, tensors) in buckets
    ]


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    # torch wraps what a shard's writer raised into a BaseException of its own, which tells only the
    # first rank why, and turns a failed write of the common part into a RuntimeError.
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or LOST_PEER in str(error):
            raise  # it is for the launcher to tell which rank died
        raise _failure(folder, reason(error)) from error


def _failure(folder: Path, why: str) -> CheckpointError:
    free = shutil.disk_usage(folder.parent).free >> 20
    shutil.rmtree(folder, ignore_errors=True)  # or what was written would keep the disk full
    return CheckpointError(f"cannot write {folder} ({free} MiB are free there): {why}")


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _score(checkpoint: Path) -> float | None:
    try:
        return json.loads((checkpoint / STATE).read_text()).get("score")
    except (OSError, ValueError):  # it is found when somebody loads it
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
