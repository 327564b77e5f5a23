"""The audit of one step of a stage: its initial state, the step by its kind, its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.files import STATE
from stages.audit import recorded
from stages.audit.blocks import RecordedStage, recorded_stage
from stages.audit.model import Model, Weights, from_megatron, parent_model
from stages.audit.objective import Objective
from stages.audit.policy_step import PolicyStep
from stages.audit.preference_step import preference_step, reference_rows
from stages.audit.recorded import NotAuditable, RecordedRun, document
from stages.audit.rows import Comparison, buffers, change, number
from stages.audit.token_steps import cold_start_step, merge_step
from stages.audit.update import Optimizer

BUFFERS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Adam divides by the root of a mean of squares: for a weight with tiny gradients,
# rounding decides its direction.
OF_ADAM, OF_SGD = 1e-3, 1e-5


@dataclass(frozen=True)
class Audited:
    """The rows of one step, or of an evaluation, and notes on what could not be compared."""

    stage: str
    step: int | None
    rows: list[Comparison]
    notes: list[str]


def newest_step(run: RecordedRun, stage: str) -> int:
    """Return the newest step with recorded samples and kept weights before it.

    Raises:
        NotAuditable: no step has both.
    """
    described = recorded_stage(run, stage)
    grown = described.parent is not None
    paths = _recordings(run, described).glob("step_*.parquet")
    # The first step of a stage starts from its parent's checkpoint, later ones from their own.
    for step in sorted((int(path.stem.removeprefix("step_")) for path in paths), reverse=True):
        if run.checkpoint(stage, step - 1) or (step == 1 and grown):
            return step
    raise NotAuditable(
        "no step has both its samples and a checkpoint of the step before; set "
        "logging.auditable=true and loop.checkpoint_every=1, or name a --step"
    )


def _recordings(run: RecordedRun, of: RecordedStage) -> Path:
    return run.stage(of.name) / ("samples" if of.kind in ("sft", "dpo") else "rollouts")


def audit_step(run: RecordedRun, stage: str, step: int) -> Audited:
    """Recompute a step and compare it.

    Raises:
        NotAuditable: files or settings do not allow it.
    """
    described, shape = recorded_stage(run, stage), run.settings["model"]
    settings = described.settings
    resumed = run.checkpoint(stage, step - 1)
    if resumed is None and step > 1:
        raise NotAuditable(
            f"{stage} has no checkpoint of step {step - 1}, which step {step} starts from; set "
            "loop.checkpoint_every=1 and loop.keep_last"
        )
    held = recorded.tensors(resumed or _parent(run, described))
    policy = Model(shape, from_megatron(held, shape))
    per_step = settings.get("updates_per_rollout", 1)
    optimizer = Optimizer(
        settings["optimizer"],
        _buffers(held, shape) if resumed else {},
        (step - 1) * per_step,
        settings["loop"]["steps"] * per_step,
    )
    samples = recorded.samples(_recordings(run, described) / f"step_{step:06d}.parquet")
    logged = recorded.metrics(run.stage(stage), step)
    rows = [number("learning_rate", logged["learning_rate"], optimizer.learning_rate(), scale=0.0)]
    before = policy.weights()
    objectives: list[Objective] = []
    if described.kind == "sft":
        rows += cold_start_step(settings, samples, policy, optimizer, logged)
    elif described.kind == "distill":
        by_domain = (described.teachers or {}).items()
        teachers = {domain: parent_model(run, stage, teacher) for domain, teacher in by_domain}
        rows += merge_step(settings, samples, policy, teachers, optimizer, step, logged)
    elif described.kind == "dpo":
        reference = parent_model(run, stage, described.reference or "")
        rows += preference_step(settings, samples, policy, reference, optimizer, logged)
        rows += reference_rows(run.stage(stage), samples, reference)
    elif described.kind != "grpo":
        raise NotAuditable(f"stages of kind {described.kind} are not audited")
    else:
        state = document(resumed / STATE) if resumed else {}
        objectives = _objectives(run, described, state, held)
        weights = _reward_weights(run, described.domains)
        policy_step = PolicyStep(settings, objectives, weights, step, policy, optimizer)
        rows += policy_step.run(samples, logged)
    after = run.checkpoint(stage, step)
    if after is None:
        note = f"no checkpoint of step {step}: its weights are not compared"
        return Audited(stage, step, rows, [note])
    held = recorded.tensors(after)
    bound = OF_ADAM if settings["optimizer"]["algorithm"] == "adam" else OF_SGD
    rows.append(change("weights", before, from_megatron(held, shape), policy.weights(), bound))
    for name, saved in _buffers(held, shape).items():
        rows.append(buffers(name, saved, optimizer.buffers[name]))
    for name, average in _averages(objectives).items():
        rows.append(buffers(name, from_megatron(held, shape, f"{name}."), average.weights()))
    return Audited(stage, step, rows, [])


def _parent(run: RecordedRun, of: RecordedStage) -> Path:
    """Return the checkpoint that a stage starts from."""
    if of.parent is None:
        raise NotAuditable(f"{of.name} starts from the model settings, whose weights are not kept")
    return run.parent(of.name, of.parent)


def _buffers(held: Weights, shape: dict[str, Any]) -> dict[str, Weights]:
    """Return the optimizer's buffers in a checkpoint, under transformers' names."""
    by_kind = {kind: from_megatron(held, shape, f"optimizer.state.{kind}.") for kind in BUFFERS}
    return {kind: weights for kind, weights in by_kind.items() if weights}


def _objectives(
    run: RecordedRun, of: RecordedStage, state: dict[str, Any], held: Weights
) -> list[Objective]:
    """Return the stage's objectives with their references; `held` is what the step starts from.

    Objectives share the reference that they name, and an average with those of its decay.
    """
    shape, models = run.settings["model"], dict[object, Model]()
    penalties = {objective.name: objective.settings["kl"] for objective in of.objectives}
    names = _average_names(penalties.values())
    objectives = []
    for objective in of.objectives:
        kl, reference = penalties[objective.name], None
        if kl["coefficient"]:
            average = names[kl["ema_decay"]] if kl["reference"] == "ema" else None
            key = average or objective.reference or ""
            if key not in models and average is None:
                models[key] = parent_model(run, of.name, key)
            elif key not in models:
                weights = from_megatron(held, shape, f"{average}.") or from_megatron(held, shape)
                models[key] = Model(shape, weights)
            reference = models[key]
        objectives.append(Objective(objective, state, reference))
    return objectives


def _average_names(penalties: Iterable[dict[str, Any]]) -> dict[float, str]:
    """Return the name in a checkpoint of the average of each decay."""
    used = [kl for kl in penalties if kl["coefficient"] and kl["reference"] == "ema"]
    decays = {kl["ema_decay"] for kl in used}
    dotless = {decay: str(decay).replace(".", "_") for decay in decays}
    return {decay: f"ema_{dotless[decay]}" if len(decays) > 1 else "ema" for decay in decays}


def _averages(objectives: Sequence[Objective]) -> dict[str, Model]:
    """Return the averages of the policy that are references, by their names in a checkpoint."""
    penalties = [objective.settings["kl"] for objective in objectives]
    names = _average_names(penalties)
    return {
        names[kl["ema_decay"]]: objective.reference
        for objective, kl in zip(objectives, penalties, strict=True)
        if objective.reference is not None and kl["reference"] == "ema"
    }


def _reward_weights(run: RecordedRun, stage_domains: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the weights of a reward's parts, of every domain that the stage trains on."""
    domains = run.settings["domains"]
    return {
        domain: {name: reward["weight"] for name, reward in domains[domain]["rewards"].items()}
        for domain in stage_domains
    }
