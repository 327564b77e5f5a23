"""The chunked delta rule equals the recurrence, token by token; why megatron-core's is not used."""

from __future__ import annotations

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common as core
from torch import Tensor
from torch.nn import functional

from parallel.model.delta_net import CHUNK, gated_delta_rule

LINES, HEADS, KEY, VALUE = 2, 3, 8, 5


def recurrence(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Return what `gated_delta_rule` computes, by its definition."""
    query, key = (
        part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key)
    )
    state, found = torch.zeros(LINES, HEADS, KEY, VALUE, dtype=value.dtype), []
    for at in range(query.shape[1]):
        state = state * decay[:, at].exp()[..., None, None]
        known = torch.einsum("shkv,shk->shv", state, key[:, at])
        change = beta[:, at, :, None] * (value[:, at] - known)
        state = state + torch.einsum("shk,shv->shkv", key[:, at], change)
        found.append(torch.einsum("shkv,shk->shv", state, query[:, at]) * KEY**-0.5)
    return torch.stack(found, 1)


def inputs(length: int, rate: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = LINES, length, HEADS
    heads = [torch.randn(*shape, width, generator=generator) for width in (KEY, KEY, VALUE)]
    beta = torch.rand(shape, generator=generator)
    decay = -rate * functional.softplus(torch.randn(shape, generator=generator))
    return [part.requires_grad_() for part in (*heads, beta, decay)]


@pytest.mark.parametrize("rate", [0.01, 1.0, 16.0])
@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_equal_the_recurrence(length: int, rate: float) -> None:
    """The states pass from chunk to chunk, also where all that is written is soon forgotten."""
    ours = inputs(length, rate)
    exact = [part.detach().double().requires_grad_() for part in ours]
    found, expected = gated_delta_rule(*ours), recurrence(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for part, reference in zip(ours, exact, strict=True):
        assert part.grad is not None and reference.grad is not None
        error = (part.grad.double() - reference.grad).norm()
        assert error < 1e-5 * reference.grad.norm() + 1e-7


def test_later_tokens_change_no_earlier_output() -> None:
    """A line's padding, behind its tokens, is what a grid relies on."""
    parts = [part.detach() for part in inputs(2 * CHUNK, 1.0)]
    whole = gated_delta_rule(*parts)
    cut = gated_delta_rule(*(part[:, : CHUNK + 9] for part in parts))
    torch.testing.assert_close(whole[:, : CHUNK + 9], cut, rtol=1e-6, atol=1e-6)


def normalised(heads: Tensor, dim: int, eps: float) -> Tensor:
    """Return what flash-linear-attention's `l2norm` computes, which megatron-core imports."""
    return heads * (heads.square().sum(dim, keepdim=True) + eps).rsqrt()


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def test_megatron_core_s_rule_in_torch_takes_no_packed_rows() -> None:
    """If this fails, its rule may replace Braid's: see docs/how-to/models.md."""
    with pytest.raises(AssertionError, match="cu_seqlens is not supported"):
        core.torch_chunk_gated_delta_rule(*inputs(4, 1.0), cu_seqlens=torch.tensor([0, 4]))
    assert not core.HAVE_FLA  # without it the layer cannot be built, not even to run in torch


def test_megatron_core_s_rule_in_torch_rounds_where_states_decay_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It subtracts sums of decays, which grow to hundreds; Braid's sums them between two tokens."""
    monkeypatch.setattr(core, "l2norm", normalised)
    ours, theirs = inputs(4 * CHUNK, 16.0), inputs(4 * CHUNK, 16.0)
    exact = [part.detach().double().requires_grad_() for part in ours]
    *heads, beta, decay = theirs
    outputs = [
        gated_delta_rule(*ours),
        core.torch_chunk_gated_delta_rule(*heads, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[
            0
        ],
        recurrence(*exact),
    ]
    weights = torch.randn(outputs[-1].shape, generator=torch.Generator().manual_seed(1))
    for output in outputs:
        (output * weights).sum().backward()
    errors = [
        max(relative_error(part.grad, leaf.grad) for part, leaf in zip(parts, exact, strict=True))
        for parts in (ours, theirs)
    ]
    assert errors[0] < 1e-6
    assert errors[1] > 5e-6
