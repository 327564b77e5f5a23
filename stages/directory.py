"""The directory of a stage: what a stage leaves, and where. Never imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Protocol
from urllib.parse import quote

from parallel.errors import UserError
from parallel.files import (
    ENDED,
    RESTART_REQUEST,
    STATE,
    Checkpoint,
    newest_whole,
    numbered,
    read_checkpoint,
    read_text,
    sha256,
    whole_checkpoints,
    write_atomically,
)

COLLECTION = "collection.json"


class _Directory(Protocol):
    @property
    def path(self) -> Path: ...


class Below:
    """An attribute of a directory's class: the path of this name below the directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: _Directory, _: object) -> Path:
        return directory.path / self._name


@dataclass(frozen=True)
class StageDirectory:
    """The directory of one stage, `runs/NAME/stages/STAGE`."""

    path: Path

    manifest = Below("manifest.json")  # its lineage
    lock = Below("stage.lock")  # held by the stage's launcher
    engines = Below("engine")  # of the engines that serve only this stage
    metrics = Below("metrics.jsonl")  # one line per step
    checkpoints = Below("checkpoints")
    rollouts = Below("rollouts")  # the samples of every step
    routing = Below("routing")  # the experts that recorded samples of every step used
    samples = Below("samples")  # an evaluation's answers; of sft and dpo, for `braid audit`
    results = Below("results.json")  # the accuracies that an evaluation or a gate measured
    measured = Below("models")  # those so far, one file per model
    solved = Below("solved")  # the problems that each model solved
    problems = Below("problems.json")  # their keys, by domain
    verdict = Below("verdict.json")  # of a gate on what it measured
    drawn = Below("drawn")  # all responses that a stage of kind sample drew, part by part
    all_drawn = Below("drawn.parquet")  # the same in one file, where its filter left nothing
    collected = Below("collected.parquet")  # the responses that a stage of kind sample kept
    collection = Below(COLLECTION)  # their digest and counts, written last
    hidden_states = Below("hidden_states")  # of teachers, while a step of a merge needs them
    reference = Below("reference.npz")  # log-probabilities of pairs under a reference
    exported = Below("huggingface")  # the Hugging Face checkpoint of an export

    def job(self, attempt: int) -> Path:
        """Return the path of an attempt's job; the logs of its processes are beside it."""
        return self.path / f"attempt_{attempt}" / "job.json"

    def memory(self, attempt: int) -> Path:
        """Return the path of the peak memory of an attempt's ranks, written when it ends well."""
        return self.job(attempt).with_name("memory.json")

    def timeline(self, attempt: int, rank: int) -> Path:
        """Return the path of the phases of an attempt's rank."""
        return self.job(attempt).with_name(f"timeline_{rank}.jsonl")

    def heartbeat(self, attempt: int, rank: int) -> Path:
        """Return the path of the file whose time an attempt's rank sets while it lives."""
        return self.job(attempt).with_name(f"alive_{rank}")

    def tracker_id(self) -> str:
        """Return what names this training in trackers: made once, and moved with the directory."""
        path = self.path / "tracker_id"
        if not path.exists():
            write_atomically(path, token_hex(4))
        return read_text(path)

    def parents(self) -> dict[str, str]:
        """Return the digests of what the stage was started from, by name, as its manifest has."""
        try:
            parents = json.loads(read_text(self.manifest))["parents"]
            return {str(name): str(digest) for name, digest in parents.items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return {}

    def attempts(self) -> int:
        """Return the number of attempts so far."""
        return max((number for number, _ in numbered(self.path, "attempt_")), default=0)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the whole checkpoint with the highest step."""
        return newest_whole(self.checkpoints)

    def output(self) -> Checkpoint | None:
        """Return what other stages load: the newest whole checkpoint, or else collected samples."""
        if (checkpoint := self.newest_checkpoint()) is not None:
            return checkpoint
        try:
            digest = json.loads(read_text(self.collection))["digest"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return Checkpoint(self.collected, 0, str(digest), {})

    def check_collected(self) -> None:
        """Read the collected responses whole.

        Raises:
            UserError: they are damaged or gone, or their stage has not finished.
        """
        output, here = self.output(), self.collected
        if output is None or output.path != here or not here.is_file():
            raise UserError(f"{here}: no collected responses; rerun the stage {self.path.name}")
        if sha256(here) != output.digest:
            raise UserError(
                f"{here}: damaged: its SHA-256 differs from the one in {COLLECTION}; restore it, or"
                f" rerun the stage {self.path.name}"
            )

    def checkpoint(self, step: int) -> Checkpoint | None:
        """Return the whole checkpoint of a step."""
        return read_checkpoint(self.checkpoints / f"step_{step}")

    def whole_checkpoints(self) -> list[Checkpoint]:
        """Return all whole checkpoints, the oldest first."""
        return whole_checkpoints(self.checkpoints)


def file_name(model: str) -> str:
    """Return the name of a model's files: of one outside the run, its path without slashes."""
    return quote(model, safe="")


def ended_early(checkpoint: Checkpoint | None) -> str | None:
    """Return why the stage stopped at this checkpoint before its last step; None if it did not.

    A damaged state.json gives None too: the stage that loads it raises the error.
    """
    if checkpoint is None:
        return None
    try:
        state = json.loads(read_text(checkpoint.path / STATE))
    except (OSError, ValueError, RecursionError):
        return None
    reason = state.get(ENDED) if isinstance(state, dict) else None
    return reason if isinstance(reason, str) else None


@dataclass(frozen=True)
class EngineDirectory:
    """The directory of one engine."""

    path: Path

    job = Below("engine.json")  # which the engine's process reads
    log = Below("engine.log")
    timeline = Below("timeline.jsonl")  # its phases, over its processes and stages
    address = Below("address.json")  # which the engine writes when it is ready
    meeting = Below("members.json")  # where the first of an engine's members publishes
    restart = Below(RESTART_REQUEST)  # the reason why a rank requests a restart
