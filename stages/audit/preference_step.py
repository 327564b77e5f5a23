"""A recomputed step on preference pairs, and the reference's log-probabilities on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.files import open_file
from stages.audit.model import Model, Read
from stages.audit.recorded import NotAuditable, RecordedSample, naming
from stages.audit.rows import CLOSE, Comparison, number, numbers
from stages.audit.update import Optimizer, take_update

SOURCE = "source/"  # before a source's name in reference.npz


def preference_step(
    settings: dict[str, Any],
    samples: Sequence[RecordedSample],
    policy: Model,
    reference: Model,
    optimizer: Optimizer,
    logged: Mapping[str, float],
) -> list[Comparison]:
    """Recompute the loss of the step's pairs, chosen and rejected in turn; update the policy.

    A pair's loss depends on its two log-probabilities through their difference d alone: the
    gradient of each response is that of its log-probability times the loss's derivative by d.

    Raises:
        NotAuditable: the samples are no pairs.
    """
    chosen_samples, rejected_samples = samples[::2], samples[1::2]
    if [sample.group for sample in chosen_samples] != [sample.group for sample in rejected_samples]:
        raise NotAuditable("the recorded samples are not pairs of a chosen and a rejected response")
    loss, count = settings["loss"], len(chosen_samples)
    with torch.no_grad():
        apart = {
            sample: _logprob(policy.read(sample, False), loss)
            - _logprob(reference.read(sample, False), loss)
            for sample in samples
        }
    better, worse = (
        torch.stack([apart[sample] for sample in side]).double()
        for side in (chosen_samples, rejected_samples)
    )
    difference = (better - worse).requires_grad_()
    losses = _losses(difference, loss)
    losses.sum().backward()
    assert difference.grad is not None
    slopes = dict(zip(chosen_samples, difference.grad / count, strict=True))
    slopes |= zip(rejected_samples, -difference.grad / count, strict=True)

    def share(read: Read) -> torch.Tensor:
        return slopes[read.sample] * _logprob(read, loss)

    shared = take_update(policy, optimizer, samples, settings["routing"], False, share)
    beta = loss["beta"]
    quantities = {
        "loss": float(losses.detach().mean()),
        "reward_chosen": beta * float(better.mean()),
        "reward_rejected": beta * float(worse.mean()),
        "reward_margin": beta * float((better - worse).mean()),
        **shared,
    }
    return [
        number("pairs", count, settings["pairs_per_step"]),
        *(number(name, logged[name], value) for name, value in quantities.items()),
        _accuracy(logged["reward_accuracy"], beta * (better - worse)),
    ]


def reference_rows(
    stage: Path, samples: Sequence[RecordedSample], reference: Model
) -> list[Comparison]:
    """Compare the reference's log-probabilities in reference.npz with those of the step's pairs.

    Raises:
        NotAuditable: the file is missing or damaged, or has no such pair.
    """
    path = stage / "reference.npz"
    if not path.exists():
        raise NotAuditable(f"no {path}: the reference's log-probabilities are gone")
    with naming(path), open_file(path) as file, np.load(file, allow_pickle=False) as held:
        stored = [
            float(held[f"{SOURCE}{sample.domain}"][sample.fields["row"], place % 2])
            for place, sample in enumerate(samples)
        ]
    with torch.no_grad():
        recomputed = [
            float(reference.read(sample, False).logprobs(1.0).sum()) for sample in samples
        ]
    return [numbers("reference log p", stored, recomputed)]


def _logprob(read: Read, loss: dict[str, Any]) -> torch.Tensor:
    """Return a response's log-probability, or the mean over its tokens."""
    values = read.logprobs(1.0)
    return values.mean() if loss["logprobs"] == "mean" else values.sum()


def _losses(difference: torch.Tensor, loss: dict[str, Any]) -> torch.Tensor:
    """Return each pair's loss by its difference d (arXiv 2305.18290; IPO, 2310.12036)."""
    if loss["name"] == "ipo":
        return (difference - 0.5 / loss["beta"]) ** 2
    if loss["name"] != "sigmoid":
        raise NotAuditable(f"loss.name: {loss['name']} is not audited")
    likely = torch.nn.functional.logsigmoid(loss["beta"] * difference)
    unlikely = torch.nn.functional.logsigmoid(-loss["beta"] * difference)
    return -(1 - loss["label_smoothing"]) * likely - loss["label_smoothing"] * unlikely


def _accuracy(run: float, margins: torch.Tensor) -> Comparison:
    """Compare the share of pairs with a margin above 0; rounding decides those next to it."""
    near = float((margins.abs() < CLOSE).double().mean())
    share = float((margins > 0).double().mean())
    return Comparison("reward_accuracy", run, share, abs(run - share), CLOSE + near)
