"""The cases that ranks run with models that leave the device between all passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parallel.model.offload import STATE, Component, DeviceShare, Residency
from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL, batches, samples, train
from tests.layouts.checkpoint_cases import ADAM, KINDS, STEPS, same, save, snapshot
from tests.layouts.critic_cases import learn
from tests.layouts.expert_cases import start_elsewhere

PRECISIONS = {name: MODEL.model_copy(update={"precision": name}) for name in ("fp32", "bf16")}


def share() -> DeviceShare:
    """Return a share that empties this rank's CPU storages, as it does a device's."""
    return DeviceShare(active=True, engine=True)


def policy_of(layout: LayoutSettings, kind: str, precision: str, seed: int = 0) -> Any:
    from parallel.model.policy import TrainedPolicy
    from tests.layouts.cases import NO_LOSSES

    layout = layout.model_copy(update={"distributed_optimizer": KINDS[kind].distributed})
    settings = KINDS[kind].settings
    policy = TrainedPolicy(PRECISIONS[precision], layout, settings, steps=10, losses=NO_LOSSES)
    policy.start_fresh(seed)
    return policy


def bytes_on_device(residency: Residency) -> dict[Component, int]:
    """Return the bytes of each component that are on the device."""
    sets = residency._storages()
    return {name: sum(storage.nbytes() for storage in sets[name]) for name in sorted(sets)}


def trained(policy: Any, moves: bool) -> tuple[list[Any], list[dict[str, int]]]:
    """Train and evaluate; return what is measured, and the bytes on the device in between."""
    measured: list[Any] = []
    between = []
    turns = policy.residency.share
    for step in range(STEPS):
        for parts in (None, {"weights"}, STATE):
            if moves:
                turns.only(policy.residency if parts else None, parts or ())
                between.append(bytes_on_device(policy.residency))
        measured += policy.target_logprobs(batches(samples(8, seed=step)), 1.0)
        if moves:
            turns.only()
        measured += train(policy, range(step, step + 1))
    return measured, between


def trains_equally(layout: LayoutSettings, kind: str, precision: str) -> dict[str, Any]:
    """Compare a policy that leaves the device before every pass with one that stays."""
    still, moving = (policy_of(layout, kind, precision) for _ in range(2))
    turns = share()
    turns.add(moving.residency)
    expected, _ = trained(still, moves=False)
    found, between = trained(moving, moves=True)
    whole = bytes_on_device(still.residency)
    moving.residency.hold(STATE)
    equal = [
        torch.equal(one, other) if torch.is_tensor(one) else one == other
        for one, other in zip(expected, found, strict=True)
    ]
    return {
        "measured": all(equal) and len(equal) >= STEPS,
        "state": same(snapshot(still), snapshot(moving)),
        "whole": whole,
        "between": between[-3:],
        "seconds": turns.take_seconds(),
    }


def resumes_equally(layout: LayoutSettings, kind: str, directory: str) -> dict[str, bool]:
    """Save a policy with its critic and average while both are away; resume beside a share."""
    from parallel.checkpoint import load
    from parallel.files import newest_whole

    torch.use_deterministic_algorithms(True)

    def build(moves: bool, seed: int) -> tuple[Any, Any, DeviceShare]:
        from parallel.model.policy import Policy, ValueModel
        from tests.layouts.cases import NO_LOSSES

        policy = KINDS[kind].build(layout, seed)
        own = layout.model_copy(update={"distributed_optimizer": KINDS[kind].distributed})
        critic = ValueModel(MODEL, own, ADAM, 10, NO_LOSSES)
        start_elsewhere(critic, Path(), head=False)
        average = Policy(MODEL, layout)
        average.start_fresh(seed + 7)
        policy.companions["critic"], policy.averages["ema"] = critic, average
        turns = share()
        for each in (policy, critic, average) if moves else ():
            turns.add(each.residency)
        return policy, critic, turns

    files = []
    for moves in (False, True):
        policy, critic, turns = build(moves, 0)
        learn(policy, critic, range(STEPS))
        turns.only()
        save(policy, Path(directory) / f"{moves}", STEPS, {})
        files.append(newest_whole(Path(directory) / f"{moves}").files)
    resumed, resumed_critic, _ = build(True, 1)
    load.training_state(resumed, Path(directory) / "True" / f"step_{STEPS}")
    more = range(STEPS, 2 * STEPS)
    continued = learn(policy, critic, more) == learn(resumed, resumed_critic, more)
    save(policy, Path(directory) / "late", 2 * STEPS, {})
    save(resumed, Path(directory) / "late resumed", 2 * STEPS, {})
    late = [newest_whole(Path(directory) / each).files for each in ("late", "late resumed")]
    torch.use_deterministic_algorithms(False)
    return {"files": files[0] == files[1], "continued": continued, "late": late[0] == late[1]}


def takes_turns(layout: LayoutSettings) -> dict[str, Any]:
    """Return what is on the device while models take turns, and the frozen models' results."""
    from parallel.model.policy import Policy

    policy = policy_of(layout, "adam_distributed", "fp32")
    critic = policy_of(layout, "adam_distributed", "fp32", seed=1)
    frozen = [Policy(MODEL, layout) for _ in range(2)]
    for seed, each in enumerate(frozen):
        each.start_fresh(seed + 2)
    drawn = batches(samples(8))
    expected = [each.target_logprobs(drawn, 1.0) for each in frozen]
    logits = [each.response_logits(drawn) for each in frozen]
    before = [[part.weight.clone() for part in each] for each in logits]
    turns = share()
    models = {"policy": policy, "critic": critic, "one": frozen[0], "other": frozen[1]}
    for each in models.values():
        turns.add(each.residency)
    log: dict[str, dict[str, list[str]]] = {}

    def note(name: str) -> None:
        log[name] = {
            name: sorted(each.residency.on_device)
            for name, each in models.items()
            if each.residency.on_device
        }

    note("start")
    list(train(policy, range(1)))
    note("update")
    found = [frozen[0].target_logprobs(drawn, 1.0)]
    note("reference")
    found.append(frozen[1].target_logprobs(drawn, 1.0))
    note("next reference")
    critic.target_logprobs(drawn, 1.0)
    note("values")
    list(train(critic, range(1)))
    note("critic's update")
    turns.only(policy.residency)
    note("refit")
    turns.only()
    note("rollout")
    lazy = [each.response_logits(drawn) for each in frozen]
    turns.only()
    kept = [[part.weight for part in each] for each in lazy]
    equal = [
        torch.equal(one, other)
        for ones, others in ((expected, found), (before, kept))
        for each, every in zip(ones, others, strict=True)
        for one, other in zip(each, every, strict=True)
    ]
    return {"log": log, "equal": all(equal)}


def loses_gradients(layout: LayoutSettings) -> str:
    """Return the error of a step after another pass has taken the gradients' room."""
    policy = policy_of(layout, "adam_distributed", "fp32")
    share().add(policy.residency)
    try:
        policy.step()
    except RuntimeError as error:
        return str(error)
    return ""


def keeps_written_weights(layout: LayoutSettings) -> bool:
    """Return true if weights written to a frozen model survive its leaving the device."""
    from parallel.model.policy import Policy

    average = Policy(MODEL, layout)
    average.start_fresh(3)
    turns = share()
    turns.add(average.residency)
    for tensor in average.named_weights().values():
        tensor.fill_(0.5)
    average.weights_changed()
    turns.only()
    return all(bool((tensor == 0.5).all()) for tensor in average.named_weights().values())
