"""The record of a step's samples: what a viewer shows of each, and the arrays that an audit needs.

Of a share of the prompts, `logging.tokens`, it has the trainer's values of every token too
(log-probabilities, entropies, losses) and the experts used: an entropy reads a whole row of logits,
which over a large vocabulary is not free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import torch
from megatron.core import parallel_state
from torch import Tensor

from parallel.batch import MicroBatch, Responses
from parallel.distributed import gather_on_main
from parallel.errors import valid_text
from parallel.files import replacing
from parallel.model import vocabulary
from parallel.sample import Sample
from stages.data.tokenizer import Tokenizer
from stages.rewards.reward import RewardBase, solved
from stages.sampling.sample_files import Row, write_samples, write_table

Rewards = Mapping[str, Mapping[str, RewardBase]]  # by domain and name

# Columns that are attributes of a sample.
AS_THEY_ARE = (
    *("domain", "group", "demonstrated", "weight_version", "reward", "reward_parts"),
    *("reward_messages", "reward_failure", "advantage", "advantages", "logprobs"),
)

# Of the hash of a prompt, the last digits decide whether it is recorded: by the first ones it is
# trained on or held out, and of those trained on a small share would record none.
DIGITS = 8

Observed = tuple[int, int, dict[str, np.ndarray]]  # the update, the sample's number in it, values

# `slots[e]` of a routed layer are the tokens, of a domain's recorded samples, that expert e was
# among the chosen of; in all, tokens times experts_per_token.
LOADS = pyarrow.schema(
    {
        "step": pyarrow.int32(),
        "domain": pyarrow.string(),
        "layer": pyarrow.int32(),
        "slots": pyarrow.list_(pyarrow.int64()),
    }
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


def is_recorded(sample: Sample, share: float) -> bool:
    """Return whether a sample's prompt is among the share; the same prompts in every step."""
    return bool(sample.problem) and int(sample.problem[-DIGITS:], 16) < share * 16**DIGITS


@torch.no_grad()
def observe(responses: Responses, temperature: float, share: float) -> None:
    """Keep the entropies of the micro-batch's recorded samples in it, and pi_old."""
    micro_batch = responses.batch
    recorded = [is_recorded(sample, share) for sample in micro_batch.samples]
    if not any(recorded) or "entropies" in micro_batch.recorded:
        return
    assert micro_batch.old_logprobs is not None and isinstance(responses.logits, Tensor)
    logits, of = responses.logits, micro_batch.place // micro_batch.mask.shape[1]
    rows = torch.tensor(recorded, device=logits.device)[of]
    entropies = micro_batch.mask.new_zeros(len(rows), dtype=torch.float32)
    sampled_from = responses.sampled_from
    if not all(recorded):
        logits, sampled_from = logits[rows], None if sampled_from is None else sampled_from[rows]
    entropies[rows] = vocabulary.entropy(logits, temperature, sampled_from).float()
    add_observed(micro_batch, "trainer_logprobs", micro_batch.old_logprobs, create=True)
    add_observed(micro_batch, "entropies", micro_batch.spread(entropies))


def add_observed(
    micro_batch: MicroBatch, column: str, values: Tensor, create: bool = False
) -> None:
    """Add values [B, R] to a column of a micro-batch that `observe` has found recorded samples in.

    With `create`, it is the one that finds them.
    """
    if micro_batch.recorded or create:
        previous = micro_batch.recorded.get(column)
        values = values.detach().float().masked_fill(~micro_batch.mask, 0.0)
        micro_batch.recorded[column] = values if previous is None else previous + values


def collect_observed(
    updates: Sequence[tuple[Sequence[Sample], Sequence[MicroBatch]]], share: float
) -> None:
    """Give the main rank's samples what was observed of them on any rank. Collective.

    Each update is its samples, equal on all ranks but for outlines, and this rank's micro-batches.
    """
    observed: list[Observed] = []
    if _speaks():
        for number, (samples, batches) in enumerate(updates):
            places = {id(sample): place for place, sample in enumerate(samples)}
            observed += [
                (number, places[id(sample)], values)
                for micro_batch in batches
                for sample, values in _by_sample(micro_batch)
                if is_recorded(sample, share)
            ]
    for rank_observed in gather_on_main(observed):
        for number, place, values in rank_observed:
            updates[number][0][place].recorded = values


def _speaks() -> bool:
    """Return whether this rank is the one of its data-parallel rank that has the values."""
    return parallel_state.is_pipeline_last_stage() and not (
        parallel_state.get_tensor_model_parallel_rank()
        or parallel_state.get_context_parallel_rank()
    )


def _by_sample(micro_batch: MicroBatch) -> list[tuple[Sample, dict[str, np.ndarray]]]:
    columns = {name: values.cpu().numpy() for name, values in micro_batch.recorded.items()}
    return [
        (sample, {name: values[row, : len(sample.response)] for name, values in columns.items()})
        for row, sample in enumerate(micro_batch.samples)
        if columns
    ]


def record_loads(
    path: Path, step: int, samples: Sequence[Sample], experts: int, share: float
) -> dict[str, float]:
    """Write how often each expert was chosen, by the samples of the share of prompts.

    Return the metric `idle_experts`. Nothing is written, and nothing returned, where no engine gave
    its routes, as with `routing.replay: none`.

    Raises:
        OSError: such as a full disk.
    """
    by_domain: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        if sample.routes is not None and is_recorded(sample, share):
            by_domain.setdefault(sample.domain, []).append(sample.routes)
    if not by_domain:
        return {}
    slots = {domain: expert_slots(routes, experts) for domain, routes in sorted(by_domain.items())}
    rows = [
        {"step": step, "domain": domain, "layer": layer, "slots": layer_slots}
        for domain, domain_slots in slots.items()
        for layer, layer_slots in enumerate(domain_slots)
    ]
    write_table(path, rows, LOADS)
    used = np.any([domain_slots > 0 for domain_slots in slots.values()], axis=0)
    return {"idle_experts": float(1 - used.mean())}


def expert_slots(routes: Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Return how often each expert is in routes [tokens, layers, K]; int64 [layers, experts].

    Example: one sample of 2 tokens, one layer of 4 experts, K = 2:

    >>> expert_slots([np.array([[[0, 2]], [[2, 3]]])], experts=4).tolist()
    [[1, 0, 2, 1]]
    """
    layers = routes[0].shape[1]
    counts = np.zeros(layers * experts, np.int64)
    layer_offsets = np.arange(layers)[:, None] * experts  # a layer's experts follow those before it
    for sample_routes in routes:
        counts += np.bincount(
            (sample_routes.astype(np.int64) + layer_offsets).ravel(), minlength=len(counts)
        )
    return counts.reshape(layers, experts)
