"""A critic is saved with its policy and resumes under any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.settings import LayoutSettings
from tests.layouts import critic_cases as cases
from tests.layouts.cases import MATRIX
from tests.ranks import On
from tests.tiers import tiered


@pytest.mark.parametrize(
    ("saved", "resumed", "kind"),
    tiered(
        [
            ("TP2", "PP2", "adam_distributed"),
            ("EP2", "TP2", "adam_distributed"),
            ("CP2", "TP2", "adam"),
            ("VPP2", "EP2", "adam_distributed"),
            ("PP2", "TP2 EP2 PP2", "adam"),
        ],
        lambda saved, resumed, kind: saved == "VPP2",
    ),
)
def test_a_critic_continues_under_another_layout(
    saved: str, resumed: str, kind: str, on: On, tmp_path: Path
) -> None:
    [expected] = on(LayoutSettings(), cases.never_stop, kind)
    on(MATRIX[saved], cases.begin, MATRIX[saved], kind, str(tmp_path))
    for found in on(
        MATRIX[resumed], cases.continue_training, MATRIX[resumed], kind, str(tmp_path), expected
    ):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("layout", tiered(["1 rank", "DP2", "TP2"], {"TP2"}))
def test_a_critic_resumes_bit_for_bit(layout: str, on: On, tmp_path: Path) -> None:
    arguments = (MATRIX[layout], "adam_distributed", str(tmp_path))
    assert all(on(MATRIX[layout], cases.resumes_bit_for_bit, *arguments))
