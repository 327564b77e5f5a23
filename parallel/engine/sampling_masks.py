"""The sets of ids that tokens were sampled from, as vLLM returns them.

On a CPU they are the ids with finite log-probabilities, which costs an object for each id. Model
Runner V2, the runner of GPUs, returns masks instead (`return_sampling_mask`), for all requests of
an engine or for none; here a request that keeps the whole vocabulary gets empty ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np

from parallel.engine.wire import Sampling, keeps_part


def kept_sets(completion: Any, sampling: Sampling, vocabulary: int) -> list[np.ndarray]:
    """Return the set that each token was sampled from; no sets where all ids are kept.

    `completion` is a CompletionOutput of vLLM's, with masks or with log-probabilities.
    """
    if not keeps_part(sampling.top_k, sampling.top_p):
        return []
    if completion.sampling_mask is not None:
        masks, whole = completion.sampling_mask.token_ids, range(vocabulary)
        return [np.asarray(ids or whole, np.int32) for ids in masks]
    finite = (
        [t for t, candidate in e.items() if isfinite(candidate.logprob)]
        for e in completion.logprobs
    )
    return [np.asarray(ids, np.int32) for ids in finite]


def empty_whole_masks() -> None:
    """Make the mask of a token that keeps the whole vocabulary empty, in this worker process.

    vLLM would unpack one of 150,000 ids for each token, and keep it until the response ends. It
    rejects such requests instead, greedy ones too (`Core` skips that check): the engine of a run
    with one domain of a top_k would serve no evaluation.
    """
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    original: Callable[[Any], Any] = SamplingMaskTensors.tolists

    def bounded(masks: Any) -> Any:
        counts = masks.counts.cpu()
        return original(masks._replace(counts=counts.masked_fill(counts == masks.vocab_size, 0)))

    SamplingMaskTensors.tolists = bounded
