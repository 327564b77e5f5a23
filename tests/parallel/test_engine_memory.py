"""An engine's memory on a GPU: vLLM's start-up check passes, and the cache is what is left."""

from __future__ import annotations

import ast
import math
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel.errors import UserError
from parallel.estimates.engine_memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    GIB,
    RESERVE_BYTES,
    EngineMemory,
    cache_bytes,
    engine_memory,
    engine_share,
    engine_weights,
)
from parallel.settings import EngineSettings, ModelSettings
from parallel.weights.names import is_precise
from parallel.weights.needs import needed
from tests.layouts.hugging_face_cases import MODELS
from tests.layouts.real_models import DEEPSEEK_V3, GLM_AIR, QWEN3_30B

H100 = round(79.2 * GIB)


def vllm_function(module: str, name: str) -> ast.FunctionDef:
    """Return a function of vLLM's source, without the seconds that its import takes."""
    spec = find_spec("vllm")
    assert spec and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *module.split(".")).with_suffix(".py")
    found = [
        each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.FunctionDef)
    ]
    return next(each for each in found if each.name == name)


@pytest.fixture(scope="module")
def request_memory() -> Any:
    """vLLM's own check of a GPU worker's start."""
    function = vllm_function("v1.worker.utils", "request_memory")
    for argument in function.args.args:
        argument.annotation = None
    function.returns = None
    names: dict[str, Any] = {"math": math, "format_gib": lambda count: round(count / GIB, 2)}
    exec(compile(ast.Module([function], []), "vllm", "exec"), names)
    return names["request_memory"]


@pytest.mark.parametrize("free", [79.0, 70.3, 63.7])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_start_up_check_passes(free: float, tensor: int, request_memory: Any) -> None:
    engine = EngineSettings(tensor=tensor, max_model_tokens=8192)
    found = engine_memory(QWEN3_30B, engine, H100, round(free * GIB))
    # The worker's snapshot is taken with its context and, of several ranks, NCCL's buffers.
    started = CONTEXT_BYTES + (COMMUNICATOR_BYTES if tensor > 1 else 0)
    snapshot = SimpleNamespace(
        total_memory=H100, free_memory=free * GIB - started, device_="cuda:0"
    )
    settings = SimpleNamespace(gpu_memory_utilization=found.gpu_memory_utilization)
    requested = request_memory(snapshot, settings)
    share = engine_share(QWEN3_30B, engine)
    assert share.weights + found.kv_cache_memory_bytes < requested + H100 // 10_000
    default = SimpleNamespace(gpu_memory_utilization=0.92)
    if free < 73:
        with pytest.raises(ValueError, match="Free memory on device"):
            request_memory(snapshot, default)


def test_the_cache_s_bytes_alone_decide_its_size_in_vllm() -> None:
    function = vllm_function("v1.worker.gpu_worker", "determine_available_memory")
    source = ast.unparse(function)
    given = source.partition("if (kv_cache_memory_bytes := self.cache_config")[2]
    before, returned, _ = given.partition("return reserve_mm_ipc_gpu_memory(kv_cache_memory_bytes")
    assert returned and "requested_memory" not in before


def test_the_cache_is_what_is_left_and_at_most_what_the_sequences_need() -> None:
    engine = EngineSettings(tensor=2, max_model_tokens=8192)
    share = engine_share(QWEN3_30B, engine)
    free = round(70 * GIB)
    left = free - share.weights - share.workspace - share.process - RESERVE_BYTES
    assert engine_memory(QWEN3_30B, engine, H100, free).kv_cache_memory_bytes == left
    allowed = engine_memory(QWEN3_30B, engine, H100, free, gpu_memory_bytes=free - 5 * GIB)
    assert allowed.kv_cache_memory_bytes == left - 5 * GIB
    few = engine.model_copy(update={"max_sequences": 8})
    found = engine_memory(QWEN3_30B, few, H100, free)
    assert found.kv_cache_memory_bytes == cache_bytes(QWEN3_30B, few) < left
    given = engine.model_copy(update={"kv_cache_mebibytes": 1000})
    assert engine_memory(QWEN3_30B, given, H100, free) == EngineMemory(0.3882, 1000 << 20)


