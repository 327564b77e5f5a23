"""Asynchronous checkpoints: written while training continues, and named once they are whole.

A thread of every rank writes that rank's files to `tmp_step_N` and computes their checksums. When
the threads of all ranks have finished, the ranks together add metadata and checksums and rename the
directory to `step_N`. A thread, not megatron-core's forked process: a killed fork hangs its rank.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from torch.distributed.checkpoint.metadata import StorageMeta

from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint.reader import METADATA_FILE, CheckpointReader
from parallel.checkpoint.state import METADATA
from parallel.distributed import gather, on_main, reason
from parallel.errors import is_lost_peer
from parallel.files import (
    CHECKSUMS,
    STATE,
    CheckpointError,
    digest_of,
    replacing,
    sha256,
    whole_checkpoints,
    write_atomically,
)
from parallel.model.policy import Policy


class Saver:
    """The writer of one stage's checkpoints, one at a time. All but `writing` is collective."""

    def __init__(
        self, directory: Path, keep_last: int = 1, keep_best: int = 0, asynchronous: bool = True
    ) -> None:
        """Remove unfinished checkpoints; unless `asynchronous`, `begin` waits for the whole one."""
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._asynchronous = asynchronous
        self._in_flight: _Writing | None = None
        self._removal = threading.Thread()
        on_main(lambda: _remove(directory.glob("tmp_*")))  # of a killed stage

    @property
    def writing(self) -> bool:
        """True while this rank writes or removes; call `finish` once no rank does."""
        in_flight = self._in_flight
        return self._removal.is_alive() or (in_flight is not None and in_flight.thread.is_alive())

    def begin(
        self, policy: Policy, step: int, state: dict[str, Any], score: float | None = None
    ) -> None:
        """Start to write `step_N` from the current policy and the loop's `state`, which is JSON.

        Of a policy that does not train only the weights are written. A higher `score` is better.
        Like `finish` raises CheckpointError or OSError, such as for a full disk; earlier
        checkpoints are then unchanged.

        Waits for: every rank, the checkpoint in flight, and this rank's copy of the state; unless
            the saver is asynchronous, for the files too.
        Unblocked by: the same call on every rank; training continues while threads write.
        """
        self.finish()
        path = self._directory / f"tmp_step_{step}"
        document = json.dumps({**state, "step": step, "score": score})
        on_main(lambda: path.mkdir(parents=True))
        with checkpoint_state.on_device(policy):
            self._in_flight = _Writing(policy, path, document, copy=self._asynchronous)
            if not self._asynchronous:
                self._in_flight.run()
        if self._asynchronous:
            self._in_flight.thread.start()
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if there is one, and give it its name.

        Checkpoints that are no longer kept are removed in a thread that outlives this call.

        Waits for: the writing threads of all ranks.
        Unblocked by: their ends, and the same call on every rank; an error on one is raised on all.
        """
        writing, self._in_flight = self._in_flight, None
        if writing is not None:
            files = writing.finish()
            on_main(lambda: self._name(writing, files))

    def _name(self, writing: _Writing, files: dict[str, str]) -> None:
        write_atomically(writing.path / STATE, writing.document)
        for path in writing.path.rglob("*"):
            name = str(path.relative_to(writing.path))
            if path.is_file() and name not in files:
                files[name] = sha256(path)
        content = {"digest": digest_of(files), "files": dict(sorted(files.items()))}
        write_atomically(writing.path / CHECKSUMS, json.dumps(content, indent=1))
        _sync(writing.path)
        final = self._directory / writing.path.name.removeprefix("tmp_")
        shutil.rmtree(final, ignore_errors=True)
        writing.path.rename(final)
        _sync(self._directory)
        self._retain()

    def _retain(self) -> None:
        paths = {whole.step: whole.path for whole in whole_checkpoints(self._directory)}
        scores = {step: _score(path) for step, path in paths.items()}
        dropped = scores.keys() - kept(scores, self._keep_last, self._keep_best)
        # Renamed first: a kill must not leave a half-removed directory with a checkpoint's name.
        dropped_paths = [paths[s].rename(self._directory / f"tmp_dropped_{s}") for s in dropped]
        self._removal = threading.Thread(target=_remove, args=(dropped_paths,))
        self._removal.start()
        if not self._asynchronous:
            self._removal.join()


class _Writing:
    """A checkpoint in flight."""

    def __init__(self, policy: Policy, path: Path, document: str, copy: bool) -> None:
        """Plan which rank writes what; with `copy`, training may then change the policy."""
        self.path = path
        self.document = document
        self._error: str | None = None
        self._files: dict[str, str] = {}
        self.thread = threading.Thread(target=self.run, daemon=True)
        state = checkpoint_state.whole(policy)
        shards = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
        in_use = {_memory(shard.data) for shard in shards if torch.is_tensor(shard.data)}
        with _as_checkpoint_error(path):
            strategy = FullyParallelSaveStrategyWrapper(  # replicas share the writing
                get_default_save_sharded_strategy("torch_dist"),
                parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
            metadata = dict(METADATA)
            self._request = dist_checkpointing.save(
                state,
                str(path),
                strategy,
                async_sharded_save=True,
                content_metadata=metadata,
                async_strategy="mcore",  # the default needs nvidia-resiliency-ext
            )
            self._buckets = self._request.preload_fn() if self._request.preload_fn else []
        if copy:
            self._buckets = _without(in_use, self._buckets)

    def run(self) -> None:
        """Write this rank's files and compute their checksums."""
        try:
            if self._request.async_fn is not None:
                rank, _, answers = self._request.async_fn_args
                self._request.async_fn(rank, self._buckets, answers)
            self._files = {name: sha256(self.path / name) for _, name, _ in self._buckets}
        except Exception as error:  # raised by `finish`, on every rank
            self._error = reason(error)
        self._buckets = []

    def finish(self) -> dict[str, str]:
        """Wait for every rank's files, add the metadata, and return the files' checksums."""
        if self.thread.ident is not None:
            self.thread.join()
        outcomes = gather((self._error, self._files))
        if errors := sorted({error for error, _ in outcomes if error}):
            raise on_main(lambda: _failure(self.path, "; ".join(errors)))
        with _as_checkpoint_error(self.path):
            for finalize in self._request.finalize_fns:
                finalize()
            on_main(lambda: _drop_write_id(self.path))
        return {name: checksum for _, files in outcomes for name, checksum in files.items()}


