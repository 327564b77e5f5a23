"""A real engine and a policy in bf16: training passes the bounds, and wrong weights do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.mismatch import bounds_of, mismatch_bounds
from parallel.settings import LayoutSettings
from tests.engine import bf16_cases
from tests.engine.engine_process import EngineOf
from tests.engine.engine_settings import ENGINE, MODELS
from tests.ranks import On

LAYOUT = LayoutSettings()


@pytest.mark.parametrize(
    ("name", "mode"), [("bf16", "sync"), ("bf16", "async"), ("qwen3_5_moe_text", "sync")]
)
def test_an_expert_in_bf16_trains_on_a_real_engines_samples(
    on: On, engine_of: EngineOf, tmp_path: Path, name: str, mode: str
) -> None:
    """In `async` the bounds apply to probes of 256 tokens."""
    address = engine_of(name).address
    described = MODELS[name].model_dump_json(), ENGINE.model_dump_json()
    [steps] = on(LAYOUT, bf16_cases.trained_steps, tmp_path, address, *described, mode)
    # The maximum would have stopped a run in fp32.
    assert all(metrics["mismatch_max"] > mismatch_bounds("fp32").largest for metrics in steps)
    assert all(metrics["gradient_norm"] > 0 for metrics in steps)


def test_an_fp32_head_on_both_sides_lowers_the_mismatch(on: On, engine_of: EngineOf) -> None:
    """By 15 % on the tiny model, and by 30 % with a vocabulary of 8,192."""
    means = []
    for name in ("bf16", "bf16_head"):
        described = [each.model_dump_json() for each in (MODELS[name], LAYOUT, ENGINE)]
        means += on(LAYOUT, bf16_cases.sharp_mismatch, engine_of(name).address, *described)
    rounded, precise = means
    assert precise < 0.95 * rounded


@pytest.mark.parametrize("name", ["bf16", "qwen3_5_moe_text"])
@pytest.mark.parametrize("change", bf16_cases.CHANGES)
def test_only_wrong_weights_exceed_the_bounds_of_bf16(
    on: On, engine_of: EngineOf, change: str, name: str
) -> None:
    model, address = MODELS[name], engine_of(name).address
    described = [each.model_dump_json() for each in (model, LAYOUT, ENGINE)]
    [found] = on(LAYOUT, bf16_cases.mismatches, address, *described, change)
    exceeded = bounds_of(model, ENGINE).exceeded(found, found["tokens"])
    print(change, found, exceeded)
    assert bool(exceeded) == (change != "right")
    if change == "right":
        assert found["router_agreement"] > 0.95
