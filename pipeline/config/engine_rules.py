"""Rules of the engines against the model and the policies that they sample from."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from parallel.estimates.engine_memory import CACHE_BLOCK, cached_tokens
from parallel.settings import EngineSettings, ModelSettings
from parallel.weights.needs import engine_violations
from pipeline.config.unroll import policies
from stages.objectives.surrogate import ImportanceSettings
from stages.settings import RunSettings

Found = Iterator[tuple[str, str]]


def engine_rules(model: ModelSettings, engine: EngineSettings) -> Found:
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


def quantized_rollout_rules(run: RunSettings, starting: Collection[str] | None) -> Found:
    """Require that fp8 rollouts are corrected for: mu is then never the policy, not even fresh."""
    if run.engine.weights != "fp8":
        return
    for at, policy, objective in policies(run, starting):
        correction, replay = objective.correction, policy.routing.replay
        if isinstance(correction, ImportanceSettings):
            if correction.applies_to_all(replay, run.model.precision):
                continue
            yield (
                at("objective.correction.samples"),
                f"{correction.samples} leaves fresh samples uncorrected, which engine.weights: fp8 "
                "samples from another distribution than the policy; use all",
            )
        else:
            yield (
                at("objective.correction"),
                "none, but engine.weights: fp8 samples from another distribution than the policy; "
                "use tis or icepop, with samples: all",
            )
