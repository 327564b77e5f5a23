"""Write what mergekit makes of small tensors, which the tests compare with.

mergekit is no dependency of the tests. It is run from a directory of its own:

    pip install --no-deps --target DIRECTORY mergekit==0.1.5
    PYTHONPATH=.:DIRECTORY python -m tests.stages.mergekit_values
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).with_name("mergekit.npz")
SHAPES = {"matrix": (24, 18), "norm": (31,)}
WEIGHTS = (1.0, 0.5, 2.0)
# By our method and its keys: mergekit's method, its keys, and whether it has weights.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], bool]] = {
    "average": ({}, "linear", {"normalize": True}, True),
    "task_arithmetic": ({"lambda": 0.7}, "task_arithmetic", {"lambda": 0.7}, True),
    "ties": ({"density": 0.3, "lambda": 1.5}, "ties", {"density": 0.3, "lambda": 1.5}, True),
    "ties whole": ({"density": 1.0}, "ties", {"density": 1.0}, True),
    # Without a drop mergekit's DARE draws nothing either: only the sum and the election.
    "dare": ({"drop": 0.0}, "dare_linear", {"density": 1.0, "normalize": False}, True),
    "dare ties": (
        {"drop": 0.0, "then": "ties"},
        "dare_ties",
        {"density": 1.0, "normalize": True},  # as the authors do; mergekit's default is a sum
        True,
    ),
    "sce": ({"density": 0.4}, "sce", {"select_topk": 0.4}, False),
    "sce whole": ({}, "sce", {"select_topk": 1.0}, False),
    "ram": ({"threshold": 1e-3}, "ram", {"epsilon": 1e-3}, False),
    # mergekit's RAM+ counts within the tensor, and so do the tests for this case.
    "ram plus": (
        {"threshold": 1e-3, "rescale": 0.1, "max_ratio": 0.2},
        "ramplus_tl",
        {"epsilon": 1e-3, "r": 0.1, "alpha": 0.2},
        False,
    ),
}


def tensors(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return a start and three models in float64, each of which changed about half of it."""
    draw = np.random.default_rng(sum(shape))
    start = draw.normal(size=shape)
    changes = [draw.normal(size=shape) * (draw.random(shape) < 0.5) for _ in WEIGHTS]
    return [torch.from_numpy(each) for each in (start, *(start + 0.1 * each for each in changes))]


def merged(name: str, given: list[torch.Tensor]) -> torch.Tensor:
    """Return mergekit's merge of a start and models in one case."""
    from mergekit.merge_methods.api import merge_tensors

    _, method, keys, weighted = CASES[name]
    if weighted:
        keys = {**keys, "weight": WEIGHTS}
    if method == "linear":
        return merge_tensors(given[1:], method, parameters=keys)
    return merge_tensors(given, method, parameters=keys, base_index=0)


def main() -> None:
    """Write every case's merge of every tensor, and mergekit's version."""
    found = {
        f"{name}/{shape}": merged(name, tensors(SHAPES[shape])).numpy()
        for name in CASES
        for shape in SHAPES
    }
    np.savez_compressed(FILE, mergekit=version("mergekit"), **found)


if __name__ == "__main__":
    main()
