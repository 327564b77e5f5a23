"""Teachers that come in turn give the bits of teachers that are all in memory, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel.settings import LayoutSettings
from tests.layouts import teacher_cases as cases
from tests.layouts.cases import MATRIX, MODEL
from tests.layouts.hugging_face_cases import MODELS
from tests.ranks import On
from tests.tiers import tiered

# The layouts that wrote the teachers: each is another than the student's in most tests.
WRITTEN = {"a": "1 rank", "b": "TP2", "c": "PP2"}
STUDENTS = ("1 rank", "TP2", "PP2", "EP2", "CP2", "VPP2", "DP2", "TP2 EP2 PP2", "CP2 EP2 VPP2")
SEVERAL = {"teachers": {"a": {"a": 0.75, "b": 0.25}, "b": "b", "c": {"a": 0.5, "c": 0.5}}}


@pytest.fixture(scope="module")
def teachers(on: On, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of three teachers, written under different layouts."""
    directory = tmp_path_factory.mktemp("teachers")
    for name, layout in WRITTEN.items():
        of = MATRIX[layout]
        on(of, cases.write, of, MODEL, str(directory / name), cases.SEEDS[name])
    return directory


@pytest.mark.parametrize("name", tiered(STUDENTS, ("TP2", "PP2", "EP2", "CP2", "CP2 EP2 VPP2")))
def test_one_in_turn_gives_the_bits_of_all_resident(name: str, on: On, teachers: Path) -> None:
    layout = MATRIX[name]
    assert on(layout, cases.differing, layout, MODEL, str(teachers), {}) == [[]] * layout.ranks


@pytest.mark.parametrize("name", ["1 rank", "VPP2"])
def test_several_teachers_of_a_domain_too(name: str, on: On, teachers: Path) -> None:
    layout = MATRIX[name]
    assert on(layout, cases.differing, layout, MODEL, str(teachers), SEVERAL) == [[]] * layout.ranks


@pytest.mark.parametrize("name", tiered(STUDENTS, ("TP2", "CP2 EP2 VPP2")))
def test_a_plan_fills_what_a_load_does(name: str, on: On, teachers: Path) -> None:
    layout = MATRIX[name]
    paths = [str(teachers / each / of) for each in WRITTEN for of in ("step_3", "huggingface")]
    assert on(layout, cases.filled, layout, MODEL, paths) == [[]] * layout.ranks


@pytest.mark.parametrize("family", tiered(MODELS, ("bf16", "glm4_moe")))
def test_a_plan_fills_models_of_every_family(family: str, on: On, tmp_path: Path) -> None:
    model: Any = MODELS[family]
    one, two = LayoutSettings(), MATRIX["TP2 EP2 PP2"]
    on(one, cases.write, one, model, str(tmp_path), 1)
    paths = [str(tmp_path / each) for each in ("step_3", "huggingface")]
    assert on(two, cases.filled, two, model, paths) == [[]] * two.ranks
