"""Braid's AdamW equals torch's, except that it counts steps per group."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from parallel.cpu.megatron import GroupStepAdam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, 3, generator=generator)) for n in (4, 5)]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    for number in range(4):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * (number + 1))
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_computes_what_torch_does_bit_for_bit(decoupled: bool) -> None:
    ours, theirs = parameters(), parameters()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(GroupStepAdam(ours, adam_w_mode=decoupled, **SETTINGS), ours)
    train(kind(theirs, **SETTINGS), theirs)
    assert all(map(torch.equal, ours, theirs))


def test_it_continues_from_its_own_state() -> None:
    ours, again = parameters(), parameters()
    first, second = GroupStepAdam(ours, **SETTINGS), GroupStepAdam(again, **SETTINGS)
    train(first, ours)
    assert all("step" not in state for state in first.state.values())
    second.load_state_dict(deepcopy(first.state_dict()))
    for one, other in zip(ours, again, strict=True):
        other.data.copy_(one.data)
    train(first, ours)
    train(second, again)
    assert all(map(torch.equal, ours, again))
    assert second.param_groups[0]["step"] == 8


def test_an_empty_group_counts_too() -> None:
    optimizer = GroupStepAdam([{"params": []}, {"params": parameters()}], **SETTINGS)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
