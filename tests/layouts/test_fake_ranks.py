"""Policies of real sizes, built with TransformerEngine as any rank of any layout, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from parallel.estimates.memory import training_memory
from parallel.layout_rules import layout_violations
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings
from parallel.weights.planner import EngineSizes, Plan
from pipeline.config.validate import load
from tests.layouts.hugging_face_cases import FAMILIES
from tests.layouts.real_models import DEEPSEEK_V3, GLM_AIR, QWEN3_30B
from tests.runs import REPOSITORY
from tests.te_python import te_environment
from tests.tiers import tiered

Ask = Callable[..., Any]
CASES: dict[str, tuple[ModelSettings, LayoutSettings, list[int]]] = {
    "Qwen3-30B-A3B on 8": (QWEN3_30B, LayoutSettings(ranks=8, tensor=4, expert=8), [0, 7]),
    "Qwen3-30B-A3B on 64": (
        QWEN3_30B,
        LayoutSettings(ranks=64, tensor=4, pipeline=2, expert=8, virtual_pipeline=2),
        [0, 37, 63],
    ),
    "GLM-4.5-Air on 64": (
        GLM_AIR,
        LayoutSettings(
            ranks=64,
            tensor=4,
            pipeline=4,
            expert=16,
            first_stage_layers=11,
            last_stage_layers=11,
        ),
        [0, 22, 63],
    ),
    "DeepSeek-V3 on 512": (
        DEEPSEEK_V3,
        LayoutSettings(
            ranks=512,
            tensor=8,
            pipeline=8,
            expert=64,
            first_stage_layers=5,
            recompute="selective",
            recompute_modules=("layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts"),
        ),
        [0, 255, 511],
    ),
    "DeepSeek-V3 on 16 stages": (
        DEEPSEEK_V3,
        LayoutSettings(ranks=512, tensor=8, pipeline=16, expert=32, first_stage_layers=1),
        [0, 31, 32, 511],
    ),
    "DeepSeek-V3 on 256": (
        DEEPSEEK_V3,
        LayoutSettings(ranks=256, tensor=8, expert=256),
        [0, 255],
    ),
}
# The layouts of configs/runs, by their files.
SHIPPED = {
    path.stem: load(path, to_start=False)
    for path in sorted((REPOSITORY / "configs" / "runs").glob("[a-z]*.yaml"))
}
KEPT = ("Qwen3-30B-A3B on 8", "GLM-4.5-Air on 64", "DeepSeek-V3 on 512")  # in `make test`


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """`ask(question, **arguments)`: an answer of `tests.layouts.fake_ranks`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.layouts.fake_ranks"],
        env=te_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout

    def answer(question: str, **arguments: Any) -> Any:
        assert process.stdin and process.stdout
        print(json.dumps({"ask": question, **arguments}), file=process.stdin, flush=True)
        found = json.loads(process.stdout.readline())
        assert "error" not in found, found["error"]
        return found["found"]

    yield answer
    process.stdin.close()
    process.wait()


def settings(block: ModelSettings | LayoutSettings) -> Any:
    return block.model_dump(mode="json")


@pytest.mark.parametrize("case", tiered(CASES, KEPT))
def test_a_rank_holds_what_the_plan_and_the_memory_model_say(case: str, ask: Ask) -> None:
    check_ranks(*CASES[case], ask)


