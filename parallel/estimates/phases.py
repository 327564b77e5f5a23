"""The memory of each phase of a training step on GPUs, by component. Never imports torch.

With `engine.placement: own` nothing moves but frozen models. With `shared`, engine and trainer take
turns: while the engine samples, the trainer's weights and optimizer state are on the host; while
the trainer computes, the engine sleeps. Gradients are zero between updates and are not copied.
Frozen models are on the host, and come to the GPU one at a time. The optimizer state of
`optimizer.cpu_offload` is always on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parallel.estimates.engine_memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    RESERVE_BYTES,
    EngineShare,
)
from parallel.estimates.memory import RankMemory, RankModels
from parallel.machine.slots import engine_slots, fits_nodes, gpus_needed
from parallel.settings import EngineSettings, LayoutSettings

Phase = Literal["generate", "weight sync", "log-probabilities", "update", "optimizer step", "load"]
Where = Literal["GPU", "trainer's GPU", "engine's GPU"]

# Assumed, not measured: the blocks of PyTorch's allocator that activations leave unused.
FRAGMENTATION = 0.1
# Assumed: the hidden states that the busiest rank receives, relative to the mean.
IMBALANCE = 1.5
# The permuted tokens of a layer and their copies at the experts, on the way there and back.
ROUTED_COPIES = 4


@dataclass(frozen=True)
class EngineOnGpus:
    """The engines of a stage: their share of a GPU, and what may be used of it.

    `neighbours` are the engine ranks that map the memory of a trainer's GPU and are not on it; each
    has a context there. `gpu_bytes` is the total of a GPU, where it is known.
    """

    share: EngineShare
    shared: bool
    neighbours: int = 0
    gpu_bytes: int | None = None


@dataclass(frozen=True)
class PhaseMemory:
    """The bytes on a GPU in one phase, by component, and on the host of its rank.

    `reserve` must stay free besides: an engine does not start otherwise.
    """

    phase: Phase
    where: Where
    gpu: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    reserve: int = 0

    @property
    def total(self) -> int:
        """All bytes on the GPU."""
        return sum(self.gpu.values())

    @property
    def needed(self) -> int:
        """The bytes that a GPU must have."""
        return self.total + self.reserve

    @property
    def engine_awake(self) -> bool:
        """True while an engine's weights are on the GPU."""
        return self.phase in ("generate", "weight sync")


def phases(models: RankModels, engines: EngineOnGpus | None) -> Iterator[PhaseMemory]:
    """Yield the phases of a step in their order, of a trainer's rank and of an engine's."""
    shared = engines is not None and engines.shared
    trainer = _process_bytes(0 if engines is None else engines.neighbours)
    host = _host(models, shared)
    where: Where = "GPU" if engines is None or shared else "trainer's GPU"
    asleep = 0
    if engines is not None:
        yield _generate(engines, trainer if shared else 0, host)
    if engines is not None and shared:
        asleep = engines.share.process
        gpu = {
            "trainer weights": models.policy.parameters,
            "engine weights": engines.share.weights,
            "staging": engines.share.bucket,
            "engine process": asleep,
            "trainer process": trainer,
        }
        yield PhaseMemory("weight sync", where, gpu, host)
    for phase, components in _passes(models, shared, samples=engines is not None):
        gpu = {**components, "engine process": asleep, "trainer process": trainer}
        yield PhaseMemory(phase, where, _present(gpu), host)


def _process_bytes(neighbours: int) -> int:
    """Return the bytes of a trainer's GPU besides its models: contexts and communicators."""
    return COMMUNICATOR_BYTES + (1 + neighbours) * CONTEXT_BYTES


def checkpoint_copies(models: RankModels) -> dict[str, int]:
    """Return the bytes on a rank's host while a checkpoint is written, and while one is loaded.

    An asynchronous save copies weights and optimizer state; a load asks megatron-core for the
    rank's buffers without their sharding, as master weights and both moments in fp32
    (distrib_optimizer.py, `fully_reshardable`).
    """
    saved = sum(
        model.parameters + model.optimizer + model.host_optimizer for model in models.trained
    )
    loaded = sum(3 * model.gradients for model in models.trained)
    return {"checkpoint being saved": saved, "checkpoint being loaded": loaded}


