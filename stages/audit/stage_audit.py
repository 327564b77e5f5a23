"""The audit of one step of a stage: its initial state, the step by its kind, its results."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.files import STATE
from stages.audit import recorded
from stages.audit.model import Model, Weights, from_megatron, parent_model
from stages.audit.policy_step import PolicyStep
from stages.audit.recorded import NotAuditable, RecordedRun, document
from stages.audit.rows import Comparison, buffers, change, number
from stages.audit.token_steps import cold_start_step, merge_step
from stages.audit.update import Optimizer

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


def kind_of(stage: str) -> str:
    """Return the kind of a stage, by its name without the round."""
    name = _parts(stage)[1]
    kinds = {COLD_START: "sft", "mixed": "mixed", "merge": "distill"}
    return kinds.get(name, "grpo" if name.startswith("experts.") else name.split(".")[0])


def _parts(stage: str) -> tuple[str, str]:
    """Return a stage's prefix of its round, as `round_2.` or empty, and the rest of its name."""
    prefix = match[0] if (match := re.match(r"round_\d+\.", stage)) else ""
    return prefix, stage.removeprefix(prefix)


def newest_step(run: RecordedRun, stage: str) -> int:
    """Return the newest step with recorded samples and kept weights before it.

    Raises:
        NotAuditable: no step has both.
    """
    grown = kind_of(stage) != "sft"
    paths = _recordings(run, stage).glob("step_*.jsonl")
    for step in sorted((int(path.stem.removeprefix("step_")) for path in paths), reverse=True):
        if run.checkpoint(stage, step - 1) or (step == 1 and grown):
            return step
    raise NotAuditable(
        "no step has both its samples and a checkpoint of the step before; set "
        "logging.auditable=true and loop.checkpoint_every=1, or name a --step"
    )


def _recordings(run: RecordedRun, stage: str) -> Path:
    return run.stage(stage) / ("samples" if kind_of(stage) == "sft" else "rollouts")


def audit_step(run: RecordedRun, stage: str, step: int) -> Audited:
    """Recompute a step and compare it.

    Raises:
        NotAuditable: files or settings do not allow it.
    """
    settings, shape = _settings(run, stage), run.settings["model"]
    resumed = run.checkpoint(stage, step - 1)
    if resumed is None and step > 1:
        raise NotAuditable(
            f"{stage} has no checkpoint of step {step - 1}, which step {step} starts from; set "
            "loop.checkpoint_every=1 and loop.keep_last"
        )
    held = recorded.tensors(resumed or run.parent(stage, _parent(run, stage)))
    policy = Model(shape, from_megatron(held, shape))
    per_step = settings.get("updates_per_rollout", 1)
    optimizer = Optimizer(
        settings["optimizer"],
        _buffers(held, shape) if resumed else {},
        (step - 1) * per_step,
        settings["loop"]["steps"] * per_step,
    )
    samples = recorded.samples(_recordings(run, stage) / f"step_{step:06d}.jsonl")
    logged = recorded.metrics(run.stage(stage), step)
    rows = [number("learning_rate", logged["learning_rate"], optimizer.learning_rate(), scale=0.0)]
    before, reference = policy.weights(), None
    if (kind := kind_of(stage)) == "sft":
        rows += cold_start_step(settings, samples, policy, optimizer, logged)
    elif kind == "distill":
        teachers = {
            domain: parent_model(run, stage, f"{_parts(stage)[0]}experts.{domain}")
            for domain in run.settings["domains"]
        }
        rows += merge_step(settings, samples, policy, teachers, optimizer, step, logged)
    else:
        state = document(resumed / STATE) if resumed else {}
        reference = _reference(run, stage, settings["objective"]["kl"], held)
        weights = _reward_weights(run, stage)
        policy_step = PolicyStep(settings, weights, step, state, policy, reference, optimizer)
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
    if reference is not None and settings["objective"]["kl"]["reference"] == "ema":
        rows.append(buffers("ema", from_megatron(held, shape, "ema."), reference.weights()))
    return Audited(stage, step, rows, [])


def _settings(run: RecordedRun, stage: str) -> dict[str, Any]:
    """Return the stage's block of run.yaml."""
    if block := run.settings.get("stages", {}).get(stage):
        check_objectives(stage, block, run.settings["domains"])
    name = re.sub(r"^experts\.", "domains.", _parts(stage)[1])
    block = run.settings
    for part in [name] if name in block else name.split(".", 1):
        if not isinstance(block, dict) or block.get(part) is None:
            raise NotAuditable(f"{run.path}/run.yaml has no stage {stage}")
        block = block[part]
    return block


def check_objectives(stage: str, block: dict[str, Any], domains: dict[str, Any]) -> None:
    """Check that a stage's domains share an objective, by its block and the run's domains.

    Raises:
        NotAuditable: they differ; a step's formulas are recomputed for one objective.
    """
    if block["kind"] != "grpo" or block["for_each"] or block["objective"]:
        return
    own = block["domains"] or list(domains)
    unlike = [name for name in own if domains[name]["objective"] != domains[own[0]]["objective"]]
    if unlike:
        raise NotAuditable(
            f"{stage}: the objectives of {own[0]} and {', '.join(unlike)} differ, and a step is "
            f"audited under one; audit a run whose domains share it, as stages.{stage}.objective"
        )


def _parent(run: RecordedRun, stage: str) -> str:
    """Return the stage that one starts from, by run.yaml."""
    prefix, _ = _parts(stage)
    named = _settings(run, stage)["from"] if kind_of(stage) == "grpo" else None
    if named is not None:
        return f"{prefix}{named}" if named.startswith("experts.") else str(named)
    before = int(prefix[len("round_") : -1]) - 1 if prefix else 0
    if before:
        return "merge" if before == 1 else f"round_{before}.merge"
    return INITIAL if run.settings["cold_start"] is None else COLD_START


def _buffers(held: Weights, shape: dict[str, Any]) -> dict[str, Weights]:
    """Return the optimizer's buffers in a checkpoint, under transformers' names."""
    found = {kind: from_megatron(held, shape, f"optimizer.state.{kind}.") for kind in BUFFERS}
    return {kind: own for kind, own in found.items() if own}


def _reference(run: RecordedRun, stage: str, kl: dict[str, Any], held: Weights) -> Model | None:
    """Return the reference model of the KL penalty; `held` is what the step starts from."""
    if not kl["coefficient"]:
        return None
    if kl["reference"] != "ema":
        of = COLD_START if kl["reference"] == "cold_start" else _parent(run, stage)
        return parent_model(run, stage, of)
    shape = run.settings["model"]
    return Model(shape, from_megatron(held, shape, "ema.") or from_megatron(held, shape))


def _reward_weights(run: RecordedRun, stage: str) -> dict[str, dict[str, float]]:
    """Return the weights of a reward's parts, of every domain that the stage trains on."""
    domains = run.settings["domains"]
    own = domains if kind_of(stage) == "mixed" else [stage.rpartition("experts.")[2]]
    return {
        domain: {name: reward["weight"] for name, reward in domains[domain]["rewards"].items()}
        for domain in own
    }
