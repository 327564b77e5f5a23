"""A teacher that reads other prompts gives one loss and gradient under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.settings import LayoutSettings
from tests.layouts.cases import MATRIX
from tests.layouts.self_teacher_cases import differences, plain_loss, reference
from tests.ranks import On
from tests.tiers import tiered


@pytest.fixture(scope="module")
def one_process(on: On, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one process's loss and gradients."""
    directory = tmp_path_factory.mktemp("self")
    on(LayoutSettings(), reference, str(directory))
    return directory


def test_the_loss_is_that_of_samples_alone(on: On) -> None:
    [(loss, expected)] = on(LayoutSettings(), plain_loss)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", tiered(list(MATRIX)[1:], ("DP2", "CP2", "TP2 EP2 PP2", "CP2 EP2 VPP2"))
)
def test_loss_and_gradients_are_equal_under_every_layout(
    name: str, on: On, one_process: Path
) -> None:
    for loss, gradient, parameter in on(MATRIX[name], differences, MATRIX[name], str(one_process)):
        assert loss < 1e-6
        assert gradient < 2e-5, parameter
