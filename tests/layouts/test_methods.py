"""Every method of a merge gives one loss and gradient under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.settings import LayoutSettings
from tests.layouts.cases import MATRIX
from tests.layouts.method_cases import METHODS, differences, reference
from tests.ranks import On
from tests.tiers import tiered


@pytest.fixture(scope="module")
def one_process(on: On, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one process's losses and gradients."""
    directory = tmp_path_factory.mktemp("methods")
    on(LayoutSettings(), reference, str(directory))
    return directory


@pytest.mark.parametrize(
    "name", tiered(list(MATRIX)[1:], ("DP2", "TP2", "TP2 EP2 PP2", "CP2 EP2 VPP2"))
)
def test_loss_and_gradients_are_equal_under_every_layout(
    name: str, on: On, one_process: Path
) -> None:
    for found in on(MATRIX[name], differences, MATRIX[name], str(one_process)):
        assert found.keys() == METHODS.keys()
        for method, (loss, gradient, parameter) in found.items():
            assert loss < 1e-6, (method, loss)
            assert gradient < 2e-5, (method, gradient, parameter)
