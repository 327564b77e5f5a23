"""Checkpoints under any layout: whole or absent, and verified by their checksums."""

from __future__ import annotations

import errno
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import NOTICE_MARK
from parallel.settings import LayoutSettings
from tests.layouts import checkpoint_cases as cases
from tests.layouts import hostile_cases
from tests.layouts.cases import SPREAD
from tests.ranks import On, Ranks
from tests.tiers import tiered

ONE = LayoutSettings()
DATA = LayoutSettings(ranks=2)
TENSOR = LayoutSettings(ranks=2, tensor=2)
PIPELINE = LayoutSettings(ranks=2, pipeline=2)
VIRTUAL = LayoutSettings(ranks=2, pipeline=2, virtual_pipeline=2)
UNEVEN = LayoutSettings(ranks=2, pipeline=2, first_stage_layers=3)
CONTEXT = LayoutSettings(ranks=2, context=2)
EXPERTS = SPREAD
SPLIT_EXPERTS = LayoutSettings(ranks=2, expert_tensor=2)
TENSOR_EXPERTS = LayoutSettings(ranks=2, tensor=2, expert=2)
EXPERTS_PIPELINE = LayoutSettings(ranks=4, expert=2, pipeline=2)

# The layout that saves and the layout that continues.
PAIRS = {
    "DP2_to_DP1": (DATA, ONE),
    "DP1_to_DP2": (ONE, DATA),
    "EP2_to_EP1": (EXPERTS, ONE),
    "EP1_to_EP2": (ONE, EXPERTS),
    "EP2_to_DP2": (EXPERTS, DATA),
    "TP2_to_TP1": (TENSOR, ONE),
    "TP1_to_TP2": (ONE, TENSOR),
    "PP2_to_PP1": (PIPELINE, ONE),
    "PP1_to_PP2": (ONE, PIPELINE),
    "PP2_to_VPP2": (PIPELINE, VIRTUAL),
    "VPP2_to_TP2": (VIRTUAL, TENSOR),
    "uneven_to_VPP2": (UNEVEN, VIRTUAL),
    "PP2_to_uneven": (PIPELINE, UNEVEN),
    "CP2_to_PP2": (CONTEXT, PIPELINE),
    "ETP2_to_EP2": (SPLIT_EXPERTS, EXPERTS),
    "TP2EP2_to_EP2PP2": (TENSOR_EXPERTS, EXPERTS_PIPELINE),
}
# All kinds use the same names in a checkpoint, so one kind suffices for the rarer pairs.
WITH_EVERY_KIND = ("DP2_to_DP1", "EP2_to_EP1", "TP1_to_TP2", "PP1_to_PP2", "TP2EP2_to_EP2PP2")
GOING_ON = [
    (pair, kind)
    for pair in PAIRS
    for kind in cases.KINDS
    if kind == "adam_distributed" or pair in WITH_EVERY_KIND
]
SAME = {
    "DP2": DATA,
    "EP2": EXPERTS,
    "VPP2": VIRTUAL,
    "uneven": UNEVEN,
    "TP2EP2": TENSOR_EXPERTS,
}
KEPT = {  # in `make test`: every parallelism, and every kind of optimizer
    ("DP1_to_DP2", "adam_distributed"),
    ("VPP2_to_TP2", "adam_distributed"),
    ("PP2_to_uneven", "adam_distributed"),
    ("TP2EP2_to_EP2PP2", "adam_distributed"),
    ("ETP2_to_EP2", "adam_distributed"),
    ("DP2_to_DP1", "adam_on_host"),
    ("EP2_to_EP1", "adam"),
    ("EP2_to_EP1", "sgd"),
}
OTHER_KINDS = [("adam", "adam_distributed"), ("adam_distributed", "adam")]


@pytest.fixture(scope="module")
def expected(on: On) -> dict[str, dict[str, Any]]:
    """The results of uninterrupted training on one rank, for each kind of optimizer."""
    return {kind: on(ONE, cases.never_stop, kind)[0] for kind in cases.KINDS}


