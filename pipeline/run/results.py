"""The results of a run, results.json: each model's accuracy on each domain."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from parallel.files import read_text, write_atomically
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.ledger import minutes

Models = dict[str, dict[str, dict[str, Any]]]
SCORE = {"accuracy", "low", "high", "n"}


def write_results(run: RunDirectory) -> Models:
    """Write results.json from the evaluation and the ledger.

    Returns:
        {model: {domain: {"accuracy", "low", "high", "n"}}}

    Raises:
        BraidError: the evaluation's results are damaged.
    """
    path = run.stage("evaluate").results
    if (models := read_models(path)) is None:
        raise BraidError(f"{shown(path)} is damaged; rerun the evaluation with --from evaluate")
    results = {"models": models, "minutes": minutes(run.ledger.events())}
    write_atomically(run.results, json.dumps(results, indent=2) + "\n")
    return models


def read_models(path: Path) -> Models | None:
    """Return the accuracies of a results.json; None where it is damaged."""
    try:
        models: Models = json.loads(read_text(path))["models"]
        scores = [score for of_model in models.values() for score in of_model.values()]
        # A table has a row for every model and a column for every domain.
        sound = len({frozenset(of_model) for of_model in models.values()}) <= 1
        sound = sound and all(_is_score(score) for score in scores)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return models if sound else None


def _is_score(score: dict[str, Any]) -> bool:
    """Return whether a score has all its numbers and each is finite.

    Raises:
        KeyError: a number is missing.
        OverflowError: an integer is larger than any float.
    """
    of_several = {"samples_per_problem", "pass_at_k"} if "pass_at_k" in score else set()
    numbers = [score[name] for name in SCORE | of_several]
    return all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
