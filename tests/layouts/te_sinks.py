"""Attention sinks of the real TransformerEngine, asked of its Python on a CPU: a process.

It runs in the environment of `tests.te_python` and prints one line of JSON: what TransformerEngine
selects (`selected`), and how far Braid's attention is from TransformerEngine's (`differences`).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.layouts.fake_ranks import install

HEADS, GROUPS, WIDTH = 4, 2, 8
LENGTHS = (3, 70, 1, 130, 9)  # of the sequences of a row; they fill two grids
WINDOWS = (None, 5)  # tokens that a query sees
BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention"
# cuDNN's version, context-parallel ranks, their exchange, deterministic, key-value heads of a rank.
CASES = [
    *product([(9, 17, 1), (9, 18, 0)], [1], ["p2p"], [False, True], [2]),
    *product([(9, 18, 0)], [2], ["p2p", "a2a"], [False, True], [2]),
    ((9, 18, 0), 2, "a2a", False, 1),
]


def selected() -> list[str]:
    """Return for each of CASES what TransformerEngine selects: "fused", "unfused" or "none"."""
    rules: Any = importlib.import_module(f"{BACKENDS}.utils")
    # The extension's answer, of bf16 on Hopper.
    rules._get_fused_attn_backend = lambda **_: (
        rules.FusedAttnBackend.F16_arbitrary_seqlen.value,
        "",
    )
    choices = []
    for cudnn, context, exchange, deterministic, groups in CASES:
        rules.get_cudnn_version = lambda version=cudnn: version
        parameters = rules.AttentionParams(
            qkv_layout="thd_thd_thd",
            num_heads=4 * groups,
            num_gqa_groups=groups,
            attn_mask_type="padding_causal",
            window_size=(127, 0),
            bottom_right_diagonal=False,
            context_parallel=context > 1,
            cp_comm_type=exchange,
            cp_size=context,
            deterministic=deterministic,
            softmax_type="learnable",
        )
        _, _, fused, _, unfused, _ = rules.get_attention_backend(parameters)
        choices.append("fused" if fused else "unfused" if unfused else "none")
    return choices


def differences() -> dict[str, float]:
    """Return the largest relative differences of the outputs and of each gradient, by window.

    Braid's attention reads a packed row, TransformerEngine's plain one each sequence by itself.
    """
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
        return {
            f"{name}, window {window}": difference
            for window in WINDOWS
            for name, difference in _differences(window).items()
        }
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _differences(window: int | None) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS, WIDTH), *[(tokens, GROUPS, WIDTH)] * 2, (HEADS,)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    upstream = torch.randn(tokens, HEADS * WIDTH, generator=generator)
    results = []
    for attend in (_packed, _of_transformer_engine):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output = attend(*leaves, window)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, upstream)])
    names = ("output", "query", "key", "value", "sinks")
    return {
        name: ((ours - theirs).norm() / theirs.norm()).item()
        for name, ours, theirs in zip(names, *results, strict=True)
    }


def _packed(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    from megatron.core.transformer import TransformerConfig

    from parallel.cpu.attention import PackedAttention
    from parallel.packed_row import PackedRow

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        softmax_type="learnable",
        window_size=None if window is None else (window - 1, 0),
    )
    attention = PackedAttention(config, layer_number=1)
    attention._parameters["softmax_offset"] = sinks  # a leaf of this graph
    starts = np.cumsum([0, *LENGTHS])
    row = PackedRow(
        starts=starts,
        local_positions=np.arange(starts[-1]),
        real=torch.ones(int(starts[-1]), dtype=torch.bool),
    )
    return attention(query, key, value, None, packed_seq_params=row)


def _of_transformer_engine(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None
) -> Tensor:
    backends: Any = importlib.import_module(f"{BACKENDS}.backends")
    plain = backends.UnfusedDotProductAttention(WIDTH**-0.5, softmax_type="learnable")
    edges = [sum(LENGTHS[:number]) for number in range(len(LENGTHS) + 1)]
    outputs = [
        plain(
            {},
            *(tensor[None, start:end] for tensor in (query, key, value)),
            qkv_layout="bshd_bshd_bshd",
            attn_mask_type="causal",
            window_size=(-1, 0) if window is None else (window - 1, 0),
            softmax_offset=sinks.reshape(1, -1, 1, 1),
        )[0]
        for start, end in pairwise(edges)
    ]
    return torch.cat(outputs)


def main() -> None:
    """Print the answers; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore")
    install()
    print(json.dumps({"selected": selected(), "differences": differences()}), file=answers)


if __name__ == "__main__":
    main()
