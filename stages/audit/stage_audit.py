"""The audit of one step of a stage: its initial state, the step by its kind, its results."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.files import STATE
from stages.audit import recorded
from stages.audit.model import Model, Weights, from_megatron
from stages.audit.optimizer import Optimizer, learning_rate
from stages.audit.policy_step import PlainReference, PolicyStep, check_no_critic
from stages.audit.recorded import NotAuditable, RecordedRun, document, tensors
from stages.audit.rows import Comparison, buffers, change, number
from stages.audit.token_steps import cold_start_step, merge_step

BUFFERS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Adam divides by the root of a mean of squares: for a weight with tiny gradients,
# rounding decides its direction.
OF_ADAM, OF_SGD = 1e-3, 1e-5
COLD_START, INITIAL = "cold_start", "initial"


@dataclass(frozen=True)
class Audited:
    """The rows of one step, or of an evaluation, and notes on what could not be compared."""

    stage: str
    step: int | None
    rows: list[Comparison]
    notes: list[str]


@dataclass
class StepStart:
    """The state that a step starts from."""

    policy: Model
    optimizer: Optimizer
    state: dict[str, Any]
    checkpoint: Path


def kind_of(stage: str) -> str:
    """Return the kind of a stage, by its name without the round."""
    name = re.sub(r"^round_\d+\.", "", stage)
    if name == COLD_START:
        return "sft"
    return {"mixed": "mixed", "merge": "distill"}.get(
        name, "grpo" if name.startswith("experts.") else name.split(".")[0]
    )


def auditable_steps(run: RecordedRun, stage: str) -> list[int]:
    """Return the steps, ascending, with recorded samples and kept weights before them."""
    recordings = run.stage(stage) / ("samples" if kind_of(stage) == "sft" else "rollouts")
    steps = sorted(int(path.stem.removeprefix("step_")) for path in recordings.glob("step_*.jsonl"))
    grown = kind_of(stage) != "sft"
    return [s for s in steps if run.checkpoint(stage, s - 1) or (s == 1 and grown)]


def audit_step(run: RecordedRun, stage: str, step: int) -> Audited:
    """Recompute a step and compare it.

    Raises:
        NotAuditable: files or settings do not allow it.
    """
    kind = kind_of(stage)
    settings = _settings(run, stage)
    start = _start(run, stage, step, settings)
    recordings = run.stage(stage) / ("samples" if kind == "sft" else "rollouts")
    samples = recorded.samples(recordings / f"step_{step:06d}.jsonl")
    logged = recorded.metrics(run.stage(stage), step)
    rate = learning_rate(start.optimizer.settings, start.optimizer.updates, start.optimizer.total)
    before = start.policy.weights()
    rows = [number("learning_rate", logged["learning_rate"], rate, scale=0.0)]
    reference = None
    if kind == "sft":
        rows += cold_start_step(settings, samples, start.policy, start.optimizer, logged)
    elif kind == "distill":
        teachers = _teachers(run, stage)
        domains = list(run.settings["domains"])
        rows += merge_step(
            settings, domains, samples, start.policy, teachers, start.optimizer, step, logged
        )
    else:
        check_no_critic(settings)
        reference = _reference(run, stage, settings, start)
        policy_step = PolicyStep(
            settings,
            _reward_weights(run, stage),
            run.settings["model"]["precision"],
            step,
            start.state,
        )
        rows += policy_step.run(samples, start.policy, reference, start.optimizer, logged)
    after = run.checkpoint(stage, step)
    if after is None:
        return Audited(
            stage, step, rows, [f"no checkpoint of step {step}: its weights are not compared"]
        )
    return Audited(stage, step, rows + _left(run, start, before, after, reference), [])


def _settings(run: RecordedRun, stage: str) -> dict[str, Any]:
    """Return the stage's block of run.yaml."""
    name = re.sub(r"^experts\.", "domains.", re.sub(r"^round_\d+\.", "", stage))
    block = run.settings
    for part in [name] if name in block else name.split(".", 1):
        if not isinstance(block, dict) or block.get(part) is None:
            raise NotAuditable(f"{run.path}/run.yaml has no stage {stage}")
        block = block[part]
    return block


