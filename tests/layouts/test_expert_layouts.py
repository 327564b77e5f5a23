"""An expert's update is the same, whatever its objective reduces over, however it is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import MATRIX
from expert_cases import OBJECTIVES, alone, differences
from ranks import On

from parallel.settings import LayoutSettings


@pytest.fixture(scope="module", params=OBJECTIVES)
def one_process(request: pytest.FixtureRequest, on: On, tmp_path_factory: Any) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("alone")
    on(LayoutSettings(), alone, str(directory), request.param)
    return request.param, directory


@pytest.mark.parametrize("layout", ["DP2", "TP2", "CP2", "PP2"])
def test_an_update_does_not_know_the_layout(
    layout: str, on: On, one_process: tuple[str, Path]
) -> None:
    """Entropies, KL over the vocabulary and weights by length and by group, for tokens with
    advantages of their own, in several micro-batches."""
    name, directory = one_process
    for found in on(MATRIX[layout], differences, MATRIX[layout], str(directory), name):
        assert found["gradient"] < 1e-5, found
        assert max(found["metrics"].values()) < 1e-6, found
        assert found["measured"]["gradient_norm"] > 0
        learns = OBJECTIVES[name]["aggregation"] == "lambda"
        assert (found["measured"]["exponent after"] != 0) == learns
