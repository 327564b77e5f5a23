"""The files that say which problems a measured model solved, and the error of a damaged one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from parallel.errors import UserError
from parallel.files import read_text
from pipeline.run.graph import Stage
from pipeline.text import shown
from stages.directory import StageDirectory, file_name

Solved = Mapping[str, Mapping[str, Sequence[int]]]  # right answers by model, domain and problem
COUNTS = TypeAdapter(dict[str, list[int]])


def solved_problems(directory: StageDirectory, stage: Stage, samples: int = 1) -> Solved:
    """Return the right answers of a gate's models to each problem, of `samples`, in one order.

    Raises:
        UserError: a file is damaged or missing.
    """
    solved: dict[str, dict[str, list[int]]] = {}
    problems: dict[str, int] = {}
    for model in stage.models:
        path = directory.solved / f"{file_name(model)}.json"
        counts = read_json(COUNTS, path, stage)
        if counts is None or not all(counts.get(domain) for domain in stage.evaluated_on[model]):
            raise damaged(path, stage)
        for domain, right in counts.items():
            # A paired comparison needs the answers of all models to the same problems, in one
            # order.
            count = problems.setdefault(domain, len(right))
            if not all(0 <= answers <= samples for answers in right) or count != len(right):
                raise damaged(path, stage)
        solved[model] = counts
    return solved


def read_json[Read](shape: TypeAdapter[Read], path: Path, stage: Stage) -> Read | None:
    """Return what an evaluation or a gate wrote as JSON; None where the file does not exist.

    Raises:
        UserError: it is damaged.
    """
    try:
        return shape.validate_python(json.loads(read_text(path)), strict=True)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise damaged(path, stage) from error


def damaged(path: Path, stage: Stage) -> UserError:
    """Return the error of a file that a stage has to measure again."""
    what = "is damaged" if path.exists() else "is missing"
    return UserError(f"{shown(path)} {what}; rerun the evaluation with --from {stage.name}")
