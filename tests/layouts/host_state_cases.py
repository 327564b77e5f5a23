"""The cases that ranks run with a share of Adam's state in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from parallel.settings import LayoutSettings
from tests.layouts.cases import NO_LOSSES, train
from tests.layouts.checkpoint_cases import ADAM, STEPS, same, save, snapshot
from tests.layouts.offload_cases import PRECISIONS, bytes_on_device, share

LATER = range(STEPS, 2 * STEPS)


def build(layout: LayoutSettings, precision: str, on_host: float, seed: int = 0) -> Any:
    from parallel.model.policy import TrainedPolicy

    optimizer = ADAM.model_copy(update={"cpu_offload": on_host})
    policy = TrainedPolicy(PRECISIONS[precision], layout, optimizer, 10, NO_LOSSES)
    policy.start_fresh(seed)
    return policy


def state(policy: Any) -> Iterator[torch.Tensor]:
    """Yield the moments and the master weights, without fp32 weights that are their own."""
    for part in policy.optimizer.chained_optimizers:
        for group in part.shard_fp32_from_float16_groups:
            yield from group
        for tensors in part.optimizer.state.values():
            yield from tensors.values()


def placed(policy: Any) -> tuple[int, int]:
    """Return the elements of the optimizer's state in host memory, and all of them."""
    host = policy.host_state.bytes.untyped_storage().data_ptr()
    tensors = list(state(policy))
    there = [each for each in tensors if each.untyped_storage().data_ptr() == host != 0]
    return sum(each.numel() for each in there), sum(each.numel() for each in tensors)


def trains_equally(layout: LayoutSettings, precision: str, on_host: float) -> dict[str, Any]:
    """Train with a share of the state on the host, and with none; the first leaves the device."""
    plain, hosted = build(layout, precision, 0.0), build(layout, precision, on_host)
    before, _ = placed(hosted)  # Adam has not allocated the rest yet
    expected = [*train(plain, range(STEPS))]
    turns = share()
    turns.add(hosted.residency)
    found = []
    away = []
    for step in range(STEPS):
        turns.only()
        away.append(sum(bytes_on_device(hosted.residency).values()))
        found += train(hosted, range(step, step + 1))
    hosted.residency.hold(("weights", "optimizer"))
    parked = bytes_on_device(hosted.residency)["optimizer"]
    whole = bytes_on_device(plain.residency)["optimizer"]
    on_host, everything = placed(hosted)
    return {
        "losses": found == expected,
        "state": same(snapshot(plain), snapshot(hosted)),
        "away": away,
        "placed": (on_host, everything),
        "kept": on_host == before,
        "parked": parked == 4 * (everything - on_host) == whole - 4 * on_host,
    }


def continues(layout: LayoutSettings, policy: Any) -> tuple[list[Any], list[torch.Tensor]]:
    return [*train(policy, LATER)], snapshot(policy)


def resumes_anywhere(
    layout: LayoutSettings, precision: str, loads: dict[float, list[float]], directory: str
) -> dict[str, bool]:
    """Save with each share, load with the shares that it names; compare how training continues."""
    from parallel.checkpoint import load
    from parallel.files import newest_whole

    torch.use_deterministic_algorithms(True)
    answers, files = [], []
    for saved, shares in loads.items():
        policy = build(layout, precision, saved)
        list(train(policy, range(STEPS)))
        save(policy, Path(directory) / f"{saved}", STEPS, {})
        files.append(newest_whole(Path(directory) / f"{saved}").files)
        answers.append(continues(layout, policy))
        for loaded in shares:
            other = build(layout, precision, loaded, seed=1)
            before, _ = placed(other)
            load.training_state(other, Path(directory) / f"{saved}" / f"step_{STEPS}")
            assert placed(other)[0] == before
            answers.append(continues(layout, other))
    torch.use_deterministic_algorithms(False)
    losses, tensors = answers[0]
    return {
        "files": all(each == files[0] for each in files),
        "losses": all(each[0] == losses for each in answers),
        "state": all(same(each[1], tensors) for each in answers),
        "compared": len(answers) == len(loads) + sum(map(len, loads.values())),
    }


def resumes_from(
    layout: LayoutSettings, precision: str, shares: list[float], checkpoint: str
) -> dict[str, bool]:
    """Load another layout's checkpoint with each share; compare how training continues."""
    from parallel.checkpoint import load

    torch.use_deterministic_algorithms(True)
    answers = []
    for loaded in shares:
        policy = build(layout, precision, loaded, seed=1)
        load.training_state(policy, Path(checkpoint))
        answers.append(continues(layout, policy))
    torch.use_deterministic_algorithms(False)
    return {
        "losses": all(each[0] == answers[0][0] for each in answers),
        "state": all(same(each[1], answers[0][1]) for each in answers),
    }
