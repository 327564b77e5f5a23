"""The audit, the objectives and the papers' own equations agree on random numbers.

Audit and objectives once shared a mistake, which no comparison of the two can notice: papers.py is
written from neither. odd.yaml audits some formulas in real steps. This module covers every
advantage but a critic's, and every ratio, sampled KL estimator and correction that the audit has a
formula for. Every algorithm with a row in docs/explanation/objectives.md must have one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.audit import formulas
from stages.audit.advantages import advantages as audited_advantages
from stages.audit.blocks import OF_DOMAIN, recorded_stage
from stages.audit.objective import Facts, terms
from stages.audit.recorded import NotAuditable, RecordedRun, RecordedSample
from stages.objectives.graded import Graded, compute_advantages
from stages.objectives.loss import ObjectiveSettings, Totals, policy_loss
from stages.objectives.registry import ADVANTAGES, KL_ESTIMATORS, RATIOS
from stages.objectives.surrogate import NoCorrectionSettings, Tokens, correction_weights
from tests.audit import papers

TOKENS = 12
AUDITED_ADVANTAGES = [name for name in ADVANTAGES if name in formulas.ADVANTAGES and name != "gae"]
AUDITED_RATIOS = [name for name in RATIOS if name in formulas.RATIOS]
AUDITED_ESTIMATORS = [name for name in KL_ESTIMATORS if name in formulas.KL_ESTIMATORS]
SIZES = [[3, 1, 4, 2], [5, 5, 1, 2], [2, 6, 3, 1]]  # tokens of the responses to three prompts
WEIGHTS = {"brief": 0.25, "exact": 2.0}
OTHERS: dict[str, list[dict[str, Any]]] = {  # besides an algorithm's defaults
    "token": [{"dual_clip": 1.1}],
    "sequence": [{"clip_low": 0.05, "clip_high": 0.05}, {"dual_clip": 1.02}],
    "cispo": [{"cap": 1.28, "floor": 0.8}],
    "reinforce_pp": [{"over": "tokens"}, {"over": "tokens", "std": "population"}],
    "reinforce_pp_baseline": [{"over": "tokens"}, {"over": "tokens", "std": "population"}],
    "gfpo": [{"keep": 3, "by": "reward_per_token"}],
}


def with_others(names: Any) -> list[dict[str, Any]]:
    return [{"name": name, **more} for name in names for more in [{}, *OTHERS.get(name, [])]]


def label(settings: dict[str, Any]) -> str:
    return " ".join(map(str, settings.values()))


def random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def losses(
    objective: dict[str, Any],
    advantages: float | torch.Tensor,
    stale: bool,
    moved: float = 0.0,
) -> list[tuple[float, torch.Tensor]]:
    """Return loss and gradient of one response by the audit, by the product and by the papers.

    The policy gives its tokens `moved` nats more than pi_old does, on average.
    """
    settings = ObjectiveSettings.model_validate({"aggregation": "token_mean", **objective})
    policy = (-1 + random(0, TOKENS) / 3).requires_grad_()
    old, engine, reference = (policy.detach() + random(seed, TOKENS) / 3 for seed in (1, 2, 3))
    old = old - (old - policy.detach()).mean() - moved
    movement = random(4, TOKENS).abs() / 3
    advantages = torch.as_tensor(advantages, dtype=torch.float64).expand(TOKENS)
    facts = Facts(policy, old, engine, advantages, stale, reference, router_movement=movement)
    audit_terms = terms(facts, settings.model_dump(), correct_all=not stale)
    audited = audit_terms.surrogate.mean()
    if audit_terms.kl is not None:
        audited = audited + settings.kl.coefficient * audit_terms.kl.mean()
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    corrected = not isinstance(settings.correction, NoCorrectionSettings)
    tokens = Tokens(
        policy[None],
        old[None],
        engine[None],
        advantages[None],
        mask,
        sampling_logprobs=engine[None] if stale else None,
        weights=correction_weights(old[None], engine[None], mask, settings.correction)
        if corrected
        else None,
        router_movement=movement[None] if settings.ratio.needs_router_shift else None,
        reference_logprobs=reference[None],
    )
    ours = policy_loss(tokens, Totals(1, TOKENS), settings, settings.kl.coefficient).loss
    response = papers.PublishedResponse(policy, old, engine, reference, advantages, movement)
    published = papers.policy_losses(response, settings.model_dump(), corrected).mean()
    estimates = papers.kl_estimates(response, settings.kl.estimator, engine if stale else old)
    published = published + settings.kl.coefficient * estimates.mean()
    return [
        (loss.item(), torch.autograd.grad(loss, policy)[0]) for loss in (audited, ours, published)
    ]


def assert_alike(results: list[tuple[float, torch.Tensor]]) -> None:
    (audited, slope), *expected = results
    for loss, gradient in expected:
        assert audited == pytest.approx(loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(slope, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("moved", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", with_others(AUDITED_RATIOS), ids=label)
def test_ratios(ratio: dict[str, Any], sign: float, moved: float) -> None:
    assert_alike(losses({"ratio": ratio, "correction": {"name": "none"}}, sign, False, moved))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("estimator", AUDITED_ESTIMATORS)
def test_estimators_of_the_kl(estimator: str, stale: bool) -> None:
    kl = {"coefficient": 0.7, "estimator": estimator}
    assert_alike(losses({"kl": kl, "correction": {"name": "none"}}, 1.0, stale))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "correction",
    [
        *({"name": "tis", "cap": cap} for cap in (0.7, 1.3)),
        *({"name": "icepop", "low": low, "high": low + 0.4} for low in (0.2, 0.8, 1.2)),
    ],
    ids=label,
)
@pytest.mark.parametrize("name", AUDITED_RATIOS)
def test_corrections(correction: dict[str, Any], level: str, name: str) -> None:
    ratio = {"name": name, **({} if name == "cispo" else {"clip_low": 1.0, "clip_high": 9.0})}
    objective = {"correction": {**correction, "level": level}, "ratio": ratio}  # no clip binds
    if level == "token" and name in ("geometric", "rspo"):
        with pytest.raises(NotAuditable, match="level: token is not defined for this ratio"):
            losses(objective, 1.0, stale=True)
        return
    results = losses(objective, 1.0, stale=True)
    assert_alike(results)
    excluded = level == "sequence" and correction["name"] == "icepop" and correction["low"] != 0.8
    assert bool(results[0][1].any()) != excluded


@pytest.mark.parametrize("moved", [-0.3, 0.3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "correction", [{"name": "tis", "cap": 1.1}, {"name": "icepop", "low": 0.9}]
)
@pytest.mark.parametrize("ratio", with_others(AUDITED_RATIOS), ids=label)
def test_corrections_of_clipped_tokens(
    ratio: dict[str, Any], correction: dict[str, Any], sign: float, moved: float
) -> None:
    level = "sequence" if ratio["name"] in ("geometric", "rspo") else "token"
    objective = {"ratio": ratio, "correction": {**correction, "level": level}}
    assert_alike(losses(objective, sign, True, moved))


@pytest.mark.parametrize("moved", [-0.3, 0.3])
@pytest.mark.parametrize("name", ["token", "sequence_token", "cispo"])
def test_tokens_of_unlike_advantages(name: str, moved: float) -> None:
    correction = {"name": "icepop", "low": 0.8, "level": "token"}
    objective = {"ratio": {"name": name}, "correction": correction}
    assert_alike(losses(objective, random(6, TOKENS), True, moved))


@pytest.mark.parametrize("delta", [0.001, 10.0])
def test_the_sequence_mask(delta: float) -> None:
    mask = {"enabled": True, "delta": delta}
    assert_alike(losses({"sequence_mask": mask, "correction": {"name": "none"}}, -1.0, stale=True))


@pytest.mark.parametrize("advantage", with_others(AUDITED_ADVANTAGES), ids=label)
def test_advantages(advantage: dict[str, Any]) -> None:
    settings = ObjectiveSettings.model_validate({"advantage": advantage}).advantage
    part_rewards = random(5, 3, 4, 2)
    part_rewards[1] = part_rewards[1, :1]  # a zero-variance group
    weights = torch.tensor(list(WEIGHTS.values()), dtype=torch.float64)
    rewards = (part_rewards * weights).sum(-1)
    steps = torch.stack([rewards + 0.5, rewards - 0.5], dim=-1)  # whose mean is the reward
    lengths = torch.tensor(SIZES)
    ends = torch.stack([(lengths - 1) // 2, lengths - 1], dim=-1)
    every = torch.ones(3, 4, dtype=torch.bool)
    batch = Graded(rewards, every, lengths, part_rewards, weights, steps, ends)
    ours = compute_advantages(batch, settings)
    samples = [
        recorded(group, size, rewards[group, place], part_rewards[group, place], steps, ends, place)
        for group, sizes in enumerate(SIZES)
        for place, size in enumerate(sizes)
    ]
    audited = audited_advantages(samples, settings.model_dump(), {"sums": WEIGHTS})
    published = papers.advantages(
        [
            papers.PublishedRewards(
                sample.group,
                len(sample.response),
                sample.fields["reward"],
                [(WEIGHTS[name], reward) for name, reward in sample.fields["reward_parts"].items()],
                sample.fields["step_rewards"],
            )
            for sample in samples
        ],
        settings.model_dump(),
    )
    for values, of_response, expected in zip(audited, ours.flatten(0, 1), published, strict=True):
        size = len(values)
        mine = of_response.expand(size) if len(of_response) == 1 else of_response[:size]
        assert values == pytest.approx(mine.tolist(), rel=1e-9, abs=1e-9)
        assert values == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)


def recorded(
    group: int,
    size: int,
    reward: torch.Tensor,
    part_rewards: torch.Tensor,
    steps: torch.Tensor,
    ends: torch.Tensor,
    place: int,
) -> RecordedSample:
    """Return a sample of `size` tokens as a step's file has it."""
    fields = {
        "reward": reward.item(),
        "reward_parts": dict(zip(WEIGHTS, part_rewards.tolist(), strict=True)),
        "step_rewards": list(
            zip(ends[group, place].tolist(), steps[group, place].tolist(), strict=True)
        ),
    }
    tokens = torch.zeros(size, dtype=torch.int64)
    return RecordedSample(
        "sums", tokens[:1], tokens, tokens.double(), tokens, 0, group, fields, None, None
    )


