"""The audit's comparisons and its own arithmetic, by values that are known, without a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.audit.collection import _verdicts
from stages.audit.evaluation import _solved
from stages.audit.model import Read
from stages.audit.policy_step import InitialFacts, PolicyStep
from stages.audit.preference_step import _accuracy, _losses
from stages.audit.rows import CLOSE, Comparison, buffers, change, exact, mismatch, number, numbers
from stages.audit.update import Optimizer, take_update

KEEP: dict[str, Any] = {
    **{"reward": None, "min_tokens": None, "max_tokens": None, "script": None, "per_prompt": None},
    **{"finished": True, "duplicates": False, "choose": "random"},
}


def test_numbers_differ_relative_to_the_larger_or_to_a_scale() -> None:
    assert number("x", 2.0, 1.0).difference == 0.5
    assert number("x", 1e-4, 0.0).difference == pytest.approx(0.01)
    assert number("x", 1e-4, 0.0, scale=1.0).agrees is False
    assert number("x", 1e-6, 0.0, scale=1.0).agrees
    assert not number("x", math.nan, 0.0).agrees
    assert not Comparison("x", 0.0, 0.0, math.nan).agrees
    assert exact("x", 3, 3).agrees and not exact("x", 3, 4).agrees
    assert numbers("x", [0.0, 4.0], [0.0, 3.0]).difference == 0.25
    assert numbers("x", [0.5], [0.0]).difference == 0.5
    assert not numbers("x", [1.0], [1.0, 2.0]).agrees


def test_weights_that_did_not_move_agree_with_no_movement() -> None:
    zero, one = ({"w": torch.full((4,), value, dtype=torch.float64)} for value in (0.0, 1.0))
    assert change("w", zero, zero, zero, 1e-5).agrees
    assert not change("w", zero, zero, one, 1e-5).agrees
    assert change("w", zero, one, {"w": one["w"] * 1.25}, 1e-5).difference == pytest.approx(
        0.25, abs=1e-6
    )
    turned = {"w": one["w"] * torch.tensor([1.0, -1.0, 1.0, -1.0])}
    assert buffers("exp_avg", one, turned).difference == pytest.approx(math.sqrt(2))


def test_the_high_ratio_counts_a_factor_of_two() -> None:
    apart = torch.tensor([0.6, 0.7, 0.0, 0.0], dtype=torch.float64)
    sample: Any = SimpleNamespace(logprobs=torch.zeros(4).double(), learned=torch.arange(4))
    logged = {"mismatch_max": 0.7, "mismatch_mean": 0.325, "high_ratio": 0.25}
    assert all(row.agrees for row in mismatch([sample], [apart], logged))


@pytest.mark.parametrize(
    ("fields", "keep", "expected"),
    [
        ({"reward": 0.9}, {"reward": 0.9}, None),
        ({"reward": 0.89}, {"reward": 0.9}, "reward"),
        ({"reward": None}, {}, "ungraded"),
        ({}, {"min_tokens": 3}, None),
        ({}, {"min_tokens": 4}, "min_tokens"),
        ({}, {"max_tokens": 3}, None),
        ({}, {"max_tokens": 2}, "max_tokens"),
        ({"finish_reason": "length"}, {}, "truncated"),
        ({"response": " \n"}, {}, "empty"),
        ({"response": "ab是 1"}, {"script": {"allowed": ["Latin"], "max_other": 1 / 3}}, None),
        ({"response": "ab是 1"}, {"script": {"allowed": ["Latin"], "max_other": 0.3}}, "script"),
    ],
)
def test_a_filter_drops_beyond_its_bounds(
    fields: dict[str, Any], keep: dict[str, Any], expected: str | None
) -> None:
    row = {"reward": 1.0, "token_ids": [1, 2, 3], "response": "a", "finish_reason": "stop"}
    assert _verdicts([row | fields], KEEP | keep, 0) == [expected]


def test_a_filter_keeps_the_best_of_a_prompt_and_the_first_of_equal_ones() -> None:
    rewards = {"a": 1.0, "b": 3.0, "c": 2.0}
    rows = [
        {"reward": rewards[text], "token_ids": [1], "response": text, "finish_reason": "stop"}
        for text in ("a", "b", "c", "b")
    ]
    two = KEEP | {"per_prompt": 2, "choose": "best"}
    assert _verdicts(rows, two, 0) == ["per_prompt", None, None, "duplicate"]
    assert _verdicts(rows, KEEP | {"per_prompt": 3}, 0) == [None, None, None, "duplicate"]


def test_losses_of_pairs_and_their_accuracy() -> None:
    difference = torch.tensor([0.5, -2.0], dtype=torch.float64)
    ipo = _losses(difference, {"name": "ipo", "beta": 0.25})
    assert ipo.tolist() == [2.25, 16.0]
    smooth = {"name": "sigmoid", "beta": 2.0, "label_smoothing": 0.1}
    expected = [
        0.9 * math.log1p(math.exp(-2 * d)) + 0.1 * math.log1p(math.exp(2 * d)) for d in (0.5, -2.0)
    ]
    assert _losses(difference, smooth).tolist() == pytest.approx(expected)
    margins = torch.tensor([1.0, -1.0, 2.0, CLOSE / 2])
    assert _accuracy(0.75, margins).agrees
    assert _accuracy(0.5, margins).agrees  # rounding decides the last
    assert not _accuracy(0.25, margins).agrees


def optimizer(updates: int, total: int = 10, **changes: Any) -> Optimizer:
    settings = {
        **{"algorithm": "sgd", "learning_rate": 1.0, "warmup_steps": 0, "decay": "constant"},
        **{"final_ratio": 0.0, "clip_norm": 1e9, "weight_decay": 0.0, "momentum": 0.0},
    }
    return Optimizer(settings | changes, {}, updates, total)


@pytest.mark.parametrize(
    ("updates", "changes", "expected"),
    [
        (9, {}, 1.0),
        (0, {"warmup_steps": 4}, 0.25),
        (2, {"warmup_steps": 4}, 0.625),
        (4, {"warmup_steps": 4}, 1.0),
        (5, {"decay": "linear"}, 0.5),
        (6, {"decay": "linear", "warmup_steps": 2, "final_ratio": 0.2}, 0.6),
        (5, {"decay": "cosine", "final_ratio": 0.5}, 0.75),
        # A warmup longer than the stage ends in its last update.
        (0, {"warmup_steps": 20}, 0.05),
        (9, {"warmup_steps": 20}, 1.0),
    ],
)
def test_the_learning_rate_of_an_update(
    updates: int, changes: dict[str, Any], expected: float
) -> None:
    assert optimizer(updates, **changes).learning_rate() == pytest.approx(expected)


def test_an_update_decays_matrices_and_clips_by_the_norm_of_all() -> None:
    parameters = {"matrix": torch.ones(1, 2).double(), "norm": torch.ones(2).double()}
    model: Any = SimpleNamespace(parameters=parameters)
    gradients = {
        "matrix": torch.tensor([[0.0, 4.0]]).double(),
        "norm": torch.tensor([3.0, 0.0]).double(),
    }
    one = optimizer(0, weight_decay=0.5, momentum=0.5, clip_norm=2.5, learning_rate=0.1)
    assert one.step(model, gradients) == 5.0
    assert parameters["matrix"].flatten().tolist() == pytest.approx([0.95, 0.75])
    assert parameters["norm"].tolist() == pytest.approx([0.85, 1.0])
    one.step(model, {name: torch.zeros_like(tensor) for name, tensor in gradients.items()})
    assert parameters["norm"].tolist() == pytest.approx([0.775, 1.0])  # by the momentum
    adam = optimizer(0, algorithm="adam", betas=[0.5, 0.75], learning_rate=0.1)
    parameters["norm"].fill_(1.0)
    for gradient in (2.0, -2.0):
        adam.step(
            model, {name: torch.full_like(tensor, gradient) for name, tensor in parameters.items()}
        )
    mean, square = (0.5 * 1.0 - 0.5 * 2.0) / 0.75, (0.75 * 1.0 + 0.25 * 4.0) / 0.4375
    assert parameters["norm"].tolist() == pytest.approx([0.9 - 0.1 * mean / square**0.5] * 2)


@pytest.mark.parametrize(
    ("reward", "reward_parts", "weights", "solved"),
    [
        (1.0, {"exact": 1.0, "brief": 0.0}, {}, True),  # what watches the form does not judge
        (1.0, {"exact": 0.9, "brief": 1.0}, {}, False),
        (1.0, {"brief": 1.0}, {}, False),
        (None, {"exact": 1.0}, {}, False),
        (0.5, {"exact": 1.0, "other": 0.0}, {"other": -1.0}, True),  # a penalty judges nothing
        (0.5, {"exact": 1.0, "other": 0.5}, {"other": 1.0}, False),
    ],
)
def test_an_answer_is_solved_where_what_judges_it_is_full(
    reward: float | None, reward_parts: dict[str, float], weights: dict[str, float], solved: bool
) -> None:
    kinds = {"exact": "reasoning_gym", "brief": "overlong", "other": "python"}
    of = {"exact": 0.7, "brief": 0.3, "other": 0.0} | weights
    rewards = {name: {"kind": kind, "weight": of[name]} for name, kind in kinds.items()}
    run: Any = SimpleNamespace(settings={"domains": {"sums": {"rewards": rewards}}})
    answer: Any = SimpleNamespace(
        domain="sums", fields={"reward": reward, "reward_parts": reward_parts}
    )
    assert _solved(run, answer) is solved


def random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_the_routers_losses_are_those_of_the_papers() -> None:
    """E sum_e f_e P_e (2101.03961, eq. 4; f over k choices) and z (2202.08906, eq. 5), by layer."""
    layers, experts, top_k, lengths = 2, 5, 2, (3, 1, 4)
    logits = [random(n, layers, n, experts).requires_grad_() for n in lengths]
    model: Any = SimpleNamespace(
        parameters={str(n): values for n, values in zip(lengths, logits, strict=True)},
        module=SimpleNamespace(zero_grad=lambda set_to_none: None),
        read=lambda sample, replay: SimpleNamespace(
            router_logits=model.parameters[str(len(sample.tokens))],
            experts=model.parameters[str(len(sample.tokens))].topk(top_k).indices,
        ),
    )
    gradients: dict[str, torch.Tensor] = {}
    optimizer: Any = SimpleNamespace(step=lambda model, values: gradients.update(values) or 0.0)
    samples: Any = [SimpleNamespace(tokens=range(n)) for n in lengths]
    routing = {"load_balance": 0.3, "z_loss": 0.2}
    logged = take_update(
        model, optimizer, samples, routing, False, lambda read: read.router_logits.sum() * 0
    )

    balance, squares = torch.zeros(()).double(), torch.zeros(()).double()
    for layer in torch.cat(logits, dim=1):  # [tokens, experts]
        counts = torch.zeros(experts).double()
        for token in layer:
            counts[token.argsort(descending=True)[:top_k]] += 1
        probabilities = layer.exp() / layer.exp().sum(-1, keepdim=True)
        share = counts / (sum(lengths) * top_k)
        balance = balance + experts * (share * probabilities.mean(0)).sum()
        squares = squares + (layer.exp().sum(-1).log() ** 2).mean()
    assert logged["load_balance"] == pytest.approx(balance.item() / layers)
    assert logged["z_loss"] == pytest.approx(squares.item() / layers)
    expected = torch.autograd.grad(0.3 * balance + 0.2 * squares, logits)
    for gradient, slope in zip(gradients.values(), expected, strict=True):
        torch.testing.assert_close(gradient, slope)


def test_a_response_weighs_by_a_power_of_its_length() -> None:
    """f = G softmax(h^lambda), h = 1 + z / 9 (2510.06870), its derivative by differences."""
    step = object.__new__(PolicyStep)
    lengths = {0: [3, 8, 1, 40], 1: [5, 5]}
    samples: Any = [
        SimpleNamespace(group=group, response=range(n)) for group in lengths for n in lengths[group]
    ]
    objective: Any = SimpleNamespace(settings={"aggregation": "lambda"})

    def weights(exponent: float) -> list[float]:
        powers = [
            [(1 + (n - mean) / (deviation or 1.0) / 9) ** exponent for n in of_group]
            for of_group in lengths.values()
            for mean in [sum(of_group) / len(of_group)]
            for deviation in [(sum((n - mean) ** 2 for n in of_group) / len(of_group)) ** 0.5]
        ]
        totals = [sum(map(math.exp, of_group)) for of_group in powers]
        return [
            len(of_group) * math.exp(power) / total
            for of_group, total in zip(powers, totals, strict=True)
            for power in of_group
        ]

    exponent = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for place, sample in enumerate(samples):
        weight = torch.as_tensor(step._length_weight(sample, samples, objective, exponent))
        assert weight.item() == pytest.approx(weights(0.7)[place])
        slope = (weights(0.7 + 1e-6)[place] - weights(0.7 - 1e-6)[place]) / 2e-6
        assert torch.autograd.grad(weight, exponent)[0].item() == pytest.approx(slope, abs=1e-8)


def test_routers_move_and_policies_differ_as_the_papers_say() -> None:
    """Delta of RSPO (2510.23027 v2, eq. 5 and 6), and KL over the sets that sampling kept."""
    prompt, count, layers, experts, top_k = 3, 4, 2, 5, 2
    sets = [torch.tensor(ids) for ids in ([0, 2], [], [1, 2, 5], [3])]
    sample: Any = SimpleNamespace(
        response=torch.tensor([2, 4, 1, 3]),
        learned=torch.arange(count),
        logprobs=torch.zeros(count).double(),
        first=prompt - 1,
        kept_ids=sets,
        fields={"weight_version": 1},
    )
    now, then = random(0, layers, prompt + count - 1, experts), random(1, layers, 6, experts)
    top = then.topk(top_k).indices
    logits, other_logits = random(2, count, 6).requires_grad_(), random(3, count, 6)
    initial = InitialFacts(
        sample.logprobs, sample.logprobs, 0.0, top, then.log_softmax(-1).gather(-1, top)
    )
    step = object.__new__(PolicyStep)
    step.temperature, step.step = 0.6, 1
    objective: Any = SimpleNamespace(
        coefficient=1.0,
        reference=SimpleNamespace(read=lambda sample, replay: Read(sample, other_logits, now, top)),
        settings={"kl": {"estimator": "full"}, "ratio": {"name": "rspo"}},
    )
    facts = step._facts(Read(sample, logits, now, now.topk(top_k).indices), initial, objective)

    movements, kls = [], []
    for token, ids in enumerate(sets):
        place = prompt - 1 + token  # of the token that predicts it
        movements.append(
            sum(
                abs(math.log(now[layer, place].softmax(-1)[e] / then[layer, place].softmax(-1)[e]))
                for layer in range(layers)
                for e in then[layer, place].argsort(descending=True)[:top_k]
            )
            / (layers * top_k)
        )
        ids = ids if len(ids) else torch.arange(6)
        mine, theirs = ((rows[token, ids] / 0.6).exp() for rows in (logits, other_logits))
        mine, theirs = mine / mine.sum(), theirs / theirs.sum()
        kls.append((mine * (mine / theirs).log()).sum())
    assert facts.router_movement is not None and facts.full_kl is not None
    assert facts.router_movement.tolist() == pytest.approx(movements)
    torch.testing.assert_close(facts.full_kl, torch.stack(kls))
    gradient, slope = (
        torch.autograd.grad(values.sum(), logits)[0] for values in (facts.full_kl, torch.stack(kls))
    )
    torch.testing.assert_close(gradient, slope)
