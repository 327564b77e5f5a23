"""The answers of the models that a run's evaluations measured, problem by problem.

Models are compared on the problems that all of them answered: those with the same keys, which are
hashes of the prompts. Models of other runs too, where both runs grade alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from parallel.errors import UserError
from pipeline.run.graph import Stage
from pipeline.run.lineage import Manifest, read_manifest
from pipeline.run.run import Run
from pipeline.run.solved import COUNTS, damaged, read_json
from pipeline.text import shown
from stages.directory import file_name
from stages.keys import differing
from stages.statistics import Answers

_KEYS = TypeAdapter(dict[str, list[str]])
_SCORES = TypeAdapter(dict[str, dict[str, Any]])


@dataclass(frozen=True)
class DomainAnswers:
    """A model's answers to a domain's problems, in the order of `keys`.

    Where an older version wrote the `evaluation` the keys are the problems' numbers, and `keyed` is
    false. `grading` has the settings and digests of files that answers are sampled and graded by.
    """

    answers: Answers
    keys: Sequence[str]
    keyed: bool
    grading: Mapping[str, Any]
    evaluation: str

    def on(self, keys: Sequence[str]) -> Answers:
        """Return the answers to the problems of these keys, in their order."""
        right = dict(zip(self.keys, self.answers.right, strict=True))
        return replace(self.answers, right=[right[key] for key in keys])


@dataclass(frozen=True)
class MeasuredModel:
    """A model that a run's evaluations measured.

    `stage` is its stage in the run; None for a model from outside the run.
    """

    run: Run
    name: str
    stage: Stage | None
    domains: Mapping[str, DomainAnswers]


def measured_models(run: Run) -> dict[str, MeasuredModel]:
    """Return the models that the run's evaluations have measured so far, in the graph's order.

    A stale evaluation does not count: its answers are of other models, problems or rewards.

    Raises:
        UserError: nothing has been measured, all of it is stale, or a file is damaged.
    """
    evaluations = [stage for stage in run.stages if stage.declared.evaluates]
    if not evaluations:
        raise UserError(
            f"{shown(run.path)} has no evaluation; add one to its stages:"
            " evaluate: {kind: evaluate}"
        )
    stages = {stage.name: stage for stage in run.stages}
    measured: dict[str, dict[str, DomainAnswers]] = {}
    sources: dict[str, str] = {}
    for stage in evaluations:
        if run.states[stage.name].state == "stale":
            continue
        for name, source in stage.models.items():
            if domains := dict(_answers(run, stage, name)):
                measured.setdefault(name, {}).update(domains)
                sources[name] = source
    if not measured:
        raise _nothing_measured(run, evaluations)
    return {
        name: MeasuredModel(run, name, stages.get(sources[name]), domains)
        for name, domains in run.in_order(measured).items()
    }


def stale_evaluations(run: Run) -> list[str]:
    """Return the run's evaluations whose results no longer count."""
    evaluations = (stage.name for stage in run.stages if stage.declared.evaluates)
    return [name for name in evaluations if run.states[name].state == "stale"]


def common_keys(domain: str, models: Sequence[MeasuredModel]) -> list[str]:
    """Return the keys of a domain's problems that all models answered, in the first one's order.

    Raises:
        UserError: they have no problem in common or were not graded alike, or the evaluation of
            another run has no keys.
    """
    first, *others = models
    for other in others:
        _check_comparable(domain, first, other)
    common = set.intersection(*(set(model.domains[domain].keys) for model in models))
    if not common:
        names = ", ".join(f"{model.name} of {shown(model.run.path)}" for model in models)
        raise UserError(f"{domain}: no problem in common of {names}; they cannot be compared")
    return [key for key in first.domains[domain].keys if key in common]


def _check_comparable(domain: str, one: MeasuredModel, other: MeasuredModel) -> None:
    """Raise UserError where the difference of two models' accuracies would mean nothing."""
    mine, yours = one.domains[domain], other.domains[domain]
    # Within one run all models answer the same problems, which their numbers identify.
    if one.run.path != other.run.path or mine.keyed != yours.keyed:
        for model, answers in ((one, mine), (other, yours)):
            if not answers.keyed:
                run = shown(model.run.path)
                raise UserError(
                    f"{run}: {answers.evaluation} was written by an older version, without the"
                    " keys of its problems, which tell whether two runs have the same ones; rerun"
                    f" it: braid resume {run} --from {answers.evaluation}"
                )
    here, there = (f"{model.name} of {shown(model.run.path)}" for model in (one, other))
    for key, (before, after) in sorted(differing(mine.grading, yours.grading).items()):
        raise UserError(
            f"{domain}: {here} and {there} were not graded alike: {key} is {json.dumps(before)} and"
            f" {json.dumps(after)}"
        )


def _nothing_measured(run: Run, evaluations: Sequence[Stage]) -> UserError:
    """Return the error of a run without one measured model, with the command that measures."""
    states = [(stage.name, run.states[stage.name]) for stage in evaluations]
    why = [
        f"{name} is {state.state}{f': {state.cause}' * bool(state.cause)}" for name, state in states
    ]
    again = [f"--from {name}" for name in stale_evaluations(run)]
    command = " ".join([run.resume_command(), *again])
    return UserError(
        f"{shown(run.path)}: no model has been measured: {'; '.join(why)}\n"
        f"measure them with: {command}"
    )


def _answers(run: Run, stage: Stage, model: str) -> Iterator[tuple[str, DomainAnswers]]:
    """Yield each domain that an evaluation has measured a model on, with the answers.

    Raises:
        UserError: a file is damaged or missing.
    """
    directory = run.stage(stage.name)
    file = f"{file_name(model)}.json"
    scores = read_json(_SCORES, directory.measured / file, stage)
    if scores is None:
        return
    solved = directory.solved / file
    right = read_json(COUNTS, solved, stage)
    problems = read_json(_KEYS, directory.problems, stage)
    manifest = read_manifest(directory)
    if right is None or manifest is None:
        raise damaged(solved if right is None else directory.manifest, stage)
    for domain, counts in right.items():
        samples = scores.get(domain, {}).get("samples_per_problem", 1)
        keys = problems[domain] if problems and domain in problems else None
        numbers = list(map(str, range(len(counts))))
        if type(samples) is not int or samples < 1:
            raise damaged(directory.measured / file, stage)
        if not counts or not all(0 <= count <= samples for count in counts):
            raise damaged(solved, stage)
        if keys is not None and not len(set(keys)) == len(keys) == len(counts):
            raise damaged(directory.problems, stage)
        answers, grading = Answers(counts, samples), _grading(manifest, domain)
        yield domain, DomainAnswers(answers, keys or numbers, bool(keys), grading, stage.name)


def _grading(manifest: Manifest, domain: str) -> dict[str, Any]:
    """Return the settings that a domain's answers were sampled and graded by, and its code.

    Another directory of the same code is no difference.
    """
    prefixes = (
        f"domains.{domain}.rewards.",
        f"domains.{domain}.sampling.",
        f"domains.{domain}.evaluation.",
        *(f"evaluation.{key}" for key in ("temperature", "top_p", "top_k")),
    )
    code = {f"the code of {key}": digest for key, digest in manifest.files.items()}
    settings = {
        key: setting for key, setting in manifest.settings.items() if not key.endswith(".path")
    }
    return {
        key: value
        for key, value in (settings | code).items()
        if key.removeprefix("the code of ").startswith(prefixes) and value is not None
    }
