"""Advantages from the recorded rewards, in plain Python, by group (spec, section 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, pstdev, stdev
from typing import Any

from stages.audit.recorded import NotAuditable, RecordedSample

FLOOR = 1e-6  # beside a standard deviation
NOTHING = 1e-9  # of a reward that is the mean of its steps, beyond it


def advantages(
    samples: Sequence[RecordedSample],
    settings: dict[str, Any],
    weights: dict[str, dict[str, float]],
) -> list[list[float]]:
    """Return the advantage of every response token of every sample, before scaling by entropies.

    `settings` is the objective's block `advantage`, `weights` the weights of a reward's parts, by
    domain. Groups are of one prompt, and a batch baseline is taken within the domain.
    """
    found: list[list[float]] = [[] for _ in samples]
    domains: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, sample in enumerate(samples):
        domains[sample.domain][sample.group].append(place)
    for domain, groups in domains.items():
        of_groups = [[samples[place] for place in group] for group in groups.values()]
        values = _domain(of_groups, settings, weights.get(domain, {}))
        for group, of_group in zip(groups.values(), values, strict=True):
            for place, value in zip(group, of_group, strict=True):
                tokens = len(samples[place].response)
                found[place] = value if isinstance(value, list) else [value] * tokens
    return found


Value = float | list[float]


def _domain(
    groups: list[list[RecordedSample]], settings: dict[str, Any], weights: dict[str, float]
) -> list[list[Value]]:
    name, std = settings["name"], settings.get("std", "sample")
    rewards = [[sample.fields["reward"] for sample in group] for group in groups]
    if name == "reinforce_pp":
        flat = [reward for group in rewards for reward in group]
        counts = [1] * len(flat)
        if settings.get("over", "responses") == "tokens":
            counts = [max(len(sample.response), 1) for group in groups for sample in group]
        repeated = _standard(
            [reward for reward, n in zip(flat, counts, strict=True) for _ in range(n)], std
        )
        return _like([repeated[end - 1] for end in accumulate(counts)], rewards)
    if name in ("reinforce_pp_baseline", "gdpo"):
        centred = (
            [_centred(group) for group in rewards]
            if name == "reinforce_pp_baseline"
            else [_parts(group, weights, std) for group in groups]
        )
        spread = _spread([value for group in centred for value in group], std)
        return [_alone([value / (spread + FLOOR) for value in group]) for group in centred]
    if name == "process":
        return [_process(group, std) for group in groups]
    if name == "gae":
        raise NotAuditable("objective.advantage gae: a critic's values are not audited")
    of_group = {
        "grpo": lambda group, reward: _standard(reward, std),
        "dr_grpo": lambda group, reward: _centred(reward),
        "rloo": lambda group, reward: [
            value * len(reward) / max(len(reward) - 1, 1) for value in _centred(reward)
        ],
        "mo_grpo": lambda group, reward: _parts(group, weights, std),
        "gfpo": lambda group, reward: _filtered(group, reward, settings, std),
    }[name]
    return [_alone(of_group(group, reward)) for group, reward in zip(groups, rewards, strict=True)]


def _alone(values: list[float]) -> list[Value]:
    """Return advantages of 0: a response without others has nothing to compare with."""
    return [0.0] if len(values) < 2 else list(values)


def _centred(values: Sequence[float]) -> list[float]:
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = fmean(values)
    return [value - mean for value in values]


def _spread(values: Sequence[float], std: str) -> float:
    if len(values) < 2:
        return 0.0
    return stdev(values) if std == "sample" else pstdev(values)


def _standard(values: Sequence[float], std: str) -> list[float]:
    spread = _spread(values, std)
    return [value / (spread + FLOOR) for value in _centred(values)]


def _like(flat: list[float], groups: list[list[float]]) -> list[list[Value]]:
    rest = iter(flat)
    return [[next(rest) for _ in group] for group in groups]


def _parts(group: list[RecordedSample], weights: dict[str, float], std: str) -> list[float]:
    names = sorted({name for sample in group for name in sample.fields["reward_parts"]})
    total = [0.0] * len(group)
    for name in names:
        weight = weights.get(name, 1.0)
        if weight == 0:
            continue
        of_part = _standard([sample.fields["reward_parts"][name] for sample in group], std)
        total = [value + weight * part for value, part in zip(total, of_part, strict=True)]
    return total


def _filtered(
    group: list[RecordedSample], rewards: list[float], settings: dict[str, Any], std: str
) -> list[float]:
    lengths = [len(sample.response) for sample in group]
    merit = [-float(length) for length in lengths]
    if settings["by"] == "reward_per_token":
        merit = [reward / max(n, 1) for reward, n in zip(rewards, lengths, strict=True)]
    order = sorted(range(len(group)), key=lambda place: -merit[place])[: settings["keep"]]
    values = _standard([rewards[place] for place in sorted(order)], std)
    among = dict(zip(sorted(order), values, strict=True))
    return [among.get(place, 0.0) for place in range(len(group))]


def _process(group: list[RecordedSample], std: str) -> list[Value]:
    if len(group) < 2:
        return [0.0] * len(group)
    steps = [sample.fields["step_rewards"] for sample in group]
    values = iter(_standard([reward for each in steps for _, reward in each], std))
    rest = [
        sample.fields["reward"] - fmean(reward for _, reward in each)
        for sample, each in zip(group, steps, strict=True)
    ]
    others = _standard([0.0 if abs(value) < NOTHING else value for value in rest], std)
    found: list[Value] = []
    for sample, each, other in zip(group, steps, others, strict=True):
        own = [(end, next(values)) for end, _ in each]
        found.append(
            [
                other + sum(value for end, value in own if end >= place)
                for place in range(len(sample.response))
            ]
        )
    return found
