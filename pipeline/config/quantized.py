"""Rules of stages of kind `quantize`: what may load their models, and what their gates can show."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import ceil, sqrt
from statistics import NormalDist

from pipeline.config.unroll import Blocks
from stages.guards.settings import LossGateSettings
from stages.kinds.export.settings import ExportSettings
from stages.kinds.quantize.settings import QuantizeSettings
from stages.settings import RunSettings
from stages.statistics import Z_95, Answers, paired_difference

MOST_PROBLEMS = 10_000  # that a warning advises
MOST_ANSWERS = 100_000
POWER = 0.8  # the share of tries in which a lossless model should pass
SPREAD = 1 / 6  # the mean of p (1 - p) over problems whose solve rates are spread evenly
NORMAL = NormalDist()


def requantized(run: RunSettings, starting: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """Yield each stage that would export or quantize a quantized model, as (dotted key, message).

    Its checkpoint has the weights that the quantized ones stand for, in the model's precision: an
    export would write those.
    """
    blocks = Blocks(run)
    for stage in blocks.among(starting):
        parent = blocks.inputs(stage).parent
        parent_stage = (
            blocks.by_name.get(blocks.resolve(parent, stage.domain) or "") if parent else None
        )
        if parent_stage is None or not isinstance(parent_stage.settings, QuantizeSettings):
            continue
        if isinstance(stage.settings, ExportSettings):
            yield (
                f"{stage.key}.from",
                f"{parent_stage.name} is quantized, and its stage already leaves the export:"
                f" stages/{parent_stage.name}/huggingface; remove this stage, or export"
                f" {parent_stage.settings.from_}",
            )
        elif isinstance(stage.settings, QuantizeSettings):
            yield (
                f"{stage.key}.from",
                f"{parent_stage.name} is quantized already; name the model before that,"
                f" {parent_stage.settings.from_}",
            )


def loss_gate_cautions(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield each `max_loss` that a lossless model may well exceed, as (dotted key, message)."""
    for name, block in run.stages.items():
        gate = block.gate if isinstance(block, QuantizeSettings) else None
        if gate is not None and gate.on_failure == "stop":
            why = (_greedy_cautions if run.evaluation.temperature == 0 else _sampled_cautions)(gate)
            yield from ((f"stages.{name}.gate.max_loss", message) for message in why)


def _sampled_cautions(gate: LossGateSettings) -> Iterator[str]:
    """Yield why a lossless model may fail where both models sample their answers.

    With solve rates spread evenly over the problems, of which each model draws `answers` answers,
    the difference of equal models has the standard deviation sqrt(2 E[p (1 - p)] / answers).
    """
    answers = gate.problems * gate.samples_per_problem
    deviation = sqrt(2 * SPREAD / answers)
    passing = NORMAL.cdf(gate.max_loss / deviation - Z_95)
    if passing >= POWER:
        return
    in_all = (Z_95 + NORMAL.inv_cdf(POWER)) * sqrt(2 * SPREAD)
    message = (
        f"with {answers} sampled answers to {gate.problems} problems a model that loses nothing"
        f" passes {gate.max_loss:g} in {100 * passing:.0f} % of tries"
    )
    enough = f"a max_loss of {in_all / sqrt(answers):.3f}"
    if gate.max_loss and (needed := ceil((in_all / gate.max_loss) ** 2)) <= MOST_ANSWERS:
        enough = f"samples_per_problem: {ceil(needed / gate.problems)}, or {enough}"
    yield f"{message}; for {100 * POWER:.0f} % use {enough}, or on_failure: warn"


def _greedy_cautions(gate: LossGateSettings) -> Iterator[str]:
    """Yield why equal greedy answers would not pass."""
    if (bound := _bound_of_equals(gate.problems)) <= gate.max_loss:
        return
    enough = _enough(gate.max_loss)
    least = f"no number of problems below {MOST_PROBLEMS} is enough"
    yield (
        f"with {gate.problems} problems the upper 95 % bound of the loss is"
        f" {100 * bound:+.1f} points where two models solve the same half of them, above"
        f" {100 * gate.max_loss:+.1f}; "
        + (f"it takes at least {enough} problems" if enough else least)
    )


def _bound_of_equals(problems: int) -> float:
    """Return the upper 95 % bound of the loss between models that solve the same half."""
    half = problems // 2
    equal = Answers([1] * half + [0] * (problems - half))
    return paired_difference(equal, equal).high


def _enough(max_loss: float) -> int | None:
    """Return the least even number of problems whose bound is at most `max_loss`, if any is."""
    low, high = 0, MOST_PROBLEMS // 2
    if _bound_of_equals(2 * high) > max_loss:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _bound_of_equals(2 * middle) > max_loss else (low, middle)
    return 2 * high
