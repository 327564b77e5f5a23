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
    part = responses.batch
    recorded = [is_recorded(sample, share) for sample in part.samples]
    if not any(recorded) or "entropies" in part.recorded:
        return
    assert part.old_logprobs is not None and isinstance(responses.logits, Tensor)
    logits, of = responses.logits, part.place // part.mask.shape[1]
    rows = torch.tensor(recorded, device=logits.device)[of]
    entropies = part.mask.new_zeros(len(rows), dtype=torch.float32)
    kept = responses.sampled_from
    if not all(recorded):
        logits, kept = logits[rows], None if kept is None else kept[rows]
    entropies[rows] = vocabulary.entropy(logits, temperature, kept).float()
    add_observed(part, "trainer_logprobs", part.old_logprobs, first=True)
    add_observed(part, "entropies", part.spread(entropies))


def add_observed(part: MicroBatch, column: str, values: Tensor, first: bool = False) -> None:
    """Add values [B, R] to a column of a micro-batch that `observe` has found recorded samples in.

    With `first`, it is the one that finds them.
    """
    if part.recorded or first:
        known = part.recorded.get(column)
        values = values.detach().float().masked_fill(~part.mask, 0.0)
        part.recorded[column] = values if known is None else known + values


def collect_observed(
    updates: Sequence[tuple[Sequence[Sample], Sequence[MicroBatch]]], share: float
) -> None:
    """Give the main rank's samples what was observed of them on any rank. Collective.

    Each update is its samples, equal on all ranks but for outlines, and this rank's micro-batches.
    """
    own: list[Observed] = []
    if _speaks():
        for number, (samples, batches) in enumerate(updates):
            places = {id(sample): place for place, sample in enumerate(samples)}
            own += [
                (number, places[id(sample)], values)
                for part in batches
                for sample, values in _by_sample(part)
                if is_recorded(sample, share)
            ]
    for found in gather_on_main(own):
        for number, place, values in found:
            updates[number][0][place].recorded = values


def _speaks() -> bool:
    """Return whether this rank is the one of its data-parallel rank that has the values."""
    return parallel_state.is_pipeline_last_stage() and not (
        parallel_state.get_tensor_model_parallel_rank()
        or parallel_state.get_context_parallel_rank()
    )


def _by_sample(part: MicroBatch) -> list[tuple[Sample, dict[str, np.ndarray]]]:
    columns = {name: values.cpu().numpy() for name, values in part.recorded.items()}
    return [
        (sample, {name: values[row, : len(sample.response)] for name, values in columns.items()})
        for row, sample in enumerate(part.samples)
        if columns
    ]
