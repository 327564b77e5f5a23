"""The trainer's values of tokens that a viewer shows: log-probabilities, entropies, losses.

Of a share of the prompts, `logging.tokens`, since an entropy reads a whole row of logits, which
over a large vocabulary is not free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from parallel.batch import MicroBatch, Responses
from parallel.distributed import gather_on_main
from parallel.model import vocabulary
from parallel.sample import Sample

# Of the hash of a prompt, the last digits decide whether it is recorded: by the first ones it is
# trained on or held out, and of those trained on a small share would record none.
DIGITS = 8

Observed = tuple[int, int, dict[str, np.ndarray]]  # the update, the sample's number in it, values


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