def _drop_write_id(path: Path) -> None:
    """Drop a random id and the temporary path from `.metadata`: equal states have equal digests."""
    metadata = CheckpointReader(path).read_metadata()
    metadata.storage_meta = StorageMeta()
    with replacing(path / METADATA_FILE) as file:
        file.write(pickle.dumps(metadata))


def kept(scores: Mapping[int, float | None], last: int, best: int) -> set[int]:
    """Return the steps to keep: the `last` newest, and the `best` with the highest scores.

    A step without a score, or with NaN, is never among the best; of equal ones the newer wins.
    `last` is at least 1.
    """
    newest = sorted(scores)[-last:]
    scored = [(s, step) for step, s in scores.items() if s is not None and not math.isnan(s)]
    return {*newest, *(step for _, step in sorted(scored, reverse=True)[:best])}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _without(in_use: set[int], buckets: list[Any]) -> list[Any]:
    """Return the buckets with a copy of every tensor whose memory the policy still uses.

    megatron-core has copied tensors of a GPU, but of a CPU only those that are views.
    """

    return [
        (path, name, (blobs, [(i, t.clone() if _memory(t) in in_use else t) for i, t in tensors]))
        for path, name, (blobs, tensors) in buckets
    ]


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    # torch wraps a shard writer's error into CheckpointException, a BaseException with the cause on
    # the first rank only, and turns a failed write of the common part into a RuntimeError.
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or is_lost_peer(str(error)):
            raise  # the launcher reports which rank died
        raise _failure(path, reason(error)) from error


def _failure(path: Path, why: str) -> CheckpointError:
    free = shutil.disk_usage(path.parent).free >> 20
    shutil.rmtree(path, ignore_errors=True)  # partial files would keep the disk full
    return CheckpointError(f"cannot write {path} ({free} MiB are free there): {why}")


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        shutil.rmtree(path, ignore_errors=True)


def _score(checkpoint: Path) -> float | None:
    with suppress(OSError, ValueError):  # damage is reported when the checkpoint is loaded
        return json.loads((checkpoint / STATE).read_text()).get("score")
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
