"""Steps whose loss is a mean over tokens: the cold start's and the merge's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.audit.model import Model, Read
from stages.audit.recorded import NotAuditable, RecordedSample
from stages.audit.rows import Comparison, kept_sets, mismatch, number
from stages.audit.update import Optimizer, take_update


def cold_start_step(
    settings: dict[str, Any],
    samples: Sequence[RecordedSample],
    policy: Model,
    optimizer: Optimizer,
    logged: Mapping[str, float],
) -> list[Comparison]:
    """Recompute the cross-entropy over the step's learned tokens, and update the policy."""
    tokens = sum(len(sample.learned) for sample in samples)
    sample_losses = []

    def loss(read: Read) -> torch.Tensor:
        value = -read.logprobs(1.0).sum() / tokens
        sample_losses.append(float(value.detach()))
        return value

    shared = take_update(policy, optimizer, samples, settings["routing"], False, loss)
    quantities = {"loss": sum(sample_losses), **shared}
    return [number(name, logged[name], value) for name, value in quantities.items()]


def merge_step(
    settings: dict[str, Any],
    samples: Sequence[RecordedSample],
    policy: Model,
    teachers: Mapping[str, Model],
    optimizer: Optimizer,
    step: int,
    logged: Mapping[str, float],
) -> list[Comparison]:
    """Recompute KL(student || teacher of the domain) at temperature 1, and update the policy.

    It is over the whole vocabulary, the mean over tokens by domain, weighted by domain.

    Raises:
        NotAuditable: the loss or the weights of domains are others.
    """
    if settings["method"] != "full_vocab_reverse_kl":
        raise NotAuditable(f"method {settings['method']['name']} is not audited")
    precision = settings.get("teacher_memory", {}).get("hidden_states_precision", "model")
    if precision != "model":
        raise NotAuditable(f"hidden states of teachers in {precision} are not audited")
    if settings.get("data_share"):
        raise NotAuditable("data_share above 0 trains on what no engine sampled: it is not audited")
    if settings["averaged_over"] == "gap":
        raise NotAuditable("averaged_over: gap follows earlier steps, and is not audited")
    counts = {
        name: sum(len(sample.learned) for sample in samples if sample.domain == name)
        for name in teachers
    }
    # They sum to 1, and a domain without tokens weighs 0.
    by_tokens = settings["averaged_over"] == "tokens"
    raw = {
        name: settings["domain_weights"].get(name, 1.0) * (n if by_tokens else min(n, 1))
        for name, n in counts.items()
    }
    shares = {name: value / sum(raw.values()) for name, value in raw.items()}
    means = dict.fromkeys(teachers, 0.0)

    def loss(read: Read) -> torch.Tensor:
        domain = read.sample.domain
        with torch.no_grad():
            log_q = teachers[domain].read(read.sample, replay=False).distribution(1.0)
        log_p = read.distribution(1.0)
        kl = (log_p.exp() * (log_p - log_q)).sum() / counts[domain]
        means[domain] += float(kl.detach())
        return shares[domain] * kl

    replay, sampling = settings["routing"]["replay"] == "r3", settings["sampling"]
    expected = sampling["prompts_per_step"] * sampling["group_size"] * len(teachers)
    fresh = [sample for sample in samples if sample.fields["weight_version"] == step]
    with torch.no_grad():
        old = [policy.read(sample, replay).logprobs(sampling["temperature"]) for sample in samples]
    rows = [
        number("samples", len(samples), expected),
        *kept_sets(fresh, policy, sampling, replay),
        *mismatch(samples, old, logged),
    ]
    shared = take_update(policy, optimizer, samples, settings["routing"], replay, loss)
    quantities = {
        "loss": sum(shares[name] * mean for name, mean in means.items()),
        **{f"teacher_kl/{name}": mean for name, mean in means.items()},
        **{f"token_share/{name}": n / sum(counts.values()) for name, n in counts.items()},
        **shared,
    }
    return rows + [number(name, logged[name], value) for name, value in quantities.items()]
