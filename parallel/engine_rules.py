"""Rules of engines against the model that they sample from. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel.estimates.engine_memory import CACHE_BLOCK, cached_tokens
from parallel.layout_rules import divisors, one_of
from parallel.settings import EngineSettings, ModelSettings
from parallel.weights.names import ModelWeights, Units, padded


def engine_rules(model: ModelSettings, engine: EngineSettings) -> Iterator[tuple[str, str]]:
    """Yield what an engine cannot hold of a model whose architecture is valid."""
    yield from engine_violations(model, engine.tensor, engine.expert_parallel, engine.data)
    if engine.expert_parallel and engine.ranks == 1:
        yield (
            "engine.expert_parallel",
            "has no effect with engine.tensor = 1, whose rank has all experts; use more ranks, or "
            "false",
        )
    if engine.weights == "fp8" and model.precision != "bf16":
        yield (
            "engine.weights",
            f"fp8 quantizes bf16 weights, not model.precision = {model.precision}; use bf16, or "
            "weights: model",
        )
    room = cached_tokens(model, engine) // CACHE_BLOCK * CACHE_BLOCK - CACHE_BLOCK
    if room < engine.max_model_tokens:
        yield (
            "engine.kv_cache_mebibytes",
            f"{engine.kv_cache_mebibytes} MiB cache the keys and values of {max(room, 0)} tokens, "
            f"less than engine.max_model_tokens = {engine.max_model_tokens}",
        )


def engine_violations(
    model: ModelSettings, tensor_parallel: int, expert_parallel: bool = False, data: int = 1
) -> list[tuple[str, str]]:
    """Return the reasons why an engine of this size cannot hold the model: (key, message)."""
    description = ModelWeights(model)
    weights = [w for key in description.buckets for w in description.weights[description.kind(key)]]
    violations, ranks = [], tensor_parallel * data
    if expert_parallel or data > 1:  # whole experts need no width that ranks divide
        width = model.expert_hidden_size
        if not expert_parallel and width % ranks:
            message = (
                f"{data} x engine.tensor = {ranks} ranks do not divide model.expert_hidden_size ="
                f" {width}; use expert_parallel: true, or engine.data so that the ranks are"
            )
            violations.append(("engine.data", f"{message} {_any_of(divisors(width))}"))
        weights = [weight for weight in weights if not weight.experts]
    split = dict.fromkeys(fused.units for weight in weights for fused in weight.tensors)
    units = [unit for unit in split if unit is not None]
    # The vocabulary and the attention heads are never repeated, so their divisors are candidates.
    common = math.gcd(*(padded(unit) for unit in units if not unit.repeated))
    fitting = [size for size in divisors(common) if all(_divides(size, unit) for unit in units)]
    for unit in units:
        if not _divides(tensor_parallel, unit):
            count = padded(unit)
            how = "neither divides nor is a multiple of" if unit.repeated else "does not divide"
            padding = f", rounded up to {count}" if count != unit.count else ""
            message = f"{tensor_parallel} {how} {unit.name} = {unit.count}{padding}"
            violations.append(("engine.tensor", f"{message}; {one_of(fitting)}"))
    if expert_parallel and ranks > model.experts:
        few = f"{ranks} ranks cannot share model.experts = {model.experts}"
        violations.append(("engine.expert_parallel", f"{few}; use fewer ranks, or false"))
    return violations


def _any_of(sizes: list[int]) -> str:
    return one_of(sizes).removeprefix("use ")


def _divides(ranks: int, units: Units) -> bool:
    if units.repeated and ranks > units.count:
        return ranks % units.count == 0
    return padded(units) % ranks == 0