def test_an_engine_that_does_not_fit_is_refused_with_the_numbers() -> None:
    engine = EngineSettings(max_model_tokens=8192)
    with pytest.raises(UserError) as refused:
        engine_memory(QWEN3_30B, engine, H100, H100, gpu_memory_bytes=50 * GIB)
    assert str(refused.value) == (
        "engine: weights 56.87, workspace 1.47, context, graphs and reserve 3.00 and a KV cache of "
        "0.75 GiB exceed the 50.00 GiB that it may use of a GPU of 79.20 GiB by 12.09 GiB; raise "
        "engine.tensor, or lower engine.max_model_tokens or engine.kv_cache_mebibytes"
    )
    with pytest.raises(UserError, match=r"a KV cache of 58\.59 GiB exceed .* by 13\.17 GiB"):
        given = engine.model_copy(update={"tensor": 2, "kv_cache_mebibytes": 60_000})
        engine_memory(QWEN3_30B, given, H100, H100)


def bytes_of(model: ModelSettings, tensor: int) -> int:
    """Return the bytes of the boxes that a refit brings to an engine's first rank."""
    low = 2 if model.precision == "bf16" else 4
    return sum(
        prod(sizes) * (4 if is_precise(name) else low)
        for name, (_, sizes) in needed(model, tensor, 0)
    )


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_its_weights_are_what_a_refit_brings(name: str, tensor: int) -> None:
    model = MODELS[name]
    assert engine_weights(model, EngineSettings(tensor=tensor)) == bytes_of(model, tensor)


@pytest.mark.parametrize(("model", "tensor"), [(QWEN3_30B, 2), (GLM_AIR, 8), (DEEPSEEK_V3, 16)])
def test_a_real_model_s_weights_are_what_a_refit_brings(model: ModelSettings, tensor: int) -> None:
    assert engine_weights(model, EngineSettings(tensor=tensor)) == bytes_of(model, tensor)


def test_fp8_halves_linear_layers_and_experts_alone() -> None:
    model = QWEN3_30B
    tables = 2 * 151_936 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    routers = 48 * 128 * 2048
    kept = 2 * (tables + norms + routers)
    exact, low = (engine_weights(model, EngineSettings(weights=way)) for way in ("model", "fp8"))
    assert 2 * (low - kept) == exact - kept


def test_experts_are_split_over_all_ranks_by_number_or_by_width() -> None:
    split = EngineSettings(tensor=4)
    whole = split.model_copy(update={"expert_parallel": True})
    assert engine_weights(QWEN3_30B, whole) == engine_weights(QWEN3_30B, split)
    # A rank with whole experts computes with their full width.
    assert engine_share(QWEN3_30B, whole).workspace > engine_share(QWEN3_30B, split).workspace


@pytest.mark.parametrize(
    "setting", [{}, {"tensor": 2}, {"tensor": 2, "kv_cache_mebibytes": 1000}, {"weights": "fp8"}]
)
def test_the_least_memory_that_it_waits_for_is_what_it_starts_in(setting: dict[str, Any]) -> None:
    engine = EngineSettings(max_model_tokens=8192, **setting)
    least = engine_share(QWEN3_30B, engine).least
    engine_memory(QWEN3_30B, engine, H100, least)
    with pytest.raises(UserError, match=r" exceed the .* by 0\.00 GiB; "):
        engine_memory(QWEN3_30B, engine, H100, least - 1)


@pytest.mark.parametrize(
    ("ranks", "communicators"), [({}, 0), ({"tensor": 2}, 1), ({"data": 2}, 1)]
)
def test_ranks_that_exchange_tokens_keep_communicators(
    ranks: dict[str, int], communicators: int
) -> None:
    """Members of one rank each do too: their experts are split over all of them."""
    one = engine_share(QWEN3_30B, EngineSettings()).process
    several = engine_share(QWEN3_30B, EngineSettings().model_copy(update=ranks)).process
    assert several - one == communicators * COMMUNICATOR_BYTES
