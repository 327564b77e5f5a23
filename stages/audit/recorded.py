"""The files of a run that an audit reads: settings, samples, metrics and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow.parquet as parquet
import torch
import yaml
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel.checkpoint.reader import CheckpointReader
from parallel.files import (
    CheckpointRefused,
    open_file,
    read_checkpoint,
    read_text,
    whole_checkpoints,
)

LONGEST = 300  # characters of a library's message


class NotAuditable(Exception):
    """The files lack what the audit needs; the message says what, and which key to set."""


@dataclass(frozen=True, eq=False)
class RecordedSample:
    """A sample as its step trained on it; tokens int64, log-probabilities in nats, float64.

    `learned` are the indices in the response of the learned tokens. `routes` [prompt + response -
    1, layers, experts_per_token] and the response's `kept_ids` need `logging.auditable`.
    """

    domain: str
    prompt: torch.Tensor
    response: torch.Tensor
    logprobs: torch.Tensor
    learned: torch.Tensor
    update: int
    group: int
    fields: dict[str, Any]
    routes: torch.Tensor | None
    kept_ids: list[torch.Tensor] | None

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens that the model reads: all but the last."""
        return torch.cat([self.prompt, self.response[:-1]])

    @property
    def first(self) -> int:
        """The index in `tokens` of the one that predicts the first token of the response."""
        return len(self.prompt) - 1


@dataclass(frozen=True)
class RecordedRun:
    """A run's directory and its resolved settings, as plain data."""

    path: Path
    settings: dict[str, Any]

    def stage(self, name: str) -> Path:
        return self.path / "stages" / name

    def parent(self, stage: str, of: str) -> Path:
        """Return the checkpoint of `of` that `stage` was initialised from, by its digest.

        `of` is a stage, or the path of a stage's directory of another run or of a checkpoint.

        Raises:
            NotAuditable: it started from another model, or the checkpoint is gone.
        """
        path = self.stage(stage) / "manifest.json"
        if not path.exists():
            raise NotAuditable(f"no {path}: {stage} has not started")
        with naming(path):
            digest = dict(document(path)["parents"]).get(of)
        if digest is None:
            raise NotAuditable(
                f"{stage} did not start from a checkpoint of {of}, its parent in run.yaml"
            )
        outside = read_checkpoint(Path(of)) if "/" in of else None
        checkpoints = whole_checkpoints(
            self.stage(of) / "checkpoints"
        )  # an absolute path stays itself
        for checkpoint in [*checkpoints, *([outside] if outside else [])]:
            if checkpoint.digest == digest:
                return checkpoint.path
        raise NotAuditable(f"the checkpoint of {of} that {stage} started from is gone")

    def checkpoint(self, stage: str, step: int) -> Path | None:
        """Return the complete checkpoint of a step, or None if it was not kept."""
        checkpoint = read_checkpoint(self.stage(stage) / "checkpoints" / f"step_{step}")
        return checkpoint.path if checkpoint else None


class _StepReward(msgspec.Struct):
    end: int
    reward: float


class _Row(msgspec.Struct):
    """A sample as `stages.sampling.sample_files` writes it; other columns are ignored."""

    domain: str
    reward: float | None
    reward_parts: list[tuple[str, float]] | None
    step_rewards: list[_StepReward] | None
    advantage: float
    finish_reason: Literal["stop", "length"]
    weight_version: int
    group: int
    update: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    logprobs: list[float] | None = None
    advantages: list[float] | None = None
    learned: list[int] | None = None
    row: int | None = None  # in its source


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors about unreadable content."""
    try:
        yield
    except (NotAuditable, CheckpointRefused, OSError):
        raise
    except UnicodeDecodeError as error:  # whose message quotes the whole file
        raise NotAuditable(f"{path} is damaged: it is not UTF-8 text") from error
    except CheckpointException as error:  # a BaseException whose message quotes whole tracebacks
        raise NotAuditable(f"{path} is damaged: torch cannot read its tensors") from error
    except Exception as error:  # zip, pickle and JSON each raise their own
        raise NotAuditable(f"{path} is damaged: {repr(error)[:LONGEST]}") from error


def document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        NotAuditable: it holds anything else.
    """
    with naming(path):
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise NotAuditable(f"{path} is damaged: it holds no JSON object")
        return content


