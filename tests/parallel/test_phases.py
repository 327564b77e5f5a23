"""The phases of a step: nothing is in two places, and a model of 30 B fits on eight 80 GB GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel.estimates.engine_memory import GIB, RESERVE_BYTES, engine_share
from parallel.estimates.memory import (
    RankMemory,
    RankModels,
    forward_activations,
    routed_bytes,
    training_memory,
)
from parallel.estimates.phases import (
    EngineOnGpus,
    PhaseMemory,
    checkpoint_copies,
    engine_gpu_bytes,
    neighbours,
    phases,
)
from parallel.settings import EngineSettings, LayoutSettings, OptimizerSettings
from tests.layouts.real_models import QWEN3_30B

H100 = round(79.2 * GIB)
LAYOUT = LayoutSettings(ranks=8, tensor=4, expert=8, recompute="full")
ENGINE = EngineSettings(count=4, tensor=2, max_model_tokens=8192)
TRAINER = {"trainer weights", "gradients", "optimizer state", "frozen model", "activations"}
AWAKE = {"engine weights", "KV cache", "engine workspace", "staging"}


def models(critic: RankMemory | None = None, precision_aware: bool = False) -> RankModels:
    """Return the models of a GRPO stage with a reference on a rank."""
    adam = OptimizerSettings(learning_rate=1e-6, precision_aware=precision_aware)
    [rank] = training_memory(QWEN3_30B, LAYOUT, adam, 8192, 1)
    return RankModels(
        policy=rank,
        critic=critic,
        forward=forward_activations(QWEN3_30B, LAYOUT, 8192),
        routed=routed_bytes(QWEN3_30B, LAYOUT, 8192),
        frozen=rank.frozen,
        frozen_models=1,
    )


def found(held: RankModels, engine: EngineSettings = ENGINE) -> dict[str, PhaseMemory]:
    share = engine_share(QWEN3_30B, engine)
    shared = engine.placement == "shared"
    engines = EngineOnGpus(share, shared, neighbours(LAYOUT, engine, 8), H100)
    return {each.phase: each for each in phases(held, engines)}


def test_engine_and_trainer_take_turns_on_shared_gpus() -> None:
    held = models(precision_aware=True)
    steps = found(held)
    assert [*steps] == ["generate", "weight sync", "log-probabilities", "update", "optimizer step"]
    assert not TRAINER & steps["generate"].gpu.keys()
    assert {*steps["weight sync"].gpu} & TRAINER == {"trainer weights"}
    assert "KV cache" not in steps["weight sync"].gpu
    for name in ("log-probabilities", "update", "optimizer step"):
        assert not AWAKE & steps[name].gpu.keys()
    assert not {"gradients", "optimizer state"} & steps["log-probabilities"].gpu.keys()
    assert "frozen model" not in steps["update"].gpu
    assert {phase.where for phase in steps.values()} == {"GPU"}
    for phase in steps.values():
        assert phase.total == sum(phase.gpu.values())
        assert {"engine process", "trainer process"} <= phase.gpu.keys()
        assert phase.host == {
            "frozen models": held.frozen,
            "trainer weights": held.policy.parameters,
            "optimizer state": held.policy.optimizer,
        }


def test_on_gpus_of_their_own_nothing_moves_but_frozen_models() -> None:
    held = models()
    steps = found(held, ENGINE.model_copy(update={"placement": "own"}))
    assert [*steps] == ["generate", "log-probabilities", "update", "optimizer step"]
    assert steps["generate"].where == "engine's GPU"
    assert "trainer process" not in steps["generate"].gpu
    whole = {"trainer weights", "gradients", "optimizer state", "trainer process"}
    for name in ("log-probabilities", "update", "optimizer step"):
        assert steps[name].where == "trainer's GPU"
        assert whole <= steps[name].gpu.keys()
        assert "engine process" not in steps[name].gpu
        assert steps[name].host == {"frozen models": held.frozen}


def test_of_two_trained_models_on_shared_gpus_one_is_updated_at_a_time() -> None:
    critic = RankMemory(parameters=1, gradients=2, optimizer=4)
    shared, own = (
        found(models(critic), ENGINE.model_copy(update={"placement": where}))
        for where in ("shared", "own")
    )
    policy = models().policy
    for name, moved in (("trainer weights", 1), ("gradients", 2), ("optimizer state", 4)):
        held = shared["optimizer step"].gpu[name]
        assert own["optimizer step"].gpu[name] == held + moved
    assert shared["log-probabilities"].gpu["trainer weights"] == policy.parameters + 1
    assert shared["generate"].host["optimizer state"] == policy.optimizer + 4


def test_between_the_updates_of_a_step_the_last_one_s_optimizer_state_stays() -> None:
    held = replace(models(RankMemory(parameters=1, gradients=2, optimizer=4)), updates=2)
    again = found(held)["log-probabilities"].gpu
    assert again["optimizer state"] == held.policy.optimizer
    assert "gradients" not in again
    own = found(held, ENGINE.model_copy(update={"placement": "own"}))["log-probabilities"].gpu
    assert own["optimizer state"] == held.policy.optimizer + 4


def test_without_engines_there_is_no_turn_to_take() -> None:
    steps = [*phases(models(), None)]
    assert [each.phase for each in steps] == ["update", "optimizer step"]
    [load] = phases(RankModels(RankMemory(7), trains=False), None)
    assert (load.phase, load.gpu["trainer weights"], load.host) == ("load", 7, {})


@pytest.mark.parametrize(("count", "tensor"), [(8, 1), (4, 2), (2, 4)])
def test_a_model_of_30_b_fits_on_one_node_of_eight_gpus_of_80_gb(count: int, tensor: int) -> None:
    engine = ENGINE.model_copy(update={"count": count, "tensor": tensor})
    steps = found(models(precision_aware=True), engine)
    assert max(each.total for each in steps.values()) <= H100 - RESERVE_BYTES
    # At least 80 sequences of 8k tokens in the caches of all engines.
    cache = steps["generate"].gpu["KV cache"] * 8
    assert cache > 80 * 8192 * 48 * 2 * 4 * 128 * 2
    assert steps["update"].total < 64 * GIB


def test_its_optimizer_state_by_setting() -> None:
    elements = models().policy.optimizer // 12  # an fp32 master weight and two moments

    assert elements == pytest.approx(3.82e9, rel=0.01)
    assert models().policy.optimizer == 12 * elements
    assert models(precision_aware=True).policy.optimizer == 8 * elements


def test_state_of_cpu_offload_is_on_the_host_in_every_phase() -> None:
    """And on no GPU, whoever else has it; a checkpoint copies it as any other."""
    offloaded = OptimizerSettings(learning_rate=1e-6, cpu_offload=0.75)
    [rank] = training_memory(QWEN3_30B, LAYOUT, offloaded, 8192, 1)
    plain, some = models(), replace(models(), policy=rank)
    on_host = rank.host_optimizer
    assert on_host == round(0.75 * plain.policy.optimizer) > 30 * GIB
    for placement in ("shared", "own"):
        engine = ENGINE.model_copy(update={"placement": placement})
        without, given = found(plain, engine), found(some, engine)
        for name, phase in given.items():
            moved = without[name].gpu.get("optimizer state", 0)
            assert phase.gpu.get("optimizer state", 0) == (moved - on_host if moved else 0)
            everything = plain.policy.optimizer if placement == "shared" else on_host
            assert phase.host["optimizer state"] == everything
    assert checkpoint_copies(some) == checkpoint_copies(plain)


def test_a_checkpoint_takes_copies_on_the_host() -> None:
    held = models()
    assert checkpoint_copies(held) == {
        "checkpoint being saved": held.policy.parameters + held.policy.optimizer,
        "checkpoint being loaded": 3 * held.policy.gradients,
    }


def test_engines_map_the_memory_of_their_node_unless_they_get_messages() -> None:
    def mapping(layout: LayoutSettings = LAYOUT, **engine: object) -> int:
        return neighbours(layout, ENGINE.model_copy(update=engine), per_node=8)

    assert mapping() == 7
    assert mapping(transport="messages") == 0
    assert mapping(count=2) == 4  # of a GPU without an engine, all of them
    assert mapping(LAYOUT.model_copy(update={"ranks": 4}), placement="own") == 4
    assert mapping(placement="own") == 0  # the engines are on another node


def test_engines_map_only_the_memory_of_their_own_node_of_several() -> None:
    ranks, wide = (LAYOUT.model_copy(update={"ranks": n}) for n in (16, 12))
    one = ENGINE.model_copy(update={"count": 1, "tensor": 4})
    assert neighbours(ranks, one, per_node=8) == 4
    assert neighbours(ranks, one.model_copy(update={"count": 2}), per_node=8) == 4
    assert neighbours(ranks, one.model_copy(update={"count": 4}), per_node=8) == 7
    assert neighbours(ranks, one.model_copy(update={"tensor": 16}), per_node=8) == 7
    own = one.model_copy(update={"placement": "own", "count": 2})
    assert neighbours(wide, own, per_node=8) == 4  # of the second node; the other engine is alone


def test_an_engine_may_use_what_the_trainer_s_process_leaves() -> None:
    sizes = [80 * GIB, 79 * GIB] * 4
    assert engine_gpu_bytes(LAYOUT, ENGINE, sizes) == 79 * GIB - GIB - 8 * GIB // 2
    assert engine_gpu_bytes(LAYOUT, ENGINE.model_copy(update={"placement": "own"}), sizes) is None
    assert engine_gpu_bytes(LAYOUT, ENGINE, []) is None
    few = LAYOUT.model_copy(update={"ranks": 4}), ENGINE.model_copy(update={"count": 2})
    unused = [80 * GIB] * 4 + [16 * GIB]
    assert engine_gpu_bytes(*few, unused) == 80 * GIB - GIB - 4 * GIB // 2
