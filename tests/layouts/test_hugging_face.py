"""Hugging Face checkpoints in and out, the same under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import On
from hugging_face_cases import FAMILIES, export, gradient_error, import_and_compare, stored

from parallel.settings import LayoutSettings

MATRIX = {
    "1 rank": {},
    "TP2": {"ranks": 2, "tensor": 2},  # whose experts are whole on both ranks
    "ETP2": {"ranks": 2, "expert_tensor": 2},
    "TP2 ETP2": {"ranks": 2, "tensor": 2, "expert_tensor": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "EP2": {"ranks": 2, "expert": 2},
    "CP2": {"ranks": 2, "context": 2},
    "TP2 EP2 PP2": {"ranks": 4, "tensor": 2, "expert": 2, "pipeline": 2},
    "TP2 EP2 ETP2": {"ranks": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
}


@pytest.fixture(scope="session")
def exported(on: On, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family's random model, as one rank writes it."""
    folders = {family: tmp_path_factory.mktemp("exports") / family for family in FAMILIES}
    for family, folder in folders.items():
        on(LayoutSettings(), export, LayoutSettings(), family, str(folder))
    return folders


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_do_not_know_the_layout(
    family: str, name: str, on: On, exported: dict[str, Path], tmp_path: Path
) -> None:
    """Written from any layout a checkpoint is the same, bit for bit, and read into any layout it
    is the model that transformers makes of it."""
    layout = LayoutSettings(**MATRIX[name])
    on(layout, export, layout, family, str(tmp_path / "out"))
    assert stored(str(tmp_path / "out")) == stored(str(exported[family]))
    for found in on(layout, import_and_compare, layout, family, str(exported[family])):
        assert found["tensors"]
        assert found["logprobs"] < 1e-5, found
        assert found["rotary"] > 0.0


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "deepseek_v3"])
def test_every_family_trains_alike_under_every_layout(family: str, on: On, tmp_path: Path) -> None:
    for name in ("1 rank", "TP2", "CP2", "TP2 EP2 PP2", "TP2 EP2 ETP2"):
        layout = LayoutSettings(**MATRIX[name])
        for found in on(layout, gradient_error, layout, family, str(tmp_path)):
            assert found < (1e-5, ""), (name, found)
