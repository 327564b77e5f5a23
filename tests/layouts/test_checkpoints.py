"""Checkpoints continue bit for bit, are whole or not there, and are refused when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import ADAM, SGD, SPREAD, load, resume, save
from conftest import On

from parallel.settings import OptimizerSettings


@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
def test_training_resumes_bit_for_bit(optimizer: OptimizerSettings, on: On, tmp_path: Path) -> None:
    assert on(SPREAD, resume, SPREAD, str(tmp_path), optimizer) == [True, True]


def test_only_the_newest_are_kept_and_unfinished_ones_are_not_seen(on: On, tmp_path: Path) -> None:
    (tmp_path / "tmp_step_9").mkdir()
    (tmp_path / "step_8").mkdir()  # no checksums: somebody stopped a copy of it
    names = on(SPREAD, save, SPREAD, str(tmp_path), [2, 4, 10], 2)
    assert names == [["step_4", "step_10"]] * 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named(damage: str, on: On, tmp_path: Path) -> None:
    on(SPREAD, save, SPREAD, str(tmp_path), [1], 1)
    victim = max((tmp_path / "step_1").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content if damage == "flip" else content[:-1])
    for message in on(SPREAD, load, SPREAD, str(tmp_path / "step_1")):
        assert str(victim) in message
        assert "damaged checkpoint" in message
