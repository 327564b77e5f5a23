"""Preference optimisation under several layouts, and the reference's log-probabilities on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.layouts.cases import MATRIX
from tests.layouts.dpo_cases import cached, save_models, steps
from tests.ranks import On

WORDS = ("one", "two", "three", "four", "five", "six", "seven")


@pytest.fixture(scope="module")
def data(on: On, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two models and of pairs of many lengths, some of them too long."""
    directory = tmp_path_factory.mktemp("dpo")
    rows = [
        {
            "prompt": f"write {WORDS[number % 7]} {number}:",
            "chosen": " ".join(WORDS[: number % 4 + 1]),
            "rejected": " ".join(WORDS[number % 5 :][:2])
            + " no"
            + " please" * 9 * (number % 4 == 3),
        }
        for number in range(30)
    ]
    lines = [json.dumps(row) for row in rows]
    (directory / "pairs.jsonl").write_text("\n".join(lines[:24]))
    (directory / "more.jsonl").write_text("\n".join(lines[24:]))
    on(MATRIX["1 rank"], save_models, str(directory))
    return directory


@pytest.fixture(scope="module")
def one_process(on: On, data: Path) -> list[dict[str, float]]:
    """One process's metrics of each step, in one micro-batch; it writes DATA/gradients.pt."""
    one = MATRIX["1 rank"]
    arguments = str(data), str(data / "1"), one, 4096, str(data / "gradients.pt")
    [(metrics, _, micro_batches)] = on(one, steps, *arguments)
    assert micro_batches == 1
    assert metrics[0]["too_long"] + metrics[1]["too_long"] > 0
    assert metrics[0]["gradient_norm"] > 0.01
    return metrics


@pytest.mark.parametrize("name", ["TP2", "PP2", "EP2", "CP2"])
def test_loss_and_gradients_are_equal_under_every_layout(
    name: str, on: On, data: Path, one_process: list[dict[str, float]], tmp_path: Path
) -> None:
    layout, expected = MATRIX[name], str(data / "gradients.pt")
    found = on(layout, steps, str(data), str(tmp_path / "n"), layout, 64, expected)
    for metrics, (error, worst), many in found:
        assert many > 2
        assert error < 1e-5, worst
        for here, there in zip(metrics, one_process, strict=True):
            assert here.keys() == there.keys()
            for key in here.keys() - {"token_efficiency"}:
                assert here[key] == pytest.approx(there[key], rel=1e-4, abs=1e-6), key


def test_the_reference_is_computed_once_and_freed(on: On, data: Path, tmp_path: Path) -> None:
    [found] = on(MATRIX["1 rank"], cached, str(data), str(tmp_path))
    pairs = len(found["first"][2])
    computed, sequences, values, models = found["first"]
    assert computed
    assert pairs < sequences / 2 < 30  # of both sources, without those held out or too long
    assert models == 1  # the policy alone is left
    assert found["resumed"] == (False, 0, values, 1)
    other = found["other"]
    assert other[:2] == (True, sequences)
    assert other[2] != values
    assert found["again"] == (False, 0, other[2], 1)
    for damaged in ("cut", "turned"):
        assert found[damaged] == (True, sequences, other[2], 1)
    assert ["another reference" in each or "damaged" in each for each in found["notices"]] == 3 * [
        True
    ]
    assert found["left"] == ["reference.npz"]
    ahead, resumed, drawn = found["draws"]
    assert ahead == resumed != drawn
