"""The losses of preference pairs: TRL's numbers, a second statement, and GRPO's direction."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from stages.objectives.loss import ObjectiveSettings, Totals, policy_loss
from stages.objectives.preference import (
    IpoSettings,
    PairLogprobs,
    PreferenceBase,
    PreferenceSettings,
    SigmoidSettings,
    preference_loss,
)
from stages.objectives.surrogate import Tokens

# As `benchmarks/trl_preference.py` printed them with TRL 1.16.0: TRL's name of the loss, beta,
# label smoothing, the pair, the loss, and its gradients by the policy's two log-probabilities.
TRL = [
    json.loads(line)
    for line in Path(__file__).with_name("trl_preference.jsonl").read_text().splitlines()
]
PAIR = (-12.5, -17.25, -13.0, -16.0, 5, 7)


def settings_of(name: str, beta: float, smoothing: float) -> PreferenceBase:
    """Return the settings of one of TRL's losses."""
    if name == "ipo":
        return IpoSettings(beta=beta)
    mean: Any = "mean" if name == "sigmoid_norm" else "sum"
    return SigmoidSettings(beta=beta, label_smoothing=smoothing, logprobs=mean)


def pairs(*of: tuple[float, ...]) -> PairLogprobs:
    """Return pairs in float64; the policy's log-probabilities have gradient."""
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*of, strict=True)]
    for column in columns[:2]:
        column.requires_grad_()
    return PairLogprobs(*columns)


@pytest.mark.parametrize("row", TRL, ids=lambda row: "-".join(map(str, row[:4])))
def test_losses_and_gradients_are_trl_s(row: list[Any]) -> None:
    name, beta, smoothing, *pair, loss, chosen_slope, rejected_slope = row
    logprobs = pairs(tuple(pair))
    computed = preference_loss(logprobs, 1, settings_of(name, beta, smoothing))
    computed.loss.backward()
    assert logprobs.chosen.grad is not None and logprobs.rejected.grad is not None
    ours = [computed.loss.item(), logprobs.chosen.grad.item(), logprobs.rejected.grad.item()]
    assert ours == pytest.approx([loss, chosen_slope, rejected_slope], rel=1e-10, abs=1e-60)


def test_the_numbers_of_trl_cover_every_loss() -> None:
    assert {row[0] for row in TRL} == {"sigmoid", "aot", "sigmoid_norm", "ipo"}
    assert len(TRL) == 36


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("logprobs", ["sum", "mean"])
def test_a_second_statement_agrees(beta: float, smoothing: float, logprobs: Any) -> None:
    chosen, rejected, reference_chosen, reference_rejected, long, short = PAIR
    ratios = (chosen - reference_chosen, rejected - reference_rejected)
    if logprobs == "mean":
        ratios = (ratios[0] / long, ratios[1] / short)
    preferred = 1 / (1 + math.exp(-beta * (ratios[0] - ratios[1])))
    dpo = -(1 - smoothing) * math.log(preferred) - smoothing * math.log(1 - preferred)
    ipo = (ratios[0] - ratios[1]) ** 2 - (ratios[0] - ratios[1]) / beta + 1 / (4 * beta**2)
    settings: list[PreferenceBase] = [
        SigmoidSettings(beta=beta, label_smoothing=smoothing, logprobs=logprobs),
        IpoSettings(beta=beta, logprobs=logprobs),
    ]
    for loss_settings, expected in zip(settings, (dpo, ipo), strict=True):
        computed = preference_loss(pairs(PAIR), 1, loss_settings)
        assert computed.loss.item() == pytest.approx(expected, rel=1e-10)
        assert computed.sums == pytest.approx(
            {
                "loss": expected,
                "reward_chosen": beta * ratios[0],
                "reward_rejected": beta * ratios[1],
                "reward_margin": beta * (ratios[0] - ratios[1]),
                "reward_accuracy": 1.0,
            }
        )


