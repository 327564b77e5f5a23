"""The record of a step's samples: tokens, text, and the arrays that an audit needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from parallel.files import naming, write_atomically
from parallel.sample import Sample
from stages.data.tokenizer import Tokenizer


def samples_file(directory: Path, step: int) -> Path:
    """Return the file of a step's samples in a directory."""
    return directory / f"step_{step:06d}.jsonl"


def record(
    path: Path,
    updates: Sequence[Sequence[Sample]],
    tokenizer: Tokenizer,
    auditable: bool,
    rows: Sequence[int] = (),
) -> None:
    """Write the samples of each of a step's updates as JSON lines.

    With `auditable`, arrays go to a file of the same name that ends in .npz: `routes` uint16
    [tokens read, routed layers, experts_per_token], all samples concatenated; and where top-k or
    top-p keep a part of the vocabulary, the `kept` tokens, int32, concatenated, and their number at
    each response token, `kept_counts` int32 [response tokens]. `rows` are the samples' rows in
    their sources, where they have some.

    Raises:
        OSError: such as a full disk.
    """
    if auditable:
        _write_arrays(path.with_suffix(".npz"), [each for update in updates for each in update])
    lines = []
    for number, sample in ((n, sample) for n, update in enumerate(updates) for sample in update):
        line = {
            "domain": sample.domain,
            "prompt": tokenizer.decode(sample.prompt),
            "response": tokenizer.decode(sample.response),
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
            "step_rewards": sample.step_rewards,
            "advantage": sample.advantage,
            "finished": sample.finished,
            "weight_version": sample.weight_version,
            "update": number,
            "group": sample.group,
            "prompt_tokens": sample.prompt.tolist(),
            "response_tokens": sample.response.tolist(),
            "logprobs": [] if sample.logprobs is None else sample.logprobs.tolist(),
        }
        if sample.advantages is not None:
            line["advantages"] = sample.advantages.tolist()
        if sample.loss_mask is not None:
            line["learned"] = sample.learned.tolist()
        if sample.demonstrated:
            line["demonstrated"] = True
        lines.append(line)
    for line, row in zip(lines, rows, strict=False):
        line["row"] = row
    write_atomically(path, msgspec.json.Encoder().encode_lines(lines).decode())


def _write_arrays(path: Path, samples: Sequence[Sample]) -> None:
    routes = [sample.routes for sample in samples if sample.routes is not None]
    kept: list[np.ndarray] = []
    if any(sample.kept is not None for sample in samples):
        for sample in samples:  # without sets, it keeps the whole vocabulary: empty sets
            kept += sample.kept or [np.empty(0, np.int32)] * len(sample.response)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), temporary.open("wb") as file:
            np.savez_compressed(
                file,
                routes=np.concatenate(routes) if routes else np.empty(0, np.uint16),
                kept=np.concatenate(kept) if kept else np.empty(0, np.int32),
                kept_counts=np.array([len(each) for each in kept], np.int32),
            )
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
