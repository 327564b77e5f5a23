"""The layers of every model chunk: equal to megatron-core's, and the rules of their numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from parallel.layout_rules import chunk_layers, layout_violations
from parallel.settings import MOST, LayoutSettings, ModelSettings


def model(layers: int) -> ModelSettings:
    return ModelSettings(
        vocabulary_size=80,
        hidden_size=16,
        layers=layers,
        attention_heads=4,
        key_value_heads=2,
        head_dim=4,
        experts=4,
        experts_per_token=2,
        expert_hidden_size=16,
    )


def megatron_layers(layers: int, layout: LayoutSettings) -> list[range]:
    """Return the layers of every chunk as megatron-core numbers them."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from parallel.cpu.megatron import activate
    from parallel.model.bridge import uneven_pipeline

    activate()
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=4,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        pipeline_dtype=torch.float32,
        **uneven_pipeline(layout),
    )
    found = []
    for part, rank in product(range(layout.virtual_pipeline), range(layout.pipeline)):
        stage = part if layout.virtual_pipeline > 1 else None
        start = get_transformer_layer_offset(config, stage, rank)
        found.append(range(start, start + get_num_layers_to_build(config, stage, rank)))
    return found


def every_layout(layers: int) -> list[LayoutSettings]:
    """Return all legal pipelines of up to 5 stages of up to 3 chunks."""
    sizes = [None, *range(1, layers)]
    found = [
        LayoutSettings(
            ranks=pipeline,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            first_stage_layers=first,
            last_stage_layers=last,
        )
        for pipeline, virtual, first, last in product(range(1, 6), range(1, 4), sizes, sizes)
    ]
    return [layout for layout in found if not layout_violations(model(layers), layout)]


@pytest.mark.parametrize("layers", [1, 5, 12])
def test_chunks_hold_the_layers_that_megatron_builds(layers: int) -> None:
    legal = every_layout(layers)
    assert len(legal) == {1: 1, 5: 31, 12: 212}[layers]
    for layout in legal:
        found = list(chunk_layers(model(layers), layout))
        assert found == megatron_layers(layers, layout), layout
        assert [layer for chunk in found for layer in chunk] == list(range(layers)), layout


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        (
            61,
            {"pipeline": 4},
            "layout.pipeline: 4 does not divide model.layers = 61; use one of [1, 61], or "
            "layout.first_stage_layers: 16, which leaves 45 = 3 x 15",
        ),
        (
            46,
            {"pipeline": 4},
            "layout.pipeline: 4 does not divide model.layers = 46; use one of [1, 2, 23, 46], or "
            "layout.first_stage_layers: 10, which leaves 36 = 3 x 12",
        ),
        (
            94,
            {"pipeline": 4, "virtual_pipeline": 2},
            "layout.virtual_pipeline: pipeline 4 x virtual_pipeline 2 does not divide "
            "model.layers = 94; use layout.first_stage_layers: 22, which leaves 72 = 3 x 24",
        ),
        (
            5,
            {"pipeline": 2, "virtual_pipeline": 2},
            "layout.virtual_pipeline: pipeline 2 x virtual_pipeline 2 does not divide "
            "model.layers = 5; change layout.pipeline",
        ),
        (
            6,
            {"pipeline": 2, "virtual_pipeline": 2},
            "layout.virtual_pipeline: pipeline 2 x virtual_pipeline 2 does not divide "
            "model.layers = 6; use one of [1, 3], or layout.first_stage_layers: 2, which leaves 4 "
            "= 1 x 4",
        ),
        (
            61,
            {"pipeline": 4, "first_stage_layers": 30},
            "layout.first_stage_layers: first_stage_layers 30 leaves 31 of model.layers = 61 for "
            "3 stages; use one of [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 37, 40, 43, 46, "
            "49, 52, 55, 58]",
        ),
        (
            6,
            {"pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 3},
            "layout.last_stage_layers: last_stage_layers 3 leaves 3 of model.layers = 6 for 1 "
            "stage, each in 2 chunks of equal size; use one of [2, 4]",
        ),
        (
            4,
            {"pipeline": 2, "first_stage_layers": 5},
            "layout.first_stage_layers: first_stage_layers 5 is more than model.layers = 4; use "
            "one of [1, 2, 3]",
        ),
        (
            5,
            {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 1},
            "layout.first_stage_layers: first_stage_layers 3 + last_stage_layers 1 leaves 1 of "
            "model.layers = 5 for 0 stages; use one of [4]",
        ),
        (
            61,
            {
                "pipeline": 16,
                "virtual_pipeline": 2,
                "first_stage_layers": 2,
                "last_stage_layers": 3,
            },
            "layout.first_stage_layers: first_stage_layers 2 + last_stage_layers 3 leaves 56 of "
            "model.layers = 61 for 14 stages, each in 2 chunks of equal size; change "
            "layout.pipeline",
        ),
        (
            6,
            {"last_stage_layers": 3},
            "layout.last_stage_layers: requires layout.pipeline of 2 or more",
        ),
    ],
)
def test_a_pipeline_that_does_not_fit_names_one_that_does(
    layers: int, changes: dict[str, Any], message: str
) -> None:
    layout = LayoutSettings(ranks=changes.get("pipeline", 1), **changes)
    assert [": ".join(each) for each in layout_violations(model(layers), layout)] == [message]


@pytest.mark.parametrize(
    ("layers", "changes", "sizes"),
    [
        (61, {"pipeline": 4, "first_stage_layers": 16}, [16, 15, 15, 15]),
        (46, {"pipeline": 4, "first_stage_layers": 11, "last_stage_layers": 11}, [11, 12, 12, 11]),
        (94, {"pipeline": 2}, [47, 47]),
        (
            94,
            {"pipeline": 4, "virtual_pipeline": 2, "first_stage_layers": 22},
            [11, 12, 12, 12, 11, 12, 12, 12],
        ),
    ],
)
def test_layers_of_real_models(layers: int, changes: dict[str, Any], sizes: list[int]) -> None:
    layout = LayoutSettings(ranks=changes["pipeline"], **changes)
    assert not layout_violations(model(layers), layout)
    assert [len(chunk) for chunk in chunk_layers(model(layers), layout)] == sizes


def test_a_mistyped_number_of_stages_lists_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a million stages for each of 2000 sizes would take minutes."""

    def listed(*_: object) -> list[int]:
        raise AssertionError("the stages were listed")

    monkeypatch.setattr("parallel.layout_rules._stage_layers", listed)
    found = layout_violations(model(2000), LayoutSettings(ranks=MOST, pipeline=MOST))
    divisors = "1, 2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 80, 100, 125, 200, 250, 400, 500, 1000, 2000"
    message = f"1000000 does not divide model.layers = 2000; use one of [{divisors}]"
    assert found == [("layout.pipeline", message)]