def read_run(path: Path) -> RecordedRun:
    with naming(path / "run.yaml"):
        settings = yaml.safe_load(read_text(path / "run.yaml"))
        if not isinstance(settings, dict):
            raise NotAuditable(f"{path}/run.yaml is damaged: it holds no settings")
        return RecordedRun(path, settings)


def metrics(stage: Path, step: int) -> dict[str, float]:
    """Return the metrics of a step; the last ones, where it was repeated."""
    logged: dict[str, float] = {}
    with naming(stage / "metrics.jsonl"):
        for line in read_text(stage / "metrics.jsonl").splitlines():
            entry = json.loads(line)
            if entry["step"] == step:
                logged = entry
    if not logged:
        raise NotAuditable(f"{stage}/metrics.jsonl has no step {step}")
    return logged


def samples(path: Path) -> list[RecordedSample]:
    """Read the Parquet file of a step's samples, and the arrays beside it if there are any."""
    if not path.exists():
        raise NotAuditable(f"no samples at {path}; rerun the step with logging.auditable=true")
    with naming(path), open_file(path) as file:
        records = parquet.ParquetFile(file).read(use_threads=False).to_pylist()
        rows = [msgspec.convert(row, _Row) for row in records]
        for number, row in enumerate(rows):
            _check(row, f"{path}, sample {number}")
        if not rows:
            raise NotAuditable(f"{path} is damaged: it is empty")
    arrays = path.with_suffix(".npz")
    if not arrays.exists():
        return [_sample_of(row, None, None) for row in rows]
    with naming(arrays), open_file(arrays) as file, np.load(file) as held:
        lengths = [len(row.prompt_tokens) + len(row.response_tokens) - 1 for row in rows]
        routes = iter(_cut(held["routes"], lengths))
        counts = held["kept_counts"].tolist()
        sets = iter(_cut(held["kept"], counts)) if counts else None
        return [_sample_of(row, next(routes, None), sets) for row in rows]


def _check(row: _Row, place: str) -> None:
    """Raise NotAuditable where a sample's arrays differ in length, or a number is not finite."""
    count = len(row.response_tokens)
    arrays = {"logprobs": row.logprobs, "advantages": row.advantages}  # null: it has none
    lengths = {name: len(values) for name, values in arrays.items() if values is not None}
    if not row.prompt_tokens or not count or set(lengths.values()) - {count}:
        raise NotAuditable(f"{place} is damaged: {count} response_tokens, {lengths}")
    if row.learned is not None and not set(row.learned) <= set(range(count)):
        raise NotAuditable(f"{place} is damaged: not all of `learned` are its tokens")
    numbers = [row.reward or 0.0, row.advantage, *(row.logprobs or []), *(row.advantages or [])]
    if not all(map(math.isfinite, numbers)):
        raise NotAuditable(f"{place} is damaged: not all of its numbers are finite")


def _cut(array: np.ndarray, counts: list[int]) -> list[np.ndarray]:
    """Return the parts of an array, of the given numbers of rows; empty where it has no rows."""
    return np.split(array, np.cumsum(counts)[:-1]) if len(array) else []


def _sample_of(
    row: _Row, routes: np.ndarray | None, sets: Iterator[np.ndarray] | None
) -> RecordedSample:
    response = torch.tensor(row.response_tokens)
    learned = range(len(response)) if row.learned is None else row.learned
    steps, reward_parts = row.step_rewards, row.reward_parts
    return RecordedSample(
        domain=row.domain,
        prompt=torch.tensor(row.prompt_tokens),
        response=response,
        logprobs=torch.tensor(row.logprobs or [], dtype=torch.float64),
        learned=torch.tensor(learned, dtype=torch.int64),
        update=row.update,
        group=row.group,
        fields={
            **msgspec.structs.asdict(row),
            "finished": row.finish_reason == "stop",
            "reward_parts": None if reward_parts is None else dict(reward_parts),
            "step_rewards": None if steps is None else [(step.end, step.reward) for step in steps],
        },
        routes=None if routes is None else torch.from_numpy(routes.astype(np.int64)),
        kept_ids=None
        if sets is None
        else [torch.from_numpy(next(sets).astype(np.int64)) for _ in response],
    )


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, unsharded and in float64."""
    reader = CheckpointReader(checkpoint)
    state_dict = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with naming(checkpoint):
        dcp.load(state_dict, storage_reader=reader, no_dist=True)
    return {name: tensor.double() for name, tensor in state_dict.items()}