@pytest.mark.parametrize(("pair", "kind"), tiered(GOING_ON, KEPT))
def test_training_continues_under_another_layout(
    pair: str, kind: str, expected: dict[str, Any], on: On, tmp_path: Path
) -> None:
    saved, resumed = PAIRS[pair]
    directories = [str(tmp_path / name) for name in ("saved", "again")]
    on(saved, cases.begin, saved, kind, directories[0])
    check(on(resumed, cases.continue_training, resumed, kind, *directories, expected[kind]))
    assert on(ONE, cases.equal_contents, directories) == [True]


@pytest.mark.parametrize(("saved", "resumed"), OTHER_KINDS)
def test_training_continues_with_the_optimizer_sharded_or_not(
    saved: str, resumed: str, expected: dict[str, Any], on: On, tmp_path: Path
) -> None:
    directories = [str(tmp_path / name) for name in ("saved", "again")]
    on(EXPERTS, cases.begin, EXPERTS, saved, directories[0])
    check(on(DATA, cases.continue_training, DATA, resumed, *directories, expected[resumed]))
    assert on(ONE, cases.equal_contents, directories) == [True]


def test_training_continues_from_a_checkpoint_of_megatron_core_before_019(
    expected: dict[str, Any], on: On, tmp_path: Path
) -> None:
    kind, directories = "adam_distributed", [str(tmp_path / name) for name in ("saved", "again")]
    on(DATA, cases.begin, DATA, kind, directories[0])
    checkpoint = tmp_path / "saved" / "step_3"
    on(ONE, hostile_cases.in_the_form_before_019, ONE, str(checkpoint))
    assert (checkpoint / "common.pt").exists()
    check(on(DATA, cases.continue_training, DATA, kind, *directories, expected[kind]))
    assert not (tmp_path / "again" / "step_3" / "common.pt").exists()


def check(found: list[dict[str, float]]) -> None:
    for rank in found:
        assert rank["rate"] == 0.0
        assert rank["losses"] < 1e-5
        assert rank["weights"] < 1e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param("1 rank", kind, marks=pytest.mark.one_device) for kind in cases.KINDS]
    + tiered(product(SAME, cases.KINDS), {("VPP2", "adam_distributed"), ("TP2EP2", "adam")}),
)
def test_training_resumes_bit_for_bit(name: str, kind: str, on: On, tmp_path: Path) -> None:
    layout = SAME.get(name, ONE)
    assert all(on(layout, cases.resumes_bit_for_bit, layout, kind, str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "kind"),
    tiered(product(("DP2", "EP2"), cases.KINDS), {("EP2", "adam_distributed"), ("DP2", "sgd")}),
)
def test_an_asynchronous_save_holds_the_state_of_its_start(
    name: str, kind: str, on: On, tmp_path: Path
) -> None:
    layout = SAME[name]
    for found in on(layout, cases.training_does_not_leak, layout, kind, str(tmp_path)):
        assert found == dict.fromkeys(found, True)


def test_the_newest_and_the_best_are_kept_and_leftovers_removed(on: On, tmp_path: Path) -> None:
    (tmp_path / "tmp_step_9").mkdir()
    (tmp_path / "step_8").mkdir()  # no checksums: somebody stopped a copy of it
    scores = {2: 0.1, 4: 0.9, 6: 0.3, 10: 0.2}
    assert on(SPREAD, cases.retain, str(tmp_path), scores, 1, 1) == [["step_4", "step_10"]] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"step_4", "step_8", "step_10"}


@pytest.mark.parametrize("full", [0, 1])
def test_a_failed_write_fails_every_rank_and_leaves_nothing(
    full: int, on: On, tmp_path: Path
) -> None:
    found = on(SPREAD, cases.save_on_a_full_disk, str(tmp_path), full)
    assert found[0] == found[1]
    message, left = found[0]
    assert message.startswith(f"cannot write {tmp_path / 'tmp_step_2'} (")
    assert not left
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_sees_no_metadata_fails_every_rank(blind: int, on: On, tmp_path: Path) -> None:
    first, second = on(SPREAD, cases.load_what_one_rank_does_not_see, str(tmp_path), blind)
    assert first == second
    assert first.startswith(f"cannot read {tmp_path / 'step_1'}: ")
    assert "metadata" in first