def test_unlike_objectives_of_a_stage_are_each_of_its_domain(tmp_path: Path) -> None:
    kl = {"reference": "parent", "coefficient": 0.1}
    alike, other = (
        {"aggregation": aggregation, "kl": kl} for aggregation in ("token_mean", "constant")
    )
    domains = {name: {"objective": alike} for name in ("a", "b")} | {"c": {"objective": other}}
    block = {"kind": "grpo", "from": "base", **dict.fromkeys(("for_each", "as", "was"))}
    mixed = {**dict.fromkeys(OF_DOMAIN), **block, "domains": None}
    stages = {"mixed": mixed, "two": {**mixed, "domains": ["a", "b"]}, "base": mixed}
    for name in ("mixed", "two"):
        (tmp_path / "stages" / name).mkdir(parents=True)
        (tmp_path / "stages" / name / "manifest.json").write_text('{"settings": {}}')
    run = RecordedRun(tmp_path, {"domains": domains, "stages": stages})
    objectives = [
        [(objective.name, objective.domains) for objective in recorded_stage(run, name).objectives]
        for name in ("mixed", "two")
    ]
    assert objectives == [[(name, (name,)) for name in "abc"], [("", ("a", "b"))]]


def test_equal_objectives_with_a_reference_of_each_domain_are_apart(tmp_path: Path) -> None:
    block = {"kind": "grpo", "from": "base", **dict.fromkeys(("for_each", "as", "was"))}
    stage_block = {**dict.fromkeys(OF_DOMAIN), **block, "domains": None}
    objective = {"kl": {"reference": "experts", "coefficient": 0.1}}
    stages = {
        "base": stage_block,
        "experts": {**stage_block, "for_each": "domain"},
        "mixed": {**stage_block, "objective": objective},
    }
    (tmp_path / "stages" / "mixed").mkdir(parents=True)
    (tmp_path / "stages" / "mixed" / "manifest.json").write_text('{"settings": {}}')
    domains: dict[str, Any] = {"a": {}, "b": {}}
    run = RecordedRun(tmp_path, {"domains": domains, "stages": stages})
    objectives = recorded_stage(run, "mixed").objectives
    assert [
        (recorded_objective.name, recorded_objective.reference) for recorded_objective in objectives
    ] == [
        ("a", "experts.a"),
        ("b", "experts.b"),
    ]
