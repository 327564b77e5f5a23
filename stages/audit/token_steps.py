"""Steps whose loss is a mean over tokens: the cold start's and the merge's (spec, section 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.audit.drawing import kept_sets, mismatch
from stages.audit.model import Model, Read
from stages.audit.optimizer import Optimizer, norm
from stages.audit.recorded import RecordedSample
from stages.audit.rows import Comparison, number
from stages.audit.update import RouterLosses, gradients


def cold_start_step(
    settings: dict[str, Any],
    samples: Sequence[RecordedSample],
    policy: Model,
    optimizer: Optimizer,
    logged: Mapping[str, float],
) -> list[Comparison]:
    """Recompute the cross-entropy over the step's learned tokens, and update the policy."""
    tokens = sum(len(sample.learned) for sample in samples)
    total = 0.0

    def loss(read: Read) -> torch.Tensor:
        nonlocal total
        value = -read.logprobs(1.0).sum() / tokens
        total += float(value.detach())
        return value

    losses = RouterLosses(settings["routing"], samples)
    found = gradients(policy, samples, False, losses, loss)
    quantities = {"loss": total, **losses.logged(), "gradient_norm": norm(found)}
    _update(policy, optimizer, found)
    return [number(name, logged[name], value) for name, value in quantities.items()]


def merge_step(
    settings: dict[str, Any],
    domains: Sequence[str],
    samples: Sequence[RecordedSample],
    policy: Model,
    teachers: Mapping[str, Model],
    optimizer: Optimizer,
    step: int,
    logged: Mapping[str, float],
) -> list[Comparison]:
    """Recompute KL(student || teacher of the domain) at temperature 1, and update the policy.

    It is over the whole vocabulary, the mean over tokens by domain, weighted by domain.
    """
    counts = {
        name: sum(len(sample.learned) for sample in samples if sample.domain == name)
        for name in domains
    }
    shares = _shares(settings, counts)
    means = dict.fromkeys(domains, 0.0)

    def loss(read: Read) -> torch.Tensor:
        domain = read.sample.domain
        with torch.no_grad():
            log_q = teachers[domain].read(read.sample, replay=False).distribution(1.0)
        log_p = read.distribution(1.0)
        kl = (log_p.exp() * (log_p - log_q)).sum() / counts[domain]
        means[domain] += float(kl.detach())
        return shares[domain] * kl

    losses = RouterLosses(settings["routing"], samples)
    replay = settings["routing"]["replay"] == "r3"
    fresh = [sample for sample in samples if sample.fields["weight_version"] == step]
    drawing = kept_sets(fresh, policy, settings["sampling"], replay)
    with torch.no_grad():
        temperature = settings["sampling"]["temperature"]
        old = [policy.read(sample, replay).logprobs(temperature) for sample in samples]
    drawing += mismatch(samples, old, logged)
    found = gradients(policy, samples, replay, losses, loss)
    asked = settings["sampling"]
    drawn = asked["prompts_per_step"] * asked["group_size"] * len(domains)
    quantities = {
        "loss": sum(shares[name] * mean for name, mean in means.items()),
        **{f"teacher_kl/{name}": mean for name, mean in means.items()},
        **{f"token_share/{name}": n / sum(counts.values()) for name, n in counts.items()},
        **losses.logged(),
        "gradient_norm": norm(found),
    }
    _update(policy, optimizer, found)
    rows = [number(name, logged[name], value) for name, value in quantities.items()]
    return [number("samples", len(samples), drawn), *drawing, *rows]


def _shares(settings: dict[str, Any], counts: Mapping[str, int]) -> dict[str, float]:
    """Return each domain's weight; they sum to 1, and a domain without tokens weighs 0."""
    by_tokens = settings["averaged_over"] == "tokens"
    raw = {
        name: settings["domain_weights"].get(name, 1.0) * (n if by_tokens else min(n, 1))
        for name, n in counts.items()
    }
    return {name: value / sum(raw.values()) for name, value in raw.items()}


def _update(policy: Model, optimizer: Optimizer, found: dict[str, torch.Tensor]) -> None:
    after = optimizer.step(policy.weights(), found)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(after[name])
