"""vLLM's Model Runner V2 on a CPU, without Triton.

vLLM 0.32 returns routed experts and sampling masks from its second model runner only, and runs that
one on a CPU by triton-cpu, of which no registry has a build. Here its Triton kernels are torch
functions, registered as vllm-project/vllm#55847 ("Torch fallbacks for Model Runner V2 kernels")
proposes; a vLLM with that change needs none of this. Drafts, padding and context parallelism, which
the kernels know as well, do not occur in Braid's engines on a CPU.

A name in capitals is a constant of a kernel's launch, and `_` what a tensor itself knows.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

INPUT, BUFFERS, TABLES, SAMPLE = (
    f"vllm.v1.worker.gpu.{name}"
    for name in ("input_batch", "buffer_utils", "block_table", "sample")
)
HYBRID = "vllm.v1.worker.gpu.model_states.mamba_hybrid"


def provide() -> None:
    """Have vLLM's second model runner run here; call before an engine's configuration is created.

    Workers are forked from this process.
    """
    # First of all, as vLLM's CPU worker does: it replaces what the others import.
    import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip
    from vllm import triton_utils
    from vllm.config import vllm as configuration
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils.math_utils import next_power_of_2
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter

    if configuration.HAS_TRITON:  # one for CPUs, or patched already
        return
    configuration.HAS_TRITON = True
    triton_utils.triton.next_power_of_2 = next_power_of_2
    register_kernels(
        {
            f"{BUFFERS}._apply_write_kernel": _apply_writes,
            f"{INPUT}._prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
            f"{INPUT}._prepare_pos_seq_lens_kernel": _prepare_positions,
            f"{INPUT}._combine_sampled_and_draft_tokens_kernel": _take_sampled_tokens,
            f"{INPUT}._get_num_sampled_and_rejected_kernel": _count_sampled,
            f"{INPUT}._post_update_kernel": _note_sampled,
            f"{SAMPLE}.gumbel._temperature_kernel": _divide_by_temperature,
            f"{SAMPLE}.gumbel._gumbel_sample_kernel": _sample,
            f"{SAMPLE}.logprob._topk_log_softmax_kernel": _log_softmax,
            f"{SAMPLE}.logprob._ranks_kernel": _ranks,
            "vllm.v1.worker.utils._zero_kv_blocks_kernel": _zero_blocks,
            f"{HYBRID}._scatter_num_accepted_kernel": _count_accepted,
            f"{SAMPLE}.output._compact_sampling_mask_kernel": _compact_masks,
        }
    )
    # These kernels take the addresses of tensors.
    FusedStagedWriter.apply = _apply_all_writes
    BlockTables.gather_block_tables = _gather_block_tables
    BlockTables.compute_slot_mappings = _compute_slot_mappings


def _apply_writes(
    output: Tensor,
    stride: int,
    rows: Tensor,
    starts: Tensor,
    contents: Tensor,
    ends: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Write each range of `contents`, up to its end, to a row from a start on."""
    flat, values, begin = output.view(-1).numpy(), contents.numpy(), 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        first = row * stride + start
        flat[first : first + end - begin] = values[begin:end]
        begin = end


def _apply_all_writes(_writer: Any, tensors: Any, *_: Any) -> None:
    for tensor in tensors:
        tensor.apply_write()


def _gather_block_tables(
    tables: Any, idx_mapping: Tensor, num_reqs_padded: int, out: Any = None, out_ptrs: Any = None
) -> tuple[Tensor, ...]:
    """Copy the rows of the batch's requests; return those of each group of the cache."""
    gathered = []
    for table, batch in zip(tables.block_tables, tables.input_block_tables, strict=True):
        torch.index_select(table.gpu, 0, idx_mapping, out=batch[: len(idx_mapping)])
        gathered.append(batch[:num_reqs_padded])
    return tuple(gathered)


