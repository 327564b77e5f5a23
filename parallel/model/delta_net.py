"""Gated delta nets (arXiv 2412.06464) over packed rows, and the gated attention between them.

megatron-core 0.19.2 has both, as experimental. Its delta net is not built without
flash-linear-attention, which needs CUDA, and its rule in torch refuses packed rows
(ssm/gated_delta_net/common.py, `cu_seqlens is None`). Here each sequence of a row is a line of a
grid, so that neither the convolution nor the state crosses from one into the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from parallel.cpu.attention import SequenceGrid, sequence_grids
from parallel.packed_row import PackedRow

CHUNK = 64  # tokens that attend to each other at once; a state is passed from chunk to chunk


@dataclass
class DeltaNetSubmodules:
    """The classes of a delta net's linear layers and of the norm of its heads' outputs."""

    in_proj: Any
    out_norm: Any
    out_proj: Any


class GatedDeltaNet(MegatronModule):
    """A layer of linear attention, in the place of Megatron's self-attention.

    Tensor parallelism splits the key heads, each with its value heads: rows of `in_proj` and
    `conv_weight` are ordered by key head. Context-parallel ranks each compute whole sequences and
    keep the outputs of their own tokens.
    """

    def __init__(
        self,
        config: Any,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        ranks, dtype = self.tp_group.size(), config.params_dtype
        self.key_heads = config.linear_num_key_heads // ranks
        self.ratio = config.linear_num_value_heads // config.linear_num_key_heads
        self.key_width = config.linear_key_head_dim
        self.value_width = self.ratio * config.linear_value_head_dim  # of a key head's value heads
        mixed = 2 * self.key_width + self.value_width
        columns = config.linear_num_key_heads * (mixed + self.value_width + 2 * self.ratio)
        options = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            columns,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **options,
        )
        kernel, heads = config.linear_conv_kernel_dim, self.key_heads * self.ratio
        filters = torch.empty(self.key_heads * mixed, 1, kernel, dtype=dtype)
        self.conv_weight = torch.nn.Parameter(filters)
        self.A_log, self.dt_bias = (
            torch.nn.Parameter(torch.empty(heads, dtype=dtype)) for _ in range(2)
        )
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=config.linear_value_head_dim,
            eps=config.layernorm_epsilon,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            config.linear_num_value_heads * config.linear_value_head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **options,
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedRow, **__: Any
    ) -> tuple[Tensor, None]:
        """Return the outputs [T / C / TP, 1, hidden], as the inputs with sequence parallelism."""
        projected, _ = self.in_proj(hidden_states)
        by_head = projected.view(len(projected), self.key_heads, -1)
        sizes = [2 * self.key_width + self.value_width, self.value_width, self.ratio, self.ratio]
        mixed, gate, write, keep = by_head.split(sizes, -1)
        beta = write.flatten(1).sigmoid()
        rates = self.A_log.float().exp()
        decay = -rates * functional.softplus(keep.flatten(1).float() + self.dt_bias.float())
        read = self._read(mixed.flatten(1), beta, decay, packed_seq_params)
        gate = gate.reshape(read.shape).float()
        normed = self.out_norm(read).float() * functional.silu(gate)
        output, _ = self.out_proj(normed.to(read.dtype).flatten(1)[:, None])
        return output, None

    def _read(self, mixed: Tensor, beta: Tensor, decay: Tensor, row: PackedRow) -> Tensor:
        """Return what this rank's tokens read, [T / C, value heads, width].

        mixed is [T / C, channels]; beta and decay are [T / C, value heads].
        """
        grids, back = sequence_grids(row, mixed.device)
        inputs = mixed, beta, decay
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            inputs = tuple(
                gather_from_sequence_parallel_region(tensor.contiguous(), group=group)
                for tensor in inputs
            )
        # What the rule keeps of a token for its backward pass is some ten times its inputs.
        read = partial(checkpoint, self._lines_read, use_reentrant=False, preserve_rng_state=False)
        outputs = [read(grid, *inputs) for grid in grids]
        return torch.cat(outputs)[back]

    def _lines_read(self, grid: SequenceGrid, mixed: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """Return what a grid's queries read, [S * L / C, value heads, width]."""
        lines, betas, decays = (tensor[grid.keys] for tensor in (mixed, beta, decay))
        outputs = gated_delta_rule(*self._convolved(lines), betas, decays)
        if grid.split:
            outputs = outputs[
                torch.arange(len(outputs), device=outputs.device)[:, None], grid.places
            ]
        return outputs.flatten(0, 1)

    def _convolved(self, lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [S, L, value heads, width] of [S, L, channels]."""
        count, length, channels = lines.shape
        past = self.conv_weight.shape[-1] - 1
        convolved = functional.conv1d(
            lines.transpose(1, 2), self.conv_weight, padding=past, groups=channels
        )
        active = functional.silu(convolved[..., :length]).transpose(1, 2)
        by_head = active.reshape(count, length, self.key_heads, -1)
        query, key, value = by_head.split([self.key_width, self.key_width, self.value_width], -1)
        query, key = (heads.repeat_interleave(self.ratio, 2) for heads in (query, key))
        return query, key, value.reshape(count, length, self.key_heads * self.ratio, -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sharded tensors; Megatron's default takes bare parameters for replicas."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensors = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in ("conv_weight", "A_log", "dt_bias"):
            tensors[prefix + name] = make_tp_sharded_tensor_for_checkpoint(
                getattr(self, name),
                prefix + name,
                prepend_offsets=sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return tensors


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention with an output gate; each query head is followed by its gate.

    Hugging Face's order: megatron-core puts a group's gates behind all its queries.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value and gate, [T / C, 1, heads, head_dim]."""
        mixed, _bias = self.linear_qkv(hidden_states)
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition
        mixed = mixed.view(*mixed.shape[:2], groups, -1)
        queries, key, value = mixed.split([2 * heads // groups * width, width, width], -1)
        pairs = queries.reshape(*mixed.shape[:2], heads, 2 * width)
        query, gate = pairs.chunk(2, -1)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """Return what every token reads from its head's state, in the dtype of `value`.

    A token's state is the one before times exp(decay); then the value at its key moves by `beta` of
    the way to the token's value. Queries and keys are normalised here, and queries divided by the
    root of their width. Computed in fp32, in chunks of CHUNK tokens.

    Args:
        query, key: [S, L, heads, key width].
        value: [S, L, heads, value width].
        beta: [S, L, heads], between 0 and 1.
        decay: [S, L, heads], not positive.

    Returns:
        [S, L, heads, value width].
    """
    dtype, (lines, length, heads, width) = value.dtype, query.shape
    size = min(CHUNK, length)
    query, key = _normalised(query) * width**-0.5, _normalised(key)
    # [S, heads, chunks, size, width] each, or without a width.
    query, key, value, beta, decay = (
        _chunks(tensor.float(), size) for tensor in (query, key, value, beta, decay)
    )
    # Sums are products with ones: on CUDA torch.cumsum has no deterministic implementation.
    ones = query.new_ones(size, size)
    passed = decay @ ones.triu()
    # What is left of a token's write at each later one: sums of decays, since differences of
    # `passed`, which grows to hundreds, would be rounded to 1e-5.
    steps = decay[..., None] * ones.tril(-1)
    later = ones.triu(1).bool()
    between = (ones.tril() @ steps).masked_fill(later, -torch.inf).exp()
    written = key * beta[..., None]
    # Within a chunk every token overwrites what earlier ones wrote: a triangular system.
    system = written @ key.transpose(-1, -2) * between
    sides = torch.cat([value * beta[..., None], written * passed.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, decayed_keys = solved.split([value.shape[-1], width], -1)
    inside = query @ key.transpose(-1, -2) * between
    outward = query * passed.exp()[..., None]
    onward = key * between[..., -1, :, None]
    retained = passed[..., -1].exp()[..., None, None]
    state = value.new_zeros(lines, heads, width, value.shape[-1])
    outputs = []
    for chunk in range(query.shape[2]):
        new = values[:, :, chunk] - decayed_keys[:, :, chunk] @ state
        outputs.append(outward[:, :, chunk] @ state + inside[:, :, chunk] @ new)
        state = state * retained[:, :, chunk] + onward[:, :, chunk].transpose(-1, -2) @ new
    whole = torch.cat(outputs, 2)[:, :, :length]
    return whole.transpose(1, 2).to(dtype)


def _normalised(heads: Tensor) -> Tensor:
    heads = heads.float()
    return heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _chunks(tensor: Tensor, size: int) -> Tensor:
    """Return [S, heads, chunks, size, ...] of [S, L, heads, ...], padded with zeros."""
    filler = -tensor.shape[1] % size
    padded = functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, filler))
    return padded.transpose(1, 2).unflatten(2, (-1, size))
