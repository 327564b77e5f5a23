"""The directories of runs whose models have been measured, written without running a stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from pipeline.config.validate import dump_resolved
from pipeline.run.directory import RunDirectory
from pipeline.run.lineage import write_manifest
from pipeline.run.run import Run
from stages.settings import RunSettings

Right = Mapping[str, Mapping[str, Sequence[int]]]  # by model and domain, to each problem


@dataclass(frozen=True)
class Skill:
    """A share of problems that a model solves; easier ones first, as far as it is not noise."""

    share: float
    noise: float = 0.2


@dataclass(frozen=True)
class Measured:
    """The answers that an evaluation measured, and its problems' keys; None: an older version's."""

    right: Right
    keys: Mapping[str, Sequence[str]] | None = None
    samples: int = 1
    unfinished: tuple[str, ...] = field(default=())


def answers(skills: Mapping[str, Mapping[str, Skill]], problems: int = 200, seed: int = 0) -> Right:
    """Return answers in which models tend to solve the same problems."""
    return {
        model: {
            domain: [
                int(
                    Random(f"{seed}/{domain}/{number}").random()
                    + skill.noise * Random(f"{seed}/{model}/{domain}/{number}").gauss(0, 1)
                    < skill.share
                )
                for number in range(problems)
            ]
            for domain, skill in of_domains.items()
        }
        for model, of_domains in skills.items()
    }


def keys(domains: Sequence[str], problems: int = 200, first: int = 0) -> dict[str, list[str]]:
    """Return the keys of each domain's problems, numbered from `first`."""
    return {each: [f"{each} {first + n}" for n in range(problems)] for each in domains}


def write_run(path: Path, settings: RunSettings, measured: Measured) -> Run:
    """Write a run whose stages are done, with the answers of its models and what they cost."""
    run = Run(path, settings)
    path.mkdir(parents=True)
    run.settings_file.write_text(dump_resolved(settings))
    for stage in run.stages:  # before any manifest, which has its inputs' digests
        if stage.steps is not None:
            checkpoint = run.stage(stage.name).path / "checkpoints" / f"step_{stage.steps}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "checksums.json").write_text('{"digest": "d", "files": {}}')
    for number, stage in enumerate(run.stages, start=1):
        directory = run.stage(stage.name)
        if stage.name in measured.unfinished:
            run.ledger.append(stage.name, "failed", "out of memory", 1, 1.0)
        else:
            run.ledger.append(stage.name, "done", "finished", 1, 60.0 * number)
        write_manifest(directory, run.lineage(stage))
        directory.memory(1).parent.mkdir(parents=True)
        peaks = {"peak_bytes": number << 28, "peak_gpu_bytes": 0}
        directory.memory(1).write_text(json.dumps(peaks))
        lines = [
            {"step": step, "time": float(step)}
            | ({"trained_tokens": 1000.0 * number} if stage.trains else {})
            | ({"sampled_tokens": 5000.0} if stage.needs_engine else {})
            for step in (1, 2)
        ]
        directory.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.stage("export").exported.mkdir(parents=True)
    if "evaluate" in settings.stages:
        _write_evaluation(run, measured)
    return Run(path, settings)


def _write_evaluation(run: RunDirectory, measured: Measured) -> None:
    directory = run.stage("evaluate")
    directory.results.write_text("{}")
    for folder in (directory.measured, directory.solved):
        folder.mkdir(parents=True)
    for model, right in measured.right.items():
        score = {} if measured.samples == 1 else {"samples_per_problem": measured.samples}
        (directory.measured / f"{model}.json").write_text(json.dumps(dict.fromkeys(right, score)))
        (directory.solved / f"{model}.json").write_text(json.dumps(right))
    if measured.keys is not None:
        directory.problems.write_text(json.dumps(measured.keys))