def test_a_rank_killed_while_writing_leaves_no_named_checkpoint(on: On, tmp_path: Path) -> None:
    doomed = Ranks(SPREAD)
    with pytest.raises(AssertionError, match="by peer"):
        doomed(cases.die_while_writing, str(tmp_path), 1)
    doomed.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "tmp_step_2"]
    assert on(SPREAD, cases.load_weights, str(tmp_path / "step_1")) == ["", ""]


def test_no_module_of_megatron_is_imported_too_late_to_see_no_cuda(on: On, tmp_path: Path) -> None:
    assert on(SPREAD, cases.modules_with_the_real_torch, str(tmp_path)) == [[], []]


DAMAGES = ["flip", "truncate", "remove", "no_checksums", "half_checksums"]


def damage(checkpoint: Path, how: str) -> Path:
    """Damage a checkpoint as disks and people do; return the file."""
    victim = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if "checksums" in how:
        victim = checkpoint / "checksums.json"
    content = bytearray(victim.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how in ("remove", "no_checksums"):
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2])
    return victim


@pytest.mark.parametrize("how", tiered(DAMAGES, {"flip", "no_checksums"}))
def test_a_stage_resumes_from_the_checkpoint_before_a_damaged_one(
    how: str, on: On, tmp_path: Path
) -> None:
    on(SPREAD, cases.loop_and_listen, str(tmp_path))
    checkpoints = tmp_path / "checkpoints"
    victim = damage(checkpoints / "step_5", how)
    main, other = on(SPREAD, cases.loop_and_listen, str(tmp_path))
    assert main[:2] == other[:2] == ("done", ["step_4", "step_5"])
    assert main[2].startswith(f"{NOTICE_MARK}damaged checkpoint: {victim} ")
    assert "put aside as damaged_step_5; toy continues from step_4\n" in main[2]
    assert other[2] == ""
    assert (checkpoints / "damaged_step_5").is_dir()


def test_a_stage_with_no_whole_checkpoint_starts_again(on: On, tmp_path: Path) -> None:
    on(SPREAD, cases.loop_and_listen, str(tmp_path))
    damage(tmp_path / "checkpoints" / "step_5", "flip")
    damage(tmp_path / "checkpoints" / "step_4", "remove")
    (ending, left, heard), _ = on(SPREAD, cases.loop_and_listen, str(tmp_path))
    assert (ending, left) == ("done", ["step_4", "step_5"])
    assert "damaged_step_5; damaged checkpoint:" in heard
    assert "continues from the beginning" in heard


@pytest.mark.parametrize("how", DAMAGES)
def test_another_stages_damaged_checkpoint_is_an_error(how: str, on: On, tmp_path: Path) -> None:
    on(SPREAD, cases.begin, SPREAD, "sgd", str(tmp_path))
    victim = damage(tmp_path / "step_3", how)
    for message in on(SPREAD, cases.load_weights, str(tmp_path / "step_3")):
        assert message.startswith(f"damaged checkpoint: {victim} ")
        assert f"remove {tmp_path / 'step_3'} and resume the run" in message


@pytest.mark.parametrize("name", ["checksums.json", ".metadata"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(name: str, on: On, tmp_path: Path) -> None:
    on(SPREAD, cases.begin, SPREAD, "sgd", str(tmp_path))
    checkpoint = tmp_path / "step_3"
    victim = checkpoint / name
    victim.unlink()
    victim.symlink_to(victim)  # which nobody can open, root neither
    why = os.strerror(errno.ELOOP)
    [message] = {*on(SPREAD, cases.find_newest, str(tmp_path))}
    assert message.startswith(f"{victim}: cannot be read ({why}); make it readable, or ")
    assert checkpoint.is_dir()
