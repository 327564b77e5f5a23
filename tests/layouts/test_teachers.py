"""Teachers that come in turn give the bits of teachers that are all in memory, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.files import newest_whole, whole_checkpoints
from parallel.model.divergences import extrapolated
from parallel.model.kept_logits import HiddenStates
from parallel.model.vocabulary import HeadLogits
from parallel.settings import LayoutSettings
from tests.layouts import teacher_cases as cases
from tests.layouts.cases import MATRIX, MODEL, SPREAD
from tests.layouts.hugging_face_cases import MODELS
from tests.ranks import On, Ranks
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


@pytest.mark.parametrize("name", tiered(STUDENTS, ("TP2", "CP2 EP2 VPP2")))
def test_one_in_turn_gives_the_bits_of_all_resident(name: str, on: On, teachers: Path) -> None:
    layout = MATRIX[name]
    assert on(layout, cases.differing, layout, MODEL, str(teachers), {}) == [[]] * layout.ranks


@pytest.mark.parametrize("name", tiered(["1 rank", "VPP2"], ["1 rank"]))
def test_several_teachers_of_a_domain_too(name: str, on: On, teachers: Path) -> None:
    layout = MATRIX[name]
    assert on(layout, cases.differing, layout, MODEL, str(teachers), SEVERAL) == [[]] * layout.ranks


@pytest.mark.parametrize("name", tiered(STUDENTS, ("TP2", "CP2 EP2 VPP2")))
def test_a_plan_fills_what_a_load_does(name: str, on: On, teachers: Path) -> None:
    layout = MATRIX[name]
    paths = [str(teachers / each / of) for each in WRITTEN for of in ("step_3", "huggingface")]
    assert on(layout, cases.filled, layout, MODEL, paths) == [[]] * layout.ranks


@pytest.mark.parametrize("family", tiered(MODELS, ("bf16", "glm4_moe", "gpt_oss")))
def test_a_plan_fills_models_of_every_family(family: str, on: On, tmp_path: Path) -> None:
    model: Any = MODELS[family]
    one, two = LayoutSettings(), MATRIX["TP2 EP2 PP2"]
    on(one, cases.write, one, model, str(tmp_path), 1)
    paths = [str(tmp_path / each) for each in ("step_3", "huggingface")]
    assert on(two, cases.filled, two, model, paths) == [[]] * two.ranks


@pytest.fixture(scope="module")
def undisturbed(on: On, teachers: Path) -> Path:
    """The checkpoints of a merge that nothing is killed in."""
    on(SPREAD, cases.train, SPREAD, str(teachers), "undisturbed")
    return teachers / "undisturbed" / "checkpoints"


@pytest.mark.parametrize(
    ("phase", "at"),
    # Of step 2 of 3: reads of weights or heads, micro-batches written, passes.
    [("load", 8), ("write", 10), ("step", 10)],
)
def test_a_merge_killed_in_a_phase_resumes_with_the_same_bits(
    phase: str, at: int, on: On, teachers: Path, undisturbed: Path
) -> None:
    doomed = Ranks(SPREAD)
    with pytest.raises(AssertionError, match="by peer"):
        doomed(cases.train, SPREAD, str(teachers), phase, phase, at)
    doomed.close()
    checkpoints = teachers / phase / "checkpoints"
    left = [each.step for each in whole_checkpoints(checkpoints)]
    assert left == [1]
    assert (teachers / phase / "hidden_states").is_dir() or phase == "load"
    on(SPREAD, cases.train, SPREAD, str(teachers), phase)
    found, expected = newest_whole(checkpoints), newest_whole(undisturbed)
    assert found and expected and found.step == expected.step == 3
    assert found.files == expected.files
    assert not list((teachers / phase / "hidden_states").iterdir())


def test_a_full_disk_fails_with_its_directory_and_key(on: On, teachers: Path) -> None:
    [message] = on(LayoutSettings(), cases.grade_on_a_full_disk, str(teachers))
    directory = teachers / "merge" / "hidden_states"
    assert message == (
        f"{directory}: cannot write hidden states (No space left on device); free space there, or"
        " set stages.merge.teacher_memory.hidden_states: host"
    )
    assert not list(directory.iterdir())


def test_a_teacher_that_changes_or_vanishes_is_named(on: On, tmp_path: Path) -> None:
    one = LayoutSettings()
    on(one, cases.write, one, MODEL, str(tmp_path), 1)
    changed, gone = on(one, cases.read_after_damage, str(tmp_path / "step_3"))[0]
    assert "changed while a stage reads it; resume the run, which verifies it again" in changed
    assert gone.startswith(f"cannot read {tmp_path / 'step_3'}: ") and "No such file" in gone


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_hidden_states_are_rounded_to_the_precision_they_are_kept_in(
    where: Any, tmp_path: Path
) -> None:
    hidden = torch.randn(5, 8)
    for dtype, expected in ((None, hidden), (torch.bfloat16, hidden.bfloat16().float())):
        states = HiddenStates(where, dtype, tmp_path / "rank_0")
        kept = [states.keep(HeadLogits(each, torch.eye(8))) for each in (hidden, hidden[:0])]
        assert states.bytes == hidden.numel() * (dtype or hidden.dtype).itemsize
        assert torch.equal(kept[0].load().hidden, expected)
        assert kept[1].load().hidden.shape == (0, 8)
        states.clear()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("precise", "logits"), [(False, [256.0, 256.0]), (True, [256.0, 257.0])])
def test_kept_logits_have_the_precision_of_their_head(
    precise: bool, logits: list[float], tmp_path: Path
) -> None:
    """257 has 9 significant bits and bf16 8: an fp32 head alone tells the two ids apart."""
    hidden = torch.tensor([[256.0, 1.0]]).bfloat16()
    head = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).bfloat16()
    states = HiddenStates("host", None, tmp_path / "rank_0")
    teacher = states.keep(HeadLogits(hidden, head, precise=precise)).load()
    assert teacher.rows(slice(None)).tolist() == [logits]
    start = HeadLogits(hidden, torch.zeros_like(head), precise=precise)  # all of its logits are 0
    doubled = extrapolated(teacher, start, 2.0).rows(slice(None))
    assert doubled.tolist() == [[2 * logit for logit in logits]]