@pytest.mark.parametrize("run", tiered(SHIPPED, {"mixtral-8x7b-32", "deepseek-v3"}))
def test_a_rank_of_a_shipped_run_is_built(run: str, ask: Ask) -> None:
    """The first rank, one in the middle and the last."""
    model, layout = SHIPPED[run].model, SHIPPED[run].layout
    check_ranks(model, layout, [0, layout.ranks // 2 + 1, layout.ranks - 1], ask)


def check_ranks(model: ModelSettings, layout: LayoutSettings, ranks: list[int], ask: Ask) -> None:
    """Compare what ranks hold with the memory model."""
    assert not layout_violations(model, layout)
    planned = training_memory(model, layout, OptimizerSettings(learning_rate=1e-3), 1024)
    found = ask("ranks", model=settings(model), layout=settings(layout), numbers=ranks)
    for rank, held in zip(ranks, found, strict=True):
        assert not held["errors"], rank
        assert "TEDotProductAttention" in held["modules"]
        expected = planned[rank * layout.pipeline // layout.ranks]
        # Buckets of gpt-oss, whose biases are no multiples of 128 elements, are padded by 1 KiB.
        assert held["bytes"]["parameters"] == pytest.approx(expected.parameters, rel=2e-7), rank
        assert held["bytes"]["gradients"] == pytest.approx(expected.gradients, rel=2e-7), rank
        # The last ranks that share a buffer hold its padding.
        assert held["bytes"]["optimizer"] == pytest.approx(expected.optimizer, rel=0.02), rank


def test_a_precision_aware_optimizer_keeps_8_bytes_per_parameter(ask: Ask) -> None:
    """TransformerEngine's own Adam: an fp32 master and two moments in bf16, instead of 12 bytes."""
    model, layout, _ = CASES["GLM-4.5-Air on 64"]
    block = {"model": settings(model), "layout": settings(layout), "numbers": [63]}
    [plain], [aware] = ask("ranks", **block), ask("ranks", **block, precision_aware=True)
    assert aware["bytes"]["optimizer"] * 12 == plain["bytes"]["optimizer"] * 8
    assert aware["bytes"]["gradients"] == plain["bytes"]["gradients"]


@pytest.mark.parametrize(("saved", "loaded"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (1.0, 0.5)])
def test_a_checkpoint_keeps_moments_in_bf16_exactly(
    saved: float, loaded: float, ask: Ask, tmp_path: Path
) -> None:
    """TransformerEngine's own Adam, with shares of its state in host memory.

    Its masters follow weights that are loaded, and loading leaves every tensor where it is.
    """
    model = FAMILIES["qwen3_moe"].model_copy(update={"precision": "bf16"})
    shares = {"saved": saved, "loaded": loaded}
    found = ask("bf16_moments_round_trip", model=settings(model), directory=str(tmp_path), **shares)
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), "torch.bfloat16")
    assert found["dtypes"] == {**moments, "master_param": "torch.float32"}
    assert found["different"] == []
    assert found["steps"] == [3]
    assert found["master_difference"] == 0.0
    assert loaded <= found["on_host"] <= (0.8 if loaded == 0.5 else loaded)


@pytest.mark.parametrize("family", tiered(FAMILIES, {"qwen3_moe", "deepseek_v3"}))
def test_the_ranks_write_every_element_of_a_checkpoint_once(family: str, ask: Ask) -> None:
    """With names and shapes that all ranks agree on, in an uneven pipeline."""
    layout = LayoutSettings(ranks=8, tensor=2, pipeline=2, expert=2, first_stage_layers=3)
    model = FAMILIES[family].model_copy(update={"precision": "bf16"})
    found = ask("ranks", model=settings(model), layout=settings(layout), numbers=list(range(8)))
    shapes: dict[str, list[int]] = {}
    written: dict[str, int] = {}
    boxes = set()
    for held in found:
        assert not held["errors"]
        for name, whole, offset, shape, first in held["shards"]:
            assert shapes.setdefault(name, whole) == whole
            if first:
                assert (name, *offset) not in boxes
                boxes.add((name, *offset))
                written[name] = written.get(name, 0) + prod(shape)
    assert written == {name: prod(shape) for name, shape in shapes.items()}
    assert {kind for held in found for kind in held["modules"]} >= {"TEGroupedMLP", "Router"}


def test_transformer_engine_has_every_name_that_megatron_core_imports(ask: Ask) -> None:
    """But for spellings of older versions; without the first, torch's split is used."""
    assert ask("missing_names") == [
        "transformer_engine.pytorch.attention._SplitAlongDim",
        "transformer_engine.pytorch.attention.apply_rotary_pos_emb",  # attention.rope has it
        "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",  # 1.14 and older
        "transformer_engine.pytorch.module.base.get_workspace",  # general_gemm allocates it now
    ]


def test_a_plan_for_512_ranks_is_computed_for_one_rank_alone() -> None:
    model, layout, _ = CASES["DeepSeek-V3 on 512"]
    plan = Plan(model, layout, EngineSizes((32,) * 4))
    assert plan.send(300)
    assert len(plan.receive(17)) == model.layers + 2
