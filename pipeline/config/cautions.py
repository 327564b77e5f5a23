"""Warnings of a valid configuration: what it may not do as meant, as (dotted key, message)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil, sqrt
from statistics import NormalDist

from pipeline.config.tokenizers import template_cautions
from pipeline.config.unroll import Blocks, Unrolled, is_path, pairless, unread, unread_keys
from stages.guards.settings import LossGateSettings
from stages.kinds.distill.settings import domain_of
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.kind import KINDS
from stages.kinds.quantize.settings import QuantizeSettings
from stages.kinds.rules import under
from stages.settings import RunSettings
from stages.statistics import Z_95, Answers, paired_difference

MOST_PROBLEMS = 10_000  # that a warning advises
MOST_ANSWERS = 100_000
POWER = 0.8  # the share of tries in which a lossless model should pass
SPREAD = 1 / 6  # the mean of p (1 - p) over problems whose solve rates are spread evenly
NORMAL = NormalDist()

Cautions = Iterator[tuple[str, str]]


def graph_cautions(settings: RunSettings) -> Cautions:
    """Yield blocks and keys that nothing reads, and data and models that may not fit a stage."""
    yield from unread(settings)
    yield from unread_keys(settings)
    yield from pairless(settings)
    yield from template_cautions(settings)
    yield from ancestor_cautions(settings)


def ancestor_cautions(settings: RunSettings) -> Cautions:
    """Yield each teacher without a common ancestor with its student, as (dotted key, message).

    The ancestors of a model outside the run are not known.
    """
    blocks = Blocks(settings)
    parents = {stage.name: list(_parents(stage, blocks)) for stage in blocks.stages}
    # By key and teacher: the stages of a block with for_each say it once.
    cautions = {}
    for stage in blocks.stages:
        if blocks.inputs(stage).parent is None or not parents[stage.name]:
            continue
        student = parents[stage.name][0]
        for label, reference in blocks.inputs(stage).teachers.items():
            teacher = blocks.resolve(reference, domain_of(label))
            if teacher is None or is_path(teacher):
                continue
            if _line(teacher, parents).isdisjoint(_line(student, parents)):
                key = f"{stage.key}.{stage.settings.key_of('teachers', label)}"
                cautions[key, teacher] = (
                    f"{teacher} and {student}, which {stage.name} starts from, have no common"
                    " ancestor; a student learns little from a teacher of another start"
                )
    yield from ((key, message) for (key, _), message in cautions.items())


def _parents(stage: Unrolled, blocks: Blocks) -> Iterator[str]:
    """Yield the models that a stage's weights come from, `from` first."""
    inputs = blocks.inputs(stage)
    references = [(inputs.parent, stage.domain)] if inputs.parent else []
    if KINDS[stage.settings.kind].merges:  # other kinds only compare with their models
        references += [(name, stage.domain) for name in inputs.models.values()]
        references += [(name, domain) for domain, name in inputs.references.items()]
    if inputs.parent is None and KINDS[stage.settings.kind].imports:
        yield "model.initial_weights"
    yield from filter(None, (blocks.resolve(name, domain) for name, domain in references))


def _line(name: str, parents: Mapping[str, Iterable[str]]) -> set[str]:
    """Return a model and all that it descends from."""
    ancestors: set[str] = set()
    left = [name]
    while left:
        if (model := left.pop()) not in ancestors:
            ancestors.add(model)
            left += parents.get(model, ())
    return ancestors


def micro_batch_cautions(run: RunSettings) -> Cautions:
    """Yield each `micro_batch_tokens` whose rows are shorter than the longest sample."""
    longest, context, keys = run.engine.max_model_tokens, run.layout.context, set[str]()
    for stage in Blocks(run).stages:
        block, kind = stage.settings, KINDS[stage.settings.kind]
        if not (kind.samples and kind.trains):
            continue
        trained = block.trained_by(run, stage.domains)
        at = (
            block.keys(stage.key, stage.domains)
            if isinstance(block, GrpoSettings)
            else under(stage.key)
        )
        key = at("loop.micro_batch_tokens")
        if trained is None or key in keys or trained[1].micro_batch_tokens * context >= longest:
            continue
        keys.add(key)
        whole = f" on each of layout.context = {context} ranks" if context > 1 else ""
        yield (
            key,
            f"{trained[1].micro_batch_tokens} tokens{whole} are less than a sample of"
            f" engine.max_model_tokens = {longest}, which is computed whole: memory is planned for"
            f" it, and short samples fill less; use at least {-(-longest // context)}",
        )


def loss_gate_cautions(run: RunSettings) -> Cautions:
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
