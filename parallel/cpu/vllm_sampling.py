"""The sampling of vLLM's Model Runner V2 on a CPU, without Triton.

The other half of `vllm_runner`, which says why. A token is sampled by Gumbel noise, whose random
numbers are a hash of the request's seed, the position and the token: they depend on no other
request, nor on how the work is cut.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

CACHED = 1 << 16  # random numbers computed at once: their bits stay in a core's cache


def _divide_by_temperature(
    logits: Tensor, _stride: int, idx_mapping: Tensor, temperature: Tensor, *_: Any, **__: Any
) -> None:
    """Divide the logits of requests that are not greedy."""
    divisors = temperature[idx_mapping]
    logits.div_(divisors.masked_fill(divisors == 0, 1.0)[:, None])


def _sample(
    local_argmax: Tensor,
    _argmax_stride: int,
    local_max: Tensor,
    _max_stride: int,
    _cache: None,  # this and what follows: of draft models
    _cache_stride_0: int,
    _cache_stride_1: int,
    _cache_column: None,
    _cache_source: None,
    _cache_source_stride: int,
    logits: Tensor,
    _stride: int,
    idx_mapping: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    _vocabulary: int,
    **_: Any,
) -> None:
    """Sample by Gumbel noise, which depends on a request's seed, the position and the token alone.

    The kernel leaves the best token of each block of the vocabulary: here the first block's is that
    of the whole.
    """
    uniform = _uniform(seeds[idx_mapping].numpy(), positions.numpy(), logits.shape[1])
    # Of the tail near 0, which decides who wins, fp32 has the fine resolution.
    noised = torch.from_numpy(uniform).neg_().log1p_().neg_().log_().neg_()
    greedy = temperature[idx_mapping] == 0
    if greedy.any():
        noised.masked_fill_(greedy[:, None], 0.0)
    noised += logits
    local_max.fill_(-torch.inf)
    best = noised.max(-1)
    local_max[:, 0], local_argmax[:, 0] = best.values, best.indices


def _uniform(seeds: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return vLLM's uniform random numbers, fp32 [requests, vocabulary] in (0, 1].

    They are MurmurHash3 of a seed, a position and a token, as in `murmur3_uniform32`.
    """
    state = np.zeros(len(seeds), np.uint32)
    for words in (seeds, seeds >> 32, positions):
        state = _mix(state, _scrambled((words & 0xFFFFFFFF).astype(np.uint32)))
    uniform = np.empty((len(seeds), vocabulary), np.float32)
    tokens = _scrambled_tokens(vocabulary)
    rows = max(1, CACHED // vocabulary)
    for row in range(0, len(seeds), rows):
        bits = state[row : row + rows, None] ^ tokens
        shifted = bits >> 19
        bits <<= 13
        bits |= shifted
        bits *= 5
        bits += 0xE6546B64
        bits ^= 16  # bytes of the four words
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits ^= np.right_shift(bits, shift, out=shifted)
            bits *= np.uint32(factor)
        bits ^= np.right_shift(bits, 16, out=shifted)
        np.multiply(bits + 0.5, 2.0**-32, out=uniform[row : row + rows], casting="same_kind")
    return uniform


def _mix(state: np.ndarray, scrambled: np.ndarray) -> np.ndarray:
    return _rotated(state ^ scrambled, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _scrambled(words: np.ndarray) -> np.ndarray:
    return _rotated(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _rotated(words: np.ndarray, shift: int) -> np.ndarray:
    return words << np.uint32(shift) | words >> np.uint32(32 - shift)


@lru_cache(maxsize=1)
def _scrambled_tokens(vocabulary: int) -> np.ndarray:
    return _scrambled(np.arange(vocabulary, dtype=np.uint32))


def _log_softmax(
    output: Tensor, logits: Tensor, _stride: int, ids: Tensor, *_: Any, **__: Any
) -> None:
    """Write the log-probabilities of tokens, [requests, tokens] of ids."""
    torch.gather(logits.log_softmax(-1, torch.float32), -1, ids, out=output)


def _ranks(output: Tensor, logits: Tensor, _stride: int, ids: Tensor, *_: Any, **__: Any) -> None:
    """Write the number of logits that are no smaller than the sampled token's."""
    torch.sum(logits >= logits.gather(-1, ids[:, None]), -1, out=output)


def _compact_masks(
    logits: Tensor,
    _row_stride: int,
    _column_stride: int,
    _cu_num_logits: Tensor,
    num_sampled: Tensor,
    ids: Tensor,
    _ids_stride: int,
    packed: Tensor,
    _packed_stride: int,
    counts: Tensor,
    _vocabulary: int,
    most: int,
    **_: Any,
) -> None:
    """Write the ids with finite logits: the first `most` of each row, their number, and as bits."""
    kept = logits.isfinite() & (num_sampled > 0)[:, None]
    torch.sum(kept, -1, dtype=counts.dtype, out=counts)
    packed.copy_(torch.from_numpy(np.packbits(kept.numpy(), axis=1, bitorder="little")))
    for row, mask in enumerate(kept):
        found = mask.nonzero()[:most, 0]
        ids[row, : len(found)] = found.to(ids.dtype)


SAMPLE = "vllm.v1.worker.gpu.sample"
KERNELS = {
    f"{SAMPLE}.gumbel._temperature_kernel": _divide_by_temperature,
    f"{SAMPLE}.gumbel._gumbel_sample_kernel": _sample,
    f"{SAMPLE}.logprob._topk_log_softmax_kernel": _log_softmax,
    f"{SAMPLE}.logprob._ranks_kernel": _ranks,
    f"{SAMPLE}.output._compact_sampling_mask_kernel": _compact_masks,
}
