"""Advantages from the recorded rewards, in plain Python, by group: one formula an advantage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev, stdev
from typing import Any

from stages.audit.formulas import ADVANTAGES
from stages.audit.recorded import NotAuditable, RecordedSample

FLOOR = 1e-6  # beside a standard deviation
NOTHING = 1e-9  # of a reward that is the mean of its steps, beyond it

Value = float | list[float]  # of a response, or of each of its tokens
Values = Sequence[Sequence[Value]]  # of the responses of each group
Groups = list[list[RecordedSample]]
Block = dict[str, Any]
PartWeights = dict[str, float]


def advantages(
    samples: Sequence[RecordedSample],
    settings: dict[str, Any],
    weights: dict[str, dict[str, float]],
) -> list[list[float]]:
    """Return the advantage of every response token of every sample, before scaling by entropies.

    `settings` is the objective's block `advantage`, `weights` the weights of a reward's parts, by
    domain. Groups are of one prompt, and a batch baseline is taken within the domain.

    Raises:
        NotAuditable: the audit has no formula for the advantage.
    """
    domains: dict[str, dict[int, list[RecordedSample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        domains[sample.domain][sample.group].append(sample)
    formula = ADVANTAGES.find(settings["name"])
    advantage_of: dict[RecordedSample, Value] = {}
    for domain, by_group in domains.items():
        groups = list(by_group.values())
        values = formula(groups, settings, weights.get(domain, {}))
        for group, of_group in zip(groups, values, strict=True):
            advantage_of |= zip(group, of_group, strict=True)
    return [
        value if isinstance(value := advantage_of[sample], list) else [value] * len(sample.response)
        for sample in samples
    ]


# Each formula takes the groups of one domain, the block `advantage` and the weights of the parts of
# the reward, and returns an advantage for each response, or one for each of its tokens.


@ADVANTAGES.register("grpo")
def _grpo(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    return [_standard(rewards, _std(settings)) for rewards in _rewards(groups)]


@ADVANTAGES.register("dr_grpo")
def _dr_grpo(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    return [_centred(rewards) for rewards in _rewards(groups)]


@ADVANTAGES.register("rloo")
def _rloo(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    # R_i less the mean of the others is n / (n - 1) (R_i - mean).
    return [
        [value * len(rewards) / max(len(rewards) - 1, 1) for value in _centred(rewards)]
        for rewards in _rewards(groups)
    ]


@ADVANTAGES.register("mo_grpo")
def _mo_grpo(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    return [_sum_of_parts(group, weights, _std(settings)) for group in groups]


@ADVANTAGES.register("gdpo")
def _gdpo(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    std = _std(settings)
    return _over_batch([_sum_of_parts(group, weights, std) for group in groups], std)


@ADVANTAGES.register("gfpo")
def _gfpo(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    return [
        _filtered(group, rewards, settings, _std(settings))
        for group, rewards in zip(groups, _rewards(groups), strict=True)
    ]


@ADVANTAGES.register("process")
def _process(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    return [_steps(group, _std(settings)) for group in groups]


@ADVANTAGES.register("reinforce_pp")
def _reinforce_pp(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    of_tokens = settings.get("over", "responses") == "tokens"
    repeated = [
        sample.fields["reward"]
        for group in groups
        for sample in group
        for _ in range(len(sample.response) if of_tokens else 1)
    ]
    advantage_of = dict(zip(repeated, _standard(repeated, _std(settings)), strict=True))
    return [[advantage_of[reward] for reward in rewards] for rewards in _rewards(groups)]


@ADVANTAGES.register("reinforce_pp_baseline")
def _reinforce_pp_baseline(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    scores = [_centred(rewards) for rewards in _rewards(groups)]
    if settings.get("over", "responses") != "tokens":
        return _over_batch(scores, _std(settings))
    # verl: the scores less their group's mean, whitened over all tokens of the batch
    tokens = [
        score
        for group, group_scores in zip(groups, scores, strict=True)
        for sample, score in zip(group, group_scores, strict=True)
        for _ in sample.response
    ]
    mean, spread = fmean(tokens), _spread(tokens, _std(settings))
    return [
        [(score - mean) / (spread + FLOOR) for score in group_scores] for group_scores in scores
    ]


@ADVANTAGES.register("gae")
def _gae(groups: Groups, settings: Block, weights: PartWeights) -> Values:
    raise NotAuditable("objective.advantage gae: a critic's values are not audited")


def _rewards(groups: Groups) -> list[list[float]]:
    return [[sample.fields["reward"] for sample in group] for group in groups]


def _std(settings: Block) -> str:
    return str(settings.get("std", "sample"))


def _over_batch(centred: Sequence[Sequence[float]], std: str) -> list[list[float]]:
    spread = _spread([value for group in centred for value in group], std)
    return [[value / (spread + FLOOR) for value in group] for group in centred]


def _centred(values: Sequence[float]) -> list[float]:
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = fmean(values)
    return [value - mean for value in values]


def _spread(values: Sequence[float], std: str) -> float:
    return 0.0 if len(values) < 2 else stdev(values) if std == "sample" else pstdev(values)


def _standard(values: Sequence[float], std: str) -> list[float]:
    spread = _spread(values, std)
    return [value / (spread + FLOOR) for value in _centred(values)]


def _sum_of_parts(group: list[RecordedSample], weights: dict[str, float], std: str) -> list[float]:
    total = [0.0] * len(group)
    for name in sorted({name for sample in group for name in sample.fields["reward_parts"]}):
        if weight := weights.get(name, 1.0):
            of_part = _standard([sample.fields["reward_parts"][name] for sample in group], std)
            total = [
                value + weight * standard for value, standard in zip(total, of_part, strict=True)
            ]
    return total


def _filtered(
    group: list[RecordedSample], rewards: list[float], settings: dict[str, Any], std: str
) -> list[float]:
    lengths = [len(sample.response) for sample in group]
    merit = [-float(length) for length in lengths]
    if settings["by"] == "reward_per_token":
        merit = [reward / max(n, 1) for reward, n in zip(rewards, lengths, strict=True)]
    kept_places = sorted(range(len(group)), key=lambda place: -merit[place])[: settings["keep"]]
    among = dict(
        zip(kept_places, _standard([rewards[place] for place in kept_places], std), strict=True)
    )
    return [among.get(place, 0.0) for place in range(len(group))]


def _steps(group: list[RecordedSample], std: str) -> Sequence[Value]:
    if len(group) < 2:
        return [0.0] * len(group)
    steps = [sample.fields["step_rewards"] for sample in group]
    values = iter(
        _standard([reward for response_steps in steps for _, reward in response_steps], std)
    )
    else_earned = [
        sample.fields["reward"] - fmean(reward for _, reward in response_steps)
        for sample, response_steps in zip(group, steps, strict=True)
    ]
    else_advantages = _standard(
        [0.0 if abs(value) < NOTHING else value for value in else_earned], std
    )
    token_advantages = []
    for sample, response_steps, else_advantage in zip(group, steps, else_advantages, strict=True):
        step_advantages = [(end, next(values)) for end, _ in response_steps]
        tokens = range(len(sample.response))
        token_advantages.append(
            [
                else_advantage + sum(value for end, value in step_advantages if end >= at)
                for at in tokens
            ]
        )
    return token_advantages
