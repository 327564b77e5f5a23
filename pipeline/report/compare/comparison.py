"""The comparison of a run's models: gains, recovered headroom, forgetting, the cost of each stage.

Numbers only, without torch: for `braid compare` and whatever else shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal

from parallel.errors import UserError, hint
from pipeline.report.compare.stage_costs import StageCost, stage_costs
from pipeline.report.view.learning import HeldOutGain
from pipeline.run.answers import MeasuredModel, common_keys, measured_models, stale_evaluations
from pipeline.run.gates import points
from pipeline.run.graph import Stage
from pipeline.run.run import Run, StageState
from pipeline.text import shown
from stages.kinds.distill.settings import DistillSettings
from stages.metric_ranges import FORGOTTEN
from stages.statistics import (
    Accuracy,
    Answers,
    Difference,
    Headroom,
    mean_headroom,
    paired_difference,
    recovered_headroom,
)

Role = Literal["start", "expert", "merge", "baseline"]
Models = Mapping[str, MeasuredModel]


@dataclass(frozen=True)
class DomainScore:
    """A model on a domain: its accuracy, its change against the start, its recovered headroom.

    The start has neither of the last two. Without a significant gain of the domain's expert there
    is no headroom.
    """

    accuracy: Accuracy
    change: Difference | None
    headroom: Headroom | None


@dataclass(frozen=True)
class ComparedModel:
    """A model of a comparison, with its score on every domain that it was measured on.

    `expert_of` are the domains whose expert it is. `trained_on` are the domains of its stage and of
    the stages between the start and it; None where that is not known.
    """

    role: Role
    expert_of: tuple[str, ...]
    trained_on: tuple[str, ...] | None
    scores: Mapping[str, DomainScore]

    @property
    def headrooms(self) -> dict[str, Headroom]:
        """The recovered headroom by domain, where it is defined."""
        return {name: score.headroom for name, score in self.scores.items() if score.headroom}

    @property
    def mean_headroom(self) -> Headroom | None:
        """The mean over the domains where it is defined; None where it is on none."""
        headrooms = self.headrooms
        return mean_headroom(list(headrooms.values())) if headrooms else None

    @property
    def forgetting(self) -> dict[str, Difference]:
        """The change against the start on every domain that it was not trained on."""
        return {
            domain: score.change
            for domain, score in self.scores.items()
            if score.change and self.trained_on is not None and domain not in self.trained_on
        }


@dataclass(frozen=True)
class ModelComparison:
    """The models of a run, compared with their common `start` on the same held-out problems.

    `problems` counts each domain's common problems. `experts` are the models by domain whose gain
    is the headroom, and `undefined` says of the other domains why they have none.
    """

    run: str
    start: str
    problems: Mapping[str, int]
    experts: Mapping[str, str]
    models: Mapping[str, ComparedModel]
    undefined: Mapping[str, str]
    costs: Sequence[StageCost]
    notes: Sequence[str]


def compare(
    run: Run, models: Models, names: Sequence[str] = (), start: str | None = None
) -> ModelComparison:
    """Compare measured models, of this run and of others, with their start.

    All `models`, or those of `names`, in the order of `models`; `start` is by default what the
    first merge starts from.

    Raises:
        UserError: the start was not measured, or two models cannot be compared.
    """
    run_models = {name: model for name, model in models.items() if model.run is run}
    merges = [model.stage for model in run_models.values() if model.stage and model.stage.teachers]
    start = start or _start(run, run_models, merges)
    experts = _experts(run, run_models, merges, start)
    merged = [name for name, model in run_models.items() if model.stage in merges]
    rows = [name for name in models if not names or name == start or name in names]
    # The experts define the headroom, also where a row of theirs was not asked for.
    used = {name: models[name] for name in dict.fromkeys([*rows, *experts.values()])}
    answers = _common_answers(used, list(used[start].domains))
    compared = {}
    for name in rows:
        scores = {
            domain: _score(
                by_model[name],
                by_model[start],
                by_model.get(experts.get(domain, "")),
                name == start,
            )
            for domain, by_model in answers.items()
            if name in by_model
        }
        expert_of = tuple(domain for domain in answers if experts.get(domain) == name)
        role: Role = "expert" if expert_of else "merge" if name in merged else "baseline"
        trained_on = None if name == start else _trained_on(used[name], used[start])
        role = "start" if name == start else role
        compared[name] = ComparedModel(role, expert_of, trained_on, scores)
    return ModelComparison(
        shown(run.path),
        start,
        {domain: len(by_model[start].right) for domain, by_model in answers.items()},
        {domain: name for domain, name in experts.items() if domain in answers},
        compared,
        dict(_undefined(answers, experts, start)),
        stage_costs(run),
        list(_notes(run, used, answers, start)),
    )


def held_out_gains(run: Run, states: Mapping[str, StageState]) -> dict[str, HeldOutGain]:
    """Return the gain of every stage whose model was measured; none before an evaluation is done.

    None either where models cannot be compared: `braid compare` says why.
    """
    evaluations = (stage for stage in run.stages if stage.declared.evaluates)
    if all(states[stage.name].state != "done" for stage in evaluations):
        return {}
    try:
        comparison = compare(run, measured_models(run))
    except (UserError, OSError):
        return {}
    gains = {stage.name: _held_out_gain(stage, comparison) for stage in run.stages if stage.trains}
    return {name: gain for name, gain in gains.items() if gain is not None}


def comparison_json(comparison: ModelComparison) -> dict[str, Any]:
    """Return what `braid compare --json` prints."""
    models = {
        name: {
            **asdict(model),
            "mean_headroom": asdict(mean) if (mean := model.mean_headroom) else None,
            "forgetting": {domain: asdict(change) for domain, change in model.forgetting.items()},
        }
        for name, model in comparison.models.items()
    }
    return {
        "run": comparison.run,
        "start": comparison.start,
        "problems": dict(comparison.problems),
        "experts": dict(comparison.experts),
        "models": models,
        "undefined": dict(comparison.undefined),
        "stages": [asdict(cost) for cost in comparison.costs],
        "notes": list(comparison.notes),
    }


def _held_out_gain(stage: Stage, comparison: ModelComparison) -> HeldOutGain | None:
    """Return a stage's gain; None where its model was not measured, or is the start."""
    model = comparison.models.get(stage.name)
    if model is None or model.role == "start":
        return None
    changes = {domain: score.change for domain, score in model.scores.items() if score.change}
    trained = {domain: change for domain, change in changes.items() if domain in stage.domains}
    if not trained:
        return None
    lost = dict(_lost(model, stage))
    return HeldOutGain(
        tuple(f"{name} {points(change)}" for name, change in trained.items() if change.low > 0),
        tuple(f"{name} {points(change)}" for name, change in trained.items() if change.low <= 0),
        tuple(lost.values()),
        tuple(lost),
        comparison.start,
    )


