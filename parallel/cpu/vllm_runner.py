"""vLLM's Model Runner V2 on a CPU, without Triton.

vLLM 0.32 returns routed experts and sampling masks from its second model runner only, and runs that
one on a CPU by triton-cpu, of which no registry has a build. Here and in `vllm_sampling` its Triton
kernels are functions of torch and numpy, registered as vllm-project/vllm#55847 ("Torch fallbacks
for Model Runner V2 kernels") proposes; a vLLM with that change needs none of this. Drafts, padding
and context parallelism, which the kernels know as well, do not occur in Braid's engines on a CPU.

Integers are computed in numpy: of a few hundred numbers an operation of torch takes five times as
long. A name in capitals is a constant of a kernel's launch, and `_` what a tensor itself knows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.cpu import vllm_sampling

INPUT = "vllm.v1.worker.gpu.input_batch"
BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
HYBRID = "vllm.v1.worker.gpu.model_states.mamba_hybrid"


def provide() -> None:
    """Have vLLM's second model runner run here; call before an engine's configuration is created.

    Workers are forked from this process.
    """
    # First of all, as vLLM's CPU worker does: it replaces what the others import.
    import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip
    from vllm import triton_utils
    from vllm.config import vllm as configuration
    from vllm.platforms import current_platform
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
            **vllm_sampling.KERNELS,
            f"{BUFFERS}._apply_write_kernel": _apply_writes,
            f"{INPUT}._prepare_prefill_inputs_kernel": _prepare_prefill_inputs,
            f"{INPUT}._prepare_pos_seq_lens_kernel": _prepare_positions,
            f"{INPUT}._combine_sampled_and_draft_tokens_kernel": _take_sampled_tokens,
            f"{INPUT}._get_num_sampled_and_rejected_kernel": _count_sampled,
            f"{INPUT}._post_update_kernel": _note_sampled,
            "vllm.v1.worker.utils._zero_kv_blocks_kernel": _zero_blocks,
            f"{HYBRID}._scatter_num_accepted_kernel": _count_accepted,
        }
    )
    # Each worker would register the kernels of vLLM's first runner, by a scan of all modules.
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
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
    requests, bounds = idx_mapping.numpy(), query_start_loc.numpy()
    rows = requests.repeat(np.diff(bounds[: len(requests) + 1]))
    tokens = positions.numpy()[: len(rows)]
    for group, size in enumerate(tables.block_sizes):
        slots = tables.slot_mappings[group].numpy()[:num_tokens_padded]
        if tables._slot_mapping_enabled[group]:
            blocks, offsets = np.divmod(tokens, size)
            slots[: len(rows)] = tables.block_tables[group].gpu.numpy()[rows, blocks] * size
            slots[: len(rows)] += offsets
        else:
            slots[:] = -1
    return tables.slot_mappings[:, :num_tokens_padded]


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
    requests, bounds = idx_mapping.numpy(), query_start_loc.numpy()[: len(idx_mapping) + 1]
    computed, lengths = num_computed.numpy()[requests], np.diff(bounds)
    totals = seq_lens.numpy()
    totals[: len(requests)] = computed + lengths
    totals[len(requests) :] = 0
    offsets = (computed - bounds[:-1]).repeat(lengths)
    np.add(np.arange(len(offsets)), offsets, out=positions.numpy()[: len(offsets)])


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
    requests, ends = idx_mapping.numpy(), logits_indices.numpy()
    np.subtract(query_start_loc.numpy()[1 : len(requests) + 1], 1, out=ends)
    after = seq_lens.numpy()[: len(requests)] > prefill_lens.numpy()[requests]
    input_ids.numpy()[ends[after]] = last_sampled.numpy()[requests[after], 0]


def _count_sampled(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    _cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_lens: Tensor,
) -> None:
    """Count no token of a request that is still in prefill."""
    requests = idx_mapping.numpy()
    in_prefill = seq_lens.numpy()[: len(requests)] < prefill_lens.numpy()[requests]
    num_sampled.numpy()[in_prefill] = 0
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
    requests, after = idx_mapping.numpy(), num_sampled.numpy() > 0
    sampling, tokens = requests[after], sampled.numpy()[after, 0]
    last_sampled.numpy()[sampling, 0] = tokens
    lengths = total_len.numpy()
    all_token_ids.numpy()[sampling, lengths[sampling]] = tokens
    lengths[sampling] += 1
    num_computed.numpy()[requests] += np.diff(query_start_loc.numpy()[: len(requests) + 1])


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
