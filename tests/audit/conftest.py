"""The audited run, and a cache for auditing it often."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

from stages.audit import recorded
from tests.warm_runs import WarmBraid

ODD = Path(__file__).parent / "odd.yaml"


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory, warm_braid: WarmBraid) -> Path:
    """A finished run of odd.yaml."""
    runs = tmp_path_factory.mktemp("runs")
    warm_braid(runs, "run", str(ODD))
    return runs / "odd"


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every checkpoint once, for many audits of one step."""
    monkeypatch.setattr(recorded, "tensors", cache(recorded.tensors))


@pytest.fixture
def copied(odd: Path, tmp_path: Path) -> Path:
    """A copy of the run of odd.yaml, with files that may be changed."""
    return shutil.copytree(odd, tmp_path / "odd", symlinks=True)
