"""The description of the weights agrees with megatron-core's models and with mbridge."""

from __future__ import annotations

import pytest

from parallel.settings import LayoutSettings
from tests.layouts.hugging_face_cases import FAMILIES, MODELS
from tests.layouts.weight_cases import errors_of_pieces, errors_of_stream, write_with_bridge
from tests.ranks import On
from tests.tiers import tiered

MATRIX = {
    "1 rank": {},
    "TP2": {"ranks": 2, "tensor": 2},
    "EP2": {"ranks": 2, "expert": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "PP2 uneven": {"ranks": 2, "pipeline": 2, "first_stage_layers": 1},
    "ETP2": {"ranks": 2, "expert_tensor": 2},
    "TP2 EP2 PP2": {"ranks": 4, "tensor": 2, "expert": 2, "pipeline": 2},
    "TP2 EP2 ETP2": {"ranks": 4, "tensor": 2, "expert": 2, "expert_tensor": 2},
    "CP2 EP2 VPP2": {"ranks": 4, "context": 2, "expert": 2, "pipeline": 2, "virtual_pipeline": 2},
    "DP2 TP2 EP2 PP2": {"ranks": 8, "tensor": 2, "expert": 2, "pipeline": 2},
}
BRIDGED = [model for model in MODELS if model != "gpt_oss"]  # mbridge 0.15.1 knows these alone
KEPT = ("PP2 uneven", "TP2 EP2 PP2", "TP2 EP2 ETP2", "CP2 EP2 VPP2")  # in `make test`
ONE_DEVICE = [pytest.param("1 rank", marks=pytest.mark.one_device)]


@pytest.fixture(scope="session")
def converted(on: On, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the models' random weights as converted by mbridge."""
    files = {model: str(tmp_path_factory.mktemp("converted") / model) for model in BRIDGED}
    for model, file in files.items():
        on(LayoutSettings(), write_with_bridge, model, file)
    return files


@pytest.mark.parametrize("name", [*ONE_DEVICE, *tiered(list(MATRIX)[1:], KEPT)])
def test_ranks_hold_and_stream_what_the_arithmetic_says(
    name: str, on: On, converted: dict[str, str]
) -> None:
    """Pieces cover every element of a rank's state_dict once, with mbridge's value."""
    layout = LayoutSettings(**MATRIX[name])
    for model in [each for each in BRIDGED if layout.ranks == 1 or each in FAMILIES]:
        for faults in on(layout, errors_of_pieces, layout, model, converted[model]):
            assert not faults, model
        for faults in on(layout, errors_of_stream, layout, model, converted[model]):
            assert not faults, model