def test_shards_add_up_to_the_step_s_mean() -> None:
    of = [tuple(row[3:9]) for row in TRL[:4]]
    settings = SigmoidSettings()
    whole = preference_loss(pairs(*of), 4, settings)
    shards = [
        preference_loss(pairs(*of[:1]), 4, settings),
        preference_loss(pairs(*of[1:]), 4, settings),
    ]
    assert sum(shard.loss.item() for shard in shards) == pytest.approx(whole.loss.item(), rel=1e-12)
    assert whole.loss.item() == pytest.approx(sum(row[9] for row in TRL[:4]) / 4, rel=1e-12)
    # Of the four pairs one has the wrong order, and one has equal rewards, which is not higher.
    assert whole.sums["reward_accuracy"] == 2


def test_an_extreme_pair_has_a_finite_gradient() -> None:
    for difference in (-1e6, 1e6):
        pair = pairs((difference, 0.0, 0.0, 0.0, 1, 1))
        preference_loss(pair, 1, SigmoidSettings(beta=1.0)).loss.backward()
        assert pair.chosen.grad is not None
        assert pair.chosen.grad.item() == pytest.approx(-1.0 if difference < 0 else 0.0)


def test_the_loss_is_chosen_by_its_name() -> None:
    adapter = TypeAdapter(PreferenceSettings)
    assert adapter.validate_python({"beta": 0.2}) == SigmoidSettings(beta=0.2)
    assert adapter.validate_python({"name": "ipo"}) == IpoSettings(logprobs="mean")
    for wrong in ({"name": "ipo", "label_smoothing": 0.1}, {"beta": 0}, {"label_smoothing": 0.5}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_grpo_on_two_responses_has_the_same_direction(moved: float) -> None:
    """GRPO of one prompt's right and wrong response, without deviation and clip, is DPO's step."""
    torch.manual_seed(0)
    reference = torch.randn(6, 9, dtype=torch.float64)  # logits of a table: position, token
    table = (reference + moved * torch.randn_like(reference)).requires_grad_()
    tokens = torch.tensor([[3, 1, 4, 0, 0, 0], [2, 7, 1, 8, 2, 5]])
    mask = torch.arange(6) < torch.tensor([[3], [6]])

    def logprobs(of: torch.Tensor) -> torch.Tensor:
        return of.log_softmax(-1).expand(2, -1, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def sums(of: torch.Tensor) -> torch.Tensor:
        return logprobs(of).masked_fill(~mask, 0.0).sum(-1)

    (chosen, rejected), reference_sums = sums(table), sums(reference)
    pair = PairLogprobs(
        *(logprob.view(1) for logprob in (chosen, rejected, *reference_sums)),
        *(count.view(1) for count in mask.sum(-1)),
    )
    [dpo] = torch.autograd.grad(preference_loss(pair, 1, SigmoidSettings(beta=0.5)).loss, table)
    objective = ObjectiveSettings.model_validate(
        {"advantage": {"name": "dr_grpo"}, "ratio": {"name": "token"}, "aggregation": "constant"}
    )
    advantages = torch.tensor([[0.5], [-0.5]], dtype=torch.float64).expand(2, 6)  # of rewards 1, 0
    now = logprobs(table)
    responses = Tokens(
        logprobs=now,
        old_logprobs=now.detach(),
        engine_logprobs=now.detach(),
        advantages=advantages,
        mask=mask,
    )
    loss = policy_loss(responses, Totals(2, 9, longest=1.0), objective, 0.0).loss
    [grpo] = torch.autograd.grad(loss, table)
    cosine = torch.nn.functional.cosine_similarity(dpo.flatten(), grpo.flatten(), dim=0)
    assert cosine.item() == pytest.approx(1.0, abs=1e-12)
    step = table.detach() - 1e-3 * dpo
    assert sums(step)[0] > chosen and sums(step)[1] < rejected
