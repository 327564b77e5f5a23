"""An expert's update is equal under every layout, whatever its objective reduces over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from parallel.settings import LayoutSettings
from tests.layouts.cases import MATRIX
from tests.layouts.expert_cases import OBJECTIVES, UNLIKE, alone, differences
from tests.ranks import On
from tests.tiers import tiered

FIRST = next(iter(OBJECTIVES))
LAYOUTS = ["DP2", "TP2", "CP2", "PP2", "VPP2", "EP2", "TP2 EP2 PP2", "CP2 EP2 VPP2"]


@pytest.fixture(scope="module")
def one_process(on: On, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one process's results for an objective, computed once."""
    directory = tmp_path_factory.mktemp("alone")

    @cache
    def made(name: str) -> Path:
        on(LayoutSettings(), alone, str(directory), name)
        return directory

    return made


@pytest.mark.parametrize(
    ("layout", "name"),
    tiered(
        product(LAYOUTS, OBJECTIVES),
        lambda layout, name: layout == ("TP2 EP2 PP2" if name == FIRST else "CP2 EP2 VPP2"),
    ),
)
def test_an_update_is_equal_under_every_layout(
    layout: str, name: str, on: On, one_process: Callable[[str], Path]
) -> None:
    """Covers entropies, full KL, and weights by length and group, with per-token advantages."""
    directory = one_process(name)
    for found in on(MATRIX[layout], differences, MATRIX[layout], str(directory), name):
        assert found["gradient"] < 1e-5, found
        assert max(found["metrics"].values()) < 1e-6, found
        assert found["measured"]["gradient_norm"] > 0
        learns = OBJECTIVES[name]["aggregation"] == "lambda"
        assert (found["measured"]["exponent after"] != 0) == learns


@pytest.mark.parametrize("layout", tiered(["DP2", "TP2 EP2 PP2"], lambda layout: layout == "DP2"))
def test_unlike_objectives_of_domains_are_equal_under_every_layout(
    layout: str, on: On, one_process: Callable[[str], Path]
) -> None:
    [name] = UNLIKE
    directory = one_process(name)
    for found in on(MATRIX[layout], differences, MATRIX[layout], str(directory), name):
        measured = found["measured"]
        assert found["gradient"] < 1e-5, found
        assert max(found["metrics"].values()) < 1e-6, found
        assert measured["gradient_norm"] > 0
        assert measured["exponent after sums"] != 0 == measured["exponent after words"]
        assert measured["kl/sums"] != measured["kl/words"]
        assert measured["coefficient after sums"] != 0.5
        assert measured["coefficient after words"] != 0.1
