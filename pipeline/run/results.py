"""The results of a run, results.json: every model's accuracy on every domain."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from parallel.files import read_text, write_atomically
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.ledger import Ledger, minutes

Models = dict[str, dict[str, dict[str, Any]]]
SCORE = {"accuracy", "low", "high", "n"}


def write_results(run: RunDirectory) -> Models:
    """Compose results.json from the evaluation and the ledger.

    Returns:
        {model: {domain: {"accuracy", "low", "high", "n"}}}

    Raises:
        BraidError: what the evaluation left is damaged.
    """
    path = run.stage("evaluate").results
    if (models := read_models(path)) is None:
        raise BraidError(f"{shown(path)} is damaged; evaluate once more with --from evaluate")
    results = {"models": models, "minutes": minutes(Ledger(run.ledger).events())}
    write_atomically(run.results, json.dumps(results, indent=2) + "\n")
    return models


def read_models(path: Path) -> Models | None:
    """What a results.json says of models; None where it is damaged."""
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
    """Return whether a score has all its numbers, and none that is infinite.

    Raises:
        KeyError: one is not there.
        OverflowError: an integer is larger than any float.
    """
    of_several = {"samples_per_problem", "pass_at_k"} if "pass_at_k" in score else set()
    numbers = [score[name] for name in SCORE | of_several]
    return all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