def _compute_slot_mappings(
    tables: Any,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_tokens_padded: int,
    out: Tensor | None = None,
) -> Tensor:
    """Return where in the cache the batch's tokens are written, [groups, tokens]."""
    slots = tables.slot_mappings[:, :num_tokens_padded]
    requests = idx_mapping.repeat_interleave(query_start_loc[: len(idx_mapping) + 1].diff())
    tokens = positions[: len(requests)]
    for group, size in enumerate(tables.block_sizes):
        if tables._slot_mapping_enabled[group]:
            blocks = tables.block_tables[group].gpu[requests, tokens // size]
            slots[group, : len(requests)] = blocks * size + tokens % size
        else:
            slots[group] = -1
    return slots


def _prepare_prefill_inputs(
    input_ids: Tensor,
    _next_tokens: Tensor,  # read by draft models
    _next_stride: int,
    _lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    _stride: int,
    prefill_lens: Tensor,
    num_computed: Tensor,
    **_: Any,
) -> None:
    """Copy the tokens of requests in prefill to the batch's."""
    bounds = query_start_loc.tolist()
    computed, lengths = num_computed[idx_mapping].tolist(), prefill_lens[idx_mapping].tolist()
    for number, request in enumerate(idx_mapping.tolist()):
        if computed[number] < lengths[number]:
            start, end = bounds[number : number + 2]
            first = computed[number]
            input_ids[start:end] = all_token_ids[request, first : first + end - start]


def _prepare_positions(
    positions: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Write each token's position, and each request's length with this step's tokens."""
    bounds = query_start_loc[: len(idx_mapping) + 1]
    computed, lengths = num_computed[idx_mapping], bounds.diff()
    seq_lens.zero_()[: len(idx_mapping)] = computed + lengths
    offsets = (computed - bounds[:-1]).repeat_interleave(lengths)
    torch.add(torch.arange(len(offsets)), offsets, out=positions[: len(offsets)])


def _take_sampled_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_lens: Tensor,
    _drafts: Tensor,
    _stride: int,
    _cu_num_logits: Tensor,
    logits_indices: Tensor,
    **_: Any,
) -> None:
    """Make the token sampled last the input of each request after its prefill."""
    count = len(idx_mapping)
    torch.sub(query_start_loc[1 : count + 1], 1, out=logits_indices)
    after = seq_lens[:count] > prefill_lens[idx_mapping]
    input_ids[logits_indices[after]] = last_sampled[idx_mapping[after], 0].to(input_ids.dtype)


def _count_sampled(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    _cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_lens: Tensor,
) -> None:
    """Count no token of a request that is still in prefill."""
    num_sampled.masked_fill_(seq_lens[: len(idx_mapping)] < prefill_lens[idx_mapping], 0)
    num_rejected.zero_()


def _note_sampled(
    idx_mapping: Tensor,
    num_computed: Tensor,
    last_sampled: Tensor,
    _counts: Tensor | None,  # read by penalties
    _counts_stride: int,
    sampled: Tensor,
    _sampled_stride: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    _stride: int,
    total_len: Tensor,
    **_: Any,
) -> None:
    """Append the sampled tokens, one a request, and count the computed ones."""
    after = num_sampled > 0
    requests, tokens = idx_mapping[after], sampled[after, 0]
    last_sampled[requests, 0] = tokens
    all_token_ids[requests, total_len[requests].long()] = tokens.to(all_token_ids.dtype)
    total_len[requests] += 1
    num_computed[idx_mapping] += query_start_loc[: len(idx_mapping) + 1].diff()


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
    greedy = temperature[idx_mapping] == 0
    uniform = _uniform(seeds[idx_mapping].numpy(), positions.numpy(), logits.shape[1])
    # Of the tail near 0, which decides who wins, fp32 has the fine resolution.
    noise = torch.from_numpy(uniform).neg_().log1p_().neg_().log_().neg_()
    noised = logits + noise.masked_fill_(greedy[:, None], 0.0)
    local_max.fill_(-torch.inf)
    best = noised.max(-1)
    local_max[:, 0], local_argmax[:, 0] = best.values, best.indices


def _uniform(seeds: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return vLLM's uniform random numbers, fp32 [requests, vocabulary] in (0, 1).

    They are MurmurHash3 of a seed, a position and a token, as in `murmur3_uniform32`.
    """
    state = np.zeros(len(seeds), np.uint32)
    for words in (seeds, seeds >> 32, positions):
        state = _mix(state, _scrambled((words & 0xFFFFFFFF).astype(np.uint32)))
    bits = _mix(state[:, None], _scrambled_tokens(vocabulary)) ^ np.uint32(16)
    bits ^= bits >> 16
    bits *= np.uint32(0x85EBCA6B)
    bits ^= bits >> 13
    bits *= np.uint32(0xC2B2AE35)
    bits ^= bits >> 16
    return ((bits + 0.5) * 2.0**-32).astype(np.float32)


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


def _zero_blocks(
    addresses: Tensor, strides: Tensor, sizes: Tensor, block_ids: Tensor, **_: Any
) -> None:
    """Zero blocks of the cache, at addresses of numbers of 4 bytes."""
    for address, stride, size in zip(
        addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True
    ):
        for block in block_ids.tolist():
            ctypes.memset(address + 4 * stride * block, 0, 4 * size)


def _count_accepted(idx_mapping: Tensor, num_sampled: Tensor, num_accepted: Tensor) -> None:
    num_accepted[idx_mapping] = num_sampled.clamp(min=1)
