"""The record of samples: what a viewer shows of each, and the arrays that an audit needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from parallel.errors import valid_text
from parallel.files import replacing
from parallel.sample import Sample
from stages.data.tokenizer import Tokenizer
from stages.rewards.reward import RewardBase, solved
from stages.sampling.sample_files import Row, write_samples

Rewards = Mapping[str, Mapping[str, RewardBase]]  # by domain and name

# Columns that are attributes of a sample.
AS_THEY_ARE = (
    *("domain", "group", "demonstrated", "weight_version", "reward", "reward_parts"),
    *("reward_messages", "reward_failure", "advantage", "advantages", "logprobs"),
)


def record(
    path: Path,
    step: int,
    updates: Sequence[Sequence[Sample]],
    tokenizer: Tokenizer,
    rewards: Rewards,
    auditable: bool,
    rows: Sequence[int] = (),
) -> None:
    """Write the samples of each of a step's updates in the columns of `sample_files`.

    With `auditable`, arrays go to a file of the same name that ends in .npz: `routes` uint16
    [tokens read, routed layers, experts_per_token], all samples concatenated; and where top-k or
    top-p keep a part of the vocabulary, the `kept` tokens, int32, concatenated, and their number at
    each response token, `kept_counts` int32 [response tokens]. `rows` are the samples' rows in
    their sources, where they have some.

    Raises:
        OSError: such as a full disk.
    """
    samples = [sample for update in updates for sample in update]
    if auditable:
        _write_arrays(path.with_suffix(".npz"), samples)
    prompt = cache(lambda ids: valid_text(tokenizer.decode_prompt(np.frombuffer(ids, np.int32))))
    lines = [
        {
            "step": step,
            "update": number,
            **{name: getattr(sample, name) for name in AS_THEY_ARE},
            **sample.recorded,
            "problem": sample.problem or None,
            "prompt": prompt(sample.prompt.tobytes()),  # a group has the same
            "answer": valid_text(sample.answer) or None,
            "response": valid_text(tokenizer.decode(sample.response.tolist())),
            "prompt_tokens": sample.prompt,
            "response_tokens": sample.response,
            "tokens": len(sample.response),
            "finish_reason": "stop" if sample.finished else "length",
            "solved": _is_solved(sample, rewards),
            "step_rewards": _steps(sample),
            "staleness": None if sample.versions is None else step - sample.weight_version,
            "learned": None if sample.loss_mask is None else sample.learned,
        }
        for number, update in enumerate(updates)
        for sample in update
    ]
    for line, row in zip(lines, rows, strict=False):
        line["row"] = row
    write_samples(path, lines)


def _steps(sample: Sample) -> list[Row] | None:
    if sample.step_rewards is None:
        return None
    return [{"end": end, "reward": reward} for end, reward in sample.step_rewards]


def _is_solved(sample: Sample, rewards: Rewards) -> bool | None:
    if sample.reward is None or sample.reward_parts is None or sample.domain not in rewards:
        return None
    return solved(rewards[sample.domain], sample.reward_parts)


def _write_arrays(path: Path, samples: Sequence[Sample]) -> None:
    routes = [sample.routes for sample in samples if sample.routes is not None]
    kept_ids: list[np.ndarray] = []
    if any(sample.kept is not None for sample in samples):
        for sample in samples:  # without sets, it keeps the whole vocabulary: empty sets
            kept_ids += sample.kept or [np.empty(0, np.int32)] * len(sample.response)
    with replacing(path, sync=False) as file:
        np.savez_compressed(
            file,
            routes=np.concatenate(routes) if routes else np.empty(0, np.uint16),
            kept=np.concatenate(kept_ids) if kept_ids else np.empty(0, np.int32),
            kept_counts=np.array([len(token_ids) for token_ids in kept_ids], np.int32),
        )