def _lost(model: ComparedModel, stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield each domain on which a model lost accuracy for certain, and how much."""
    for domain, score in model.scores.items():
        if score.change and domain in stage.domains and score.change.high < 0:
            yield domain, f"{domain} {points(score.change)}"
    for domain, change in model.forgetting.items():
        if domain not in stage.domains and change.high < -FORGOTTEN:
            yield domain, f"{domain} {points(change)}, which it was not trained on"


def _start(run: Run, models: Models, merges: Sequence[Stage]) -> str:
    """Return the trained model that the first merge starts from; without a merge the first model.

    Raises:
        UserError: it was not measured.
    """
    if not merges:
        return next(iter(models))
    stages = {stage.name: stage for stage in run.stages}
    start = merges[0].name
    while start in stages and _is_merge(stages[start]):
        if (before := _merged_from(stages[start], stages)) is None:
            break
        start = before
    if start not in models:
        raise UserError(
            f"{shown(run.path)}: {start}, which {merges[0].name} starts from, was not measured;"
            f" choose another start: --start MODEL; {hint(start, models)}"
        )
    return start


def _is_merge(stage: Stage) -> bool:
    """Return whether a stage's model is made of several; its own teacher alone merges nothing."""
    return bool(stage.teachers) or stage.declared.merges


def _merged_from(stage: Stage, stages: Mapping[str, Stage]) -> str | None:
    """Return what a merge starts from; of weights alone, the nearest ancestor of all its models."""
    if stage.parent is not None:
        return stage.parent
    first, *others = (_ancestors(name, stages) for name in stage.models.values())
    return next((name for name in first if all(name in ancestors for ancestors in others)), None)


def _ancestors(name: str, stages: Mapping[str, Stage]) -> list[str]:
    """Return a model and all that its weights descend from, the nearest first."""
    ancestors = [name]
    for ancestor in ancestors:  # which grows
        if stage := stages.get(ancestor):
            merged = stage.models.values() if stage.declared.merges else ()
            before = [*([stage.parent] if stage.parent else []), *merged]
            ancestors += [model for model in dict.fromkeys(before) if model not in ancestors]
    return ancestors


def _experts(run: Run, models: Models, merges: Sequence[Stage], start: str) -> dict[str, str]:
    """Return each domain's expert: the merges' teacher, else the last model trained on it alone.

    Of several teachers it is the one with the largest weight, of several merges the first one's. A
    teacher that is itself a merge is no expert.
    """
    experts: dict[str, str] = {}
    for stage in merges:
        block = run.settings.stages[stage.block or ""]
        assert isinstance(block, DistillSettings)
        for domain in stage.domains:
            name = stage.teachers.get(block.main_teacher(domain), "")  # none where it is `self`
            teacher = models[name].stage if name in models else None
            if name in models and not (teacher and _is_merge(teacher)):
                experts.setdefault(domain, name)
    if merges:
        return experts
    trained = ((name, model.stage) for name, model in models.items() if name != start)
    return {
        stage.domain: name
        for name, stage in trained
        if stage and stage.trains and stage.steps and stage.domain
    }


def _common_answers(models: Models, domains: Sequence[str]) -> dict[str, dict[str, Answers]]:
    """Return by domain each model's answers to the problems that all of them have in common."""
    answers = {}
    for domain in domains:
        measured = {name: model for name, model in models.items() if domain in model.domains}
        keys = common_keys(domain, list(measured.values()))
        answers[domain] = {name: model.domains[domain].on(keys) for name, model in measured.items()}
    return answers


def _score(model: Answers, start: Answers, expert: Answers | None, is_start: bool) -> DomainScore:
    if is_start:
        return DomainScore(model.accuracy, None, None)
    headroom = None if expert is None else recovered_headroom(model, start, expert)
    return DomainScore(model.accuracy, paired_difference(model, start), headroom)


def _trained_on(model: MeasuredModel, start: MeasuredModel) -> tuple[str, ...] | None:
    """Return the domains that a model was trained on since the start; None where not known.

    In another run the start is the stage of the same name.
    """
    if model.stage is None:
        return None
    stages = {stage.name: stage for stage in model.run.stages}
    before = _ancestors(start.stage.name, stages) if start.stage else []
    lineage = (name for name in _ancestors(model.stage.name, stages) if name not in before)
    of_domains = (stages[name].domains for name in lineage if name in stages and stages[name].steps)
    return tuple(dict.fromkeys(chain.from_iterable(of_domains)))


def _undefined(
    answers: Mapping[str, Mapping[str, Answers]], experts: Mapping[str, str], start: str
) -> Iterator[tuple[str, str]]:
    """Yield each domain where no headroom is defined, and why."""
    for domain, by_model in answers.items():
        expert = experts.get(domain)
        if expert is None or expert not in by_model:
            yield domain, "none of its experts was measured"
        elif recovered_headroom(by_model[expert], by_model[start], by_model[expert]) is None:
            gain = paired_difference(by_model[expert], by_model[start])
            yield domain, f"{expert} gains {points(gain)}, not significant"


def _notes(
    run: Run, models: Models, answers: Mapping[str, Mapping[str, Answers]], start: str
) -> Iterator[str]:
    """Yield which problems and results were left out."""
    for domain, by_model in answers.items():
        most = max(len(models[name].domains[domain].keys) for name in by_model)
        if (count := len(by_model[start].right)) < most:
            yield f"{domain}: {count} of {most} problems, those that all of these models answered"
    for name in stale_evaluations(run):
        yield f"left out: {name} is stale: {run.states[name].cause}"
