"""Recomputed modules and overlapped sums of gradients change no gradient."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.layout_rules import layout_violations
from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL
from tests.layouts.hugging_face_cases import FAMILIES
from tests.layouts.recompute_cases import difference, overlap_difference, passes
from tests.ranks import On

WITH_DENSE_LAYERS = ("mlp", "shared_experts")


def recomputed(plain: LayoutSettings, *modules: str) -> LayoutSettings:
    return plain.model_copy(update={"recompute": "selective", "recompute_modules": modules})


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3_moe", ("moe",)),
        ("deepseek_v3", WITH_DENSE_LAYERS),
        ("glm4_moe", ("moe", "mlp")),
        ("qwen3_5_moe_text", ("moe",)),
        ("gpt_oss", ("moe",)),
    ],
)
def test_recomputed_modules_change_no_bit_of_a_gradient(
    family: str, modules: tuple[str, ...], on: On
) -> None:
    """With both routing losses, which a recomputed router must not count twice."""
    plain = LayoutSettings(ranks=2, tensor=2, distributed_optimizer=False)
    layout = recomputed(plain, *modules)
    assert not layout_violations(FAMILIES[family], layout)
    assert on(layout, difference, layout, plain, FAMILIES[family]) == [0.0, 0.0]


@pytest.mark.parametrize("what", ["attention", "full"])
def test_recomputed_layers_with_delta_nets_change_no_bit_of_a_gradient(what: str, on: On) -> None:
    """Delta nets recompute their states anyway, here within a layer that is computed again."""
    plain = LayoutSettings(ranks=2, tensor=2, distributed_optimizer=False)
    layout = plain.model_copy(update={"recompute": what})
    model = FAMILIES["qwen3_5_moe_text"]
    assert on(layout, difference, layout, plain, model) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("modules", "dense", "experts", "shared"),
    [((), 1, 3, 3), (("moe",), 1, 6, 6), (("mlp",), 2, 3, 3), (WITH_DENSE_LAYERS, 2, 3, 6)],
)
def test_the_backward_pass_computes_named_modules_again(
    modules: tuple[str, ...], dense: int, experts: int, shared: int, on: On
) -> None:
    """The model has one dense layer, and three with experts."""
    plain = LayoutSettings()
    layout = recomputed(plain, *modules) if modules else plain
    [found] = on(plain, passes, layout, FAMILIES["deepseek_v3"])
    assert found == {"dense": dense, "experts": experts, "shared_experts": shared}


@pytest.mark.parametrize(
    "layout",
    [
        LayoutSettings(ranks=2),
        LayoutSettings(ranks=4, pipeline=2, virtual_pipeline=2),
    ],
    ids=["DP2", "DP2 VPP2"],
)
def test_overlapped_sums_of_gradients_are_equal(layout: LayoutSettings, on: On) -> None:
    """On a GPU they are on; here they are summed while the CPU computes."""
    for gradient, weight in on(layout, overlap_difference, layout):
        assert gradient < 1e-6
        assert weight < 1e-6


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "qwen3_moe",
            {"recompute": "full", "recompute_modules": ("moe",)},
            "requires layout.recompute: selective, not full",
        ),
        (
            "qwen3_moe",
            {"recompute": "selective"},
            "must name modules with layout.recompute: selective; any of layernorm, mla_up_proj, "
            "mlp, moe, moe_act, shared_experts",
        ),
        (
            "qwen3_moe",
            {"recompute": "selective", "recompute_modules": ("moe", "moe")},
            "moe named twice",
        ),
        (
            "glm4_moe",
            {"recompute": "selective", "recompute_modules": ("mla_up_proj",)},
            "mla_up_proj is of deepseek_v3 or glm4_moe_lite's attention, not of glm4_moe's",
        ),
        (
            "qwen3_moe",
            {"recompute": "selective", "recompute_modules": ("shared_experts",)},
            "shared_experts: qwen3_moe has no shared experts; use moe",
        ),
        (
            "deepseek_v3",
            {"recompute": "selective", "recompute_modules": ("moe", "moe_act")},
            "moe recomputes moe_act already; name one of them",
        ),
    ],
)
def test_modules_that_do_not_fit_are_named(
    family: str, changes: dict[str, Any], message: str
) -> None:
    found = layout_violations(FAMILIES[family], LayoutSettings(**changes))
    assert found == [("layout.recompute_modules", message)]


def test_deep_ep_needs_experts_to_exchange() -> None:
    message = "flex requires layout.expert or layout.expert_tensor of 2 or more; use auto"
    found = layout_violations(MODEL, LayoutSettings(dispatcher="flex"))
    assert found == [("layout.dispatcher", message)]
