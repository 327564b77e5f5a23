"""A policy's log-probabilities, loss and gradients here and on a CPU; and its bits, twice.

CUDA_VISIBLE_DEVICES= python -m tests.gpu.parity FILE     # the reference on a CPU
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from parallel.settings import ModelSettings
from tests.gpu.findings import Finding
from tests.gpu.models import TINY, samples, trained_policy
from tests.gpu.part import Lane, one_rank
from tests.layouts.cases import accumulate, batches

SEED = 1
# Of log-probabilities the mean in nats, of gradients |difference| / |gradient|, the worst tensor.
BOUNDS = {"fp32": (1e-4, 1e-4, 1e-3), "bf16": (0.05, 0.02, 0.1)}
REFERENCE_SECONDS = 200


def parity(lane: Lane) -> list[Finding]:
    """Compare this device with a CPU, in both precisions; routes are replayed."""
    found: list[Finding] = []
    with one_rank():  # first, so that a missing package is found here
        for precision, reference in _references().items():
            ours = measured(_model(precision), reference["weights"])
            found += _differences(precision, ours, reference)
    return found


def _references() -> dict[str, Any]:
    """Return what a process that sees no GPU measures, by precision."""
    with tempfile.TemporaryDirectory(prefix="braid-parity-") as directory:
        file = Path(directory) / "reference.pt"
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.gpu.parity", str(file)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            timeout=REFERENCE_SECONDS,
            check=True,
        )
        found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def _differences(precision: str, ours: Any, reference: Any) -> list[Finding]:
    of_logprobs, of_loss, of_gradients = BOUNDS[precision]
    apart = (ours["logprobs"] - reference["logprobs"]).abs()
    gradients = {
        name: _apart(ours["gradients"][name], expected)
        for name, expected in reference["gradients"].items()
    }
    worst = max(gradients, key=lambda name: gradients[name])
    loss = abs(ours["loss"] - reference["loss"]) / max(1.0, abs(reference["loss"]))
    return [
        Finding(f"{precision} log-probabilities, mean", float(apart.mean()), "nats", of_logprobs),
        Finding(f"{precision} log-probabilities, largest", float(apart.max()), "nats"),
        Finding(f"{precision} loss", loss, "", of_loss),
        Finding(f"{precision} gradients", gradients[worst], f"in {worst}", of_gradients),
    ]


def determinism(lane: Lane) -> list[Finding]:
    """Train two steps twice, with deterministic algorithms, and count the differing bits."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with one_rank():
            first, second = (_trained("bf16") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    differing = sum(int((first[name] != second[name]).sum()) for name in first)
    elements = sum(each.numel() for each in first.values())
    return [Finding(f"weights that differ, of {elements}", float(differing), "", 0)]


def measured(model: ModelSettings, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """Return log-probabilities, loss and gradients, on the CPU, and the weights they are of.

    Weights are copied by name: TransformerEngine's layers have names, and random weights, of their
    own.
    """
    from parallel.weights.names import plain_name

    policy = trained_policy(model)
    policy.start_fresh(SEED)
    if weights is not None:
        with torch.no_grad():
            for name, tensor in policy.named_weights().items():
                tensor.copy_(weights[name])
        policy.weights_changed()
    kept = {name: each.detach().cpu().clone() for name, each in policy.named_weights().items()}
    drawn = samples(model, 12, 48)
    parts = batches(drawn, replay=True)
    logprobs = torch.cat([each.cpu().flatten() for each in policy.target_logprobs(parts, 1.0)])
    loss = accumulate(policy, "sequence_policy", drawn, batches(drawn, replay=True))["loss"]
    gradients = {
        plain_name(name, False): parameter.main_grad.float().cpu().clone()
        for name, parameter in policy.chunks[0].named_parameters()
    }
    return {"logprobs": logprobs, "loss": loss, "gradients": gradients, "weights": kept}


def _trained(precision: str) -> dict[str, torch.Tensor]:
    """Return the weights after two steps."""
    model = _model(precision)
    policy = trained_policy(model)
    policy.start_fresh(SEED)
    for step in (1, 2):
        drawn = samples(model, 12, 48, seed=step)
        accumulate(policy, "cross_entropy", drawn, batches(drawn, replay=True))
        policy.step()
    return {name: each.detach().cpu().clone() for name, each in policy.named_weights().items()}


def _model(precision: str) -> ModelSettings:
    return TINY.model_copy(update={"precision": precision})


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


if __name__ == "__main__":
    with one_rank():
        torch.save({precision: measured(_model(precision)) for precision in BOUNDS}, sys.argv[1])
