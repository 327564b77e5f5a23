"""Models that leave the device between all passes train, save and resume with equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import offload_cases as cases
from tests.layouts.cases import MATRIX
from tests.ranks import On
from tests.tiers import tiered

STATE = ["optimizer", "weights"]


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    tiered(
        [
            (name, kind, precision)
            for name in ("1 rank", "DP2", "TP2", "TP2 EP2 PP2", "CP2 EP2 VPP2")
            for kind in ("adam_distributed", "adam", "sgd")
            for precision in ("fp32", "bf16")
        ],
        {
            ("1 rank", "adam", "fp32"),
            ("1 rank", "sgd", "bf16"),
            ("DP2", "adam_distributed", "bf16"),
            ("TP2 EP2 PP2", "adam_distributed", "fp32"),
            ("TP2 EP2 PP2", "adam", "bf16"),
        },
    ),
)
def test_training_with_offload_gives_equal_bits(
    name: str, kind: str, precision: str, on: On
) -> None:
    """The storages are really empty while a part is away, and whole again for the update."""
    for found in on(MATRIX[name], cases.trains_equally, MATRIX[name], kind, precision):
        assert found["measured"]
        assert found["state"]
        assert found["seconds"] > 0
        whole = found["whole"]
        assert min(whole["weights"], whole["gradients"]) > 0
        # Plain Adam and SGD of an fp32 weight have state besides the weight too.
        assert whole["optimizer"] > 0
        nothing = {"weights": 0, "gradients": 0, "optimizer": 0}
        assert found["between"] == [
            nothing,
            {**nothing, "weights": whole["weights"]},
            {**nothing, "weights": whole["weights"], "optimizer": whole["optimizer"]},
        ]


@pytest.mark.parametrize("kind", tiered(["adam_distributed", "adam"], ["adam_distributed"]))
def test_a_checkpoint_saved_while_all_models_are_away_resumes_equally(
    kind: str, on: On, tmp_path: Path
) -> None:
    layout = MATRIX["TP2"] if kind == "adam" else MATRIX["DP2"]
    for found in on(layout, cases.resumes_equally, layout, kind, str(tmp_path)):
        assert found == {"files": True, "continued": True, "late": True}


def test_models_take_turns(on: On) -> None:
    """No frozen model stays beside an update, and gradients stay beside no other pass."""
    layout = MATRIX["1 rank"]
    [found] = on(layout, cases.takes_turns, layout)
    assert found["equal"]
    everything = ["gradients", "optimizer", "weights"]
    assert found["log"] == {
        "start": {},
        "update": {"policy": everything},
        "reference": {"policy": STATE, "one": ["weights"]},
        "next reference": {"policy": STATE, "other": ["weights"]},
        "values": {"policy": STATE, "critic": ["weights"]},
        "critic's update": {"critic": everything},
        "refit": {"policy": ["weights"]},
        "rollout": {},
    }


def test_a_step_without_its_gradients_is_refused(on: On) -> None:
    layout = MATRIX["1 rank"]
    [error] = on(layout, cases.loses_gradients, layout)
    assert "gradients left the device" in error


def test_weights_written_to_a_frozen_model_are_kept(on: On) -> None:
    layout = MATRIX["1 rank"]
    assert on(layout, cases.keeps_written_weights, layout) == [True]
