"""The comparison of a run's models: gains, recovered headroom, forgetting, the cost of each stage.

Numbers only, without torch: for `braid compare` and whatever else shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from parallel.errors import UserError, hint
from pipeline.report.stage_costs import StageCost, stage_costs
from pipeline.run.answers import MeasuredModel, common_keys, stale_evaluations
from pipeline.run.gates import points
from pipeline.run.run import Run
from pipeline.text import shown
from stages.kinds.distill import DistillSettings
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
ROLES: tuple[Role, ...] = ("start", "expert", "merge", "baseline")
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
        return {name: each.headroom for name, each in self.scores.items() if each.headroom}

    @property
    def mean_headroom(self) -> Headroom | None:
        """The mean over the domains where it is defined; None where it is on none."""
        found = self.headrooms
        return mean_headroom(list(found.values())) if found else None

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
    run: Run, models: Models, chosen: Sequence[str] = (), start: str | None = None
) -> ModelComparison:
    """Compare measured models, of this run and of others, with their start.

    All `models`, or the `chosen` ones; `start` is by default what the run's merge starts from.

    Raises:
        UserError: the start was not measured, or two models cannot be compared.
    """
    own = {name: each for name, each in models.items() if each.run is run}
    merge = _merge(own)
    start = start or _start(run, own, merge)
    experts = _experts(run, own, merge, start)
    rows = list(dict.fromkeys([start, *(chosen or models)]))
    used = {name: models[name] for name in dict.fromkeys([*rows, *experts.values()])}
    answers = _common_answers(used, list(used[start].domains))
    compared = {}
    for name in rows:
        scores = {
            domain: _score(of[name], of[start], of.get(experts.get(domain, "")), name == start)
            for domain, of in answers.items()
            if name in of
        }
        expert_of = tuple(each for each in answers if experts.get(each) == name)
        role: Role = "expert" if expert_of else "merge" if name == merge else "baseline"
        trained_on = None if name == start else _trained_on(used[name], used[start])
        role = "start" if name == start else role
        compared[name] = ComparedModel(role, expert_of, trained_on, scores)
    ordered = sorted(compared, key=lambda name: ROLES.index(compared[name].role))
    return ModelComparison(
        shown(run.path),
        start,
        {domain: len(of[start].right) for domain, of in answers.items()},
        {domain: name for domain, name in experts.items() if domain in answers},
        {name: compared[name] for name in ordered},
        dict(_undefined(answers, experts, start)),
        stage_costs(run),
        list(_notes(run, used, answers, start)),
    )


def _merge(own: Models) -> str | None:
    """Return the last model that has teachers."""
    merges = [name for name, each in own.items() if each.stage and each.stage.teachers]
    return merges[-1] if merges else None


def _start(run: Run, own: Models, merge: str | None) -> str:
    """Return what the merge starts from, or of merges in turn the first; else the first model.

    Raises:
        UserError: it was not measured.
    """
    if merge is None:
        return next(iter(own))
    stages = {stage.name: stage for stage in run.stages}
    stage, parent = own[merge].stage, merge
    while stage is not None and stage.teachers and stage.parent is not None:
        parent = stage.parent
        stage = stages.get(parent)
    if parent not in own:
        raise UserError(
            f"{shown(run.path)}: {parent}, which {merge} starts from, was not measured; choose"
            f" another start: --start MODEL; {hint(parent, own)}"
        )
    return parent


def _experts(run: Run, own: Models, merge: str | None, start: str) -> dict[str, str]:
    """Return each domain's expert: the merge's teacher, else the last model trained on it alone.

    Of several teachers it is the one with the largest weight.
    """
    stage = own[merge].stage if merge else None
    if stage is not None:
        block = run.settings.stages[stage.block or ""]
        assert isinstance(block, DistillSettings)
        found = {each: stage.teachers[block.main_teacher(each)] for each in stage.domains}
        return {domain: name for domain, name in found.items() if name in own}
    trained = ((name, each.stage) for name, each in own.items() if name != start)
    return {of.domain: name for name, of in trained if of and of.trains and of.steps and of.domain}


def _common_answers(models: Models, domains: Sequence[str]) -> dict[str, dict[str, Answers]]:
    """Return by domain each model's answers to the problems that all of them have in common."""
    found = {}
    for domain in domains:
        having = {name: each for name, each in models.items() if domain in each.domains}
        keys = common_keys(domain, list(having.values()))
        found[domain] = {name: each.domains[domain].on(keys) for name, each in having.items()}
    return found


def _score(model: Answers, start: Answers, expert: Answers | None, is_start: bool) -> DomainScore:
    if is_start:
        return DomainScore(model.accuracy, None, None)
    headroom = None if expert is None else recovered_headroom(model, start, expert)
    return DomainScore(model.accuracy, paired_difference(model, start), headroom)


def _trained_on(model: MeasuredModel, start: MeasuredModel) -> tuple[str, ...] | None:
    """Return the domains that a model was trained on since the start; None where not known.

    In another run the start is the stage of the same name.
    """
    stages = {stage.name: stage for stage in model.run.stages}
    found: dict[str, None] = {}
    stage = model.stage
    if stage is None:
        return None
    while stage is not None and (start.stage is None or stage.name != start.stage.name):
        if stage.steps:
            found |= dict.fromkeys(stage.domains)
        stage = stages.get(stage.parent or "")
    return tuple(found)


def _undefined(
    answers: Mapping[str, Mapping[str, Answers]], experts: Mapping[str, str], start: str
) -> Iterator[tuple[str, str]]:
    """Yield each domain where no headroom is defined, and why."""
    for domain, of in answers.items():
        expert = experts.get(domain)
        if expert is None or expert not in of:
            yield domain, "none of its experts was measured"
        elif recovered_headroom(of[expert], of[start], of[expert]) is None:
            gain = paired_difference(of[expert], of[start])
            yield domain, f"{expert} gains {points(gain)}, nothing significant"


def _notes(
    run: Run, models: Models, answers: Mapping[str, Mapping[str, Answers]], start: str
) -> Iterator[str]:
    """Yield which problems and results were left out."""
    for domain, of in answers.items():
        most = max(len(models[name].domains[domain].keys) for name in of)
        if (count := len(of[start].right)) < most:
            yield f"{domain}: {count} of {most} problems, those that all of these models answered"
    for name in stale_evaluations(run):
        yield f"left out: {name} is stale: {run.states[name].cause}"