def _generate(engines: EngineOnGpus, trainer: int, host: dict[str, int]) -> PhaseMemory:
    share = engines.share
    available = None if engines.gpu_bytes is None else engines.gpu_bytes - trainer
    gpu = {
        "engine weights": share.weights,
        "KV cache": share.cache(available),
        "engine workspace": share.workspace,
        "engine process": share.process,
        "trainer process": trainer,
    }
    where: Where = "GPU" if engines.shared else "engine's GPU"
    return PhaseMemory("generate", where, _present(gpu), host, RESERVE_BYTES)


def _passes(
    models: RankModels, moves: bool, samples: bool
) -> Iterator[tuple[Phase, dict[str, int]]]:
    """Yield the trainer's own phases, with what it holds of its models.

    Models that move hold no gradients between updates, and optimizer state only where another
    update of the step follows: that of the model updated last. In an update only the model that is
    updated is on the GPU.
    """
    trained = models.trained
    if not models.trains:
        yield "load", _held(trained, updates=False)
        return
    if samples:
        at_rest = _held(trained, updates=not moves)
        if moves and models.updates > 1:
            at_rest["optimizer state"] = max(model.optimizer for model in trained)
        frozen = {"frozen model": models.frozen}
        yield "log-probabilities", {**at_rest, **frozen, **_activations(models, models.forward)}
    # On shared GPUs the critic's update comes at another time, and has no logits.
    updated = _held(trained[:1] if moves else trained, updates=True)
    # References have done their passes before; a merge's loss still multiplies with their heads.
    updated["frozen model"] = models.heads
    yield "update", {**updated, **_activations(models, models.policy.activations)}
    yield "optimizer step", updated


def _held(trained: list[RankMemory], updates: bool) -> dict[str, int]:
    components = {"trainer weights": sum(model.parameters for model in trained)}
    if updates:
        components["gradients"] = sum(model.gradients for model in trained)
        components["optimizer state"] = sum(model.optimizer for model in trained)
    return components


def _activations(models: RankModels, activations: int) -> dict[str, int]:
    dispatched = round(IMBALANCE * ROUTED_COPIES * models.routed)
    slack = round(FRAGMENTATION * (activations + dispatched))
    return {"activations": activations, "dispatch and fragments": dispatched + slack}


def _host(models: RankModels, moves: bool) -> dict[str, int]:
    """Return a rank's bytes on the host; pinned copies are kept while their original is away."""
    components = {"frozen models": models.frozen * models.frozen_models}
    state = sum(model.host_optimizer for model in models.trained)
    if moves:
        components["trainer weights"] = sum(model.parameters for model in models.trained)
        state += sum(model.optimizer for model in models.trained)
    components["optimizer state"] = state
    return _present(components)


def _present(components: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in components.items() if count}


def neighbours(layout: LayoutSettings, engine: EngineSettings, per_node: int) -> int:
    """Return the most engine ranks that map the memory of a trainer's GPU and are not on it.

    Engines map what is on their node, unless `engine.transport` sends all weights as messages. An
    engine that fills no node of `per_node` GPUs maps nothing: it is refused elsewhere.
    """
    if engine.transport == "messages" or not fits_nodes(engine, per_node):
        return 0
    slots = [
        node * per_node + slot
        for placed in engine_slots(layout, engine, per_node)
        for node in placed.nodes
        for slot in placed.slots
    ]
    taken, on_node = {*slots}, Counter(slot // per_node for slot in slots)
    return max(
        on_node[start // per_node]
        - all(slot in taken for slot in range(start, min(start + per_node, layout.ranks)))
        for start in range(0, layout.ranks, per_node)
    )


def engine_gpu_bytes(
    layout: LayoutSettings, engine: EngineSettings, total: Sequence[int]
) -> int | None:
    """Return what an engine may use of each of a node's GPUs of these sizes; None is all of it.

    GPUs of the node that neither a rank nor an engine is on do not count.
    """
    if not total or engine.placement == "own":
        return None
    used = total[: gpus_needed(layout, engine)]
    return min(used) - _process_bytes(neighbours(layout, engine, len(total)))