def _start(run: RecordedRun, stage: str, step: int, settings: dict[str, Any]) -> StepStart:
    model = run.settings["model"]
    checkpoint = run.checkpoint(stage, step - 1)
    resumed = checkpoint is not None
    if checkpoint is None:
        if step > 1:
            raise NotAuditable(
                f"{stage} has no checkpoint of step {step - 1}, which step {step} starts from; set "
                "loop.checkpoint_every=1 and loop.keep_last"
            )
        checkpoint = run.parent(stage, _parent(run, stage))
    held = tensors(checkpoint)
    per_step = settings.get("updates_per_rollout", 1)
    optimizer = Optimizer(
        settings["optimizer"],
        _buffers(held, model) if resumed else {},
        (step - 1) * per_step,
        settings["loop"]["steps"] * per_step,
    )
    state = document(checkpoint / STATE) if resumed else {}
    return StepStart(Model(model, from_megatron(held, model)), optimizer, state, checkpoint)


def _parent(run: RecordedRun, stage: str) -> str:
    """Return the stage that one starts from, by run.yaml."""
    origin = COLD_START if run.settings["cold_start"] is not None else INITIAL
    prefix = match[0] if (match := re.match(r"round_(\d+)\.", stage)) else ""
    if match and int(match[1]) > 1:
        before = int(match[1]) - 1
        origin = "merge" if before == 1 else f"round_{before}.merge"
    if kind_of(stage) != "grpo":
        return origin
    named = _settings(run, stage)["from"]
    if named is None:
        return origin
    return f"{prefix}{named}" if named.startswith("experts.") else str(named)


def _buffers(held: Weights, model: dict[str, Any]) -> dict[str, Weights]:
    """Return the optimizer's buffers in a checkpoint, under transformers' names."""
    found = {}
    for kind in BUFFERS:
        prefix = f"optimizer.state.{kind}."
        own = {n.removeprefix(prefix): t for n, t in held.items() if n.startswith(prefix)}
        if own:
            found[kind] = from_megatron(own, model)
    return found


def _teachers(run: RecordedRun, stage: str) -> dict[str, Model]:
    prefix = match[0] if (match := re.match(r"round_\d+\.", stage)) else ""
    return {
        domain: _model(run, run.parent(stage, f"{prefix}experts.{domain}"))
        for domain in run.settings["domains"]
    }


def _reference(
    run: RecordedRun, stage: str, settings: dict[str, Any], start: StepStart
) -> PlainReference | None:
    kl = settings["objective"]["kl"]
    if not kl["coefficient"]:
        return None
    parent = _parent(run, stage)
    if kl["reference"] == "cold_start":
        return PlainReference(_model(run, run.parent(stage, COLD_START)))
    if kl["reference"] == "parent":
        return PlainReference(_model(run, run.parent(stage, parent)))
    held = tensors(start.checkpoint, "ema.") or tensors(start.checkpoint)
    model = run.settings["model"]
    return PlainReference(Model(model, from_megatron(held, model)), kl["ema_decay"])


def _model(run: RecordedRun, checkpoint: Path) -> Model:
    model = run.settings["model"]
    return Model(model, from_megatron(tensors(checkpoint), model))


def _reward_weights(run: RecordedRun, stage: str) -> dict[str, dict[str, float]]:
    """Return the weights of a reward's parts, of every domain that the stage trains on."""
    domains = run.settings["domains"]
    own = domains if kind_of(stage) == "mixed" else [stage.rpartition("experts.")[2]]
    return {
        domain: {name: reward["weight"] for name, reward in domains[domain]["rewards"].items()}
        for domain in own
    }


def _left(
    run: RecordedRun,
    start: StepStart,
    before: Weights,
    after: Path,
    reference: PlainReference | None,
) -> list[Comparison]:
    """Compare the results of a step: weights, the optimizer's buffers, the reference's average."""
    model = run.settings["model"]
    held = tensors(after)
    weights = from_megatron(held, model)
    bound = OF_ADAM if start.optimizer.settings["algorithm"] == "adam" else OF_SGD
    rows = [change("weights", before, weights, start.policy.weights(), bound)]
    rows += [
        buffers(kind, saved, start.optimizer.buffers[kind])
        for kind, saved in _buffers(held, model).items()
    ]
    if reference is not None and reference.decay is not None:
        average = from_megatron(tensors(after, "ema."), model)
        rows.append(buffers("ema", average, reference.model.weights()))
    return rows
