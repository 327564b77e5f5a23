"""Rules between blocks: what no block's own schema can say.

A rule runs as soon as the blocks it reads are valid by themselves, so that its violations are
listed together with those of the other blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from parallel.settings import (
    EngineSettings,
    LayoutSettings,
    ModelSettings,
    OptimizerSettings,
    Settings,
    layout_violations,
)
from pipeline.rewards import reward_fault
from stages.settings import (
    TOKENIZER_SIZE,
    ColdStartSettings,
    DomainSettings,
    LoopSettings,
    MergeSettings,
    SamplingSettings,
)

Found = Iterator[tuple[str, str]]
Block = TypeVar("Block", bound=Settings)


def violations(run: dict[str, Any]) -> Found:
    """Every broken rule as (dotted key, message that says the mend)."""
    model = _block(ModelSettings, run.get("model"))
    layout = _block(LayoutSettings, run.get("layout", {}))
    engine = _block(EngineSettings, run.get("engine", {}))
    cold_start = _block(ColdStartSettings, run.get("cold_start"))
    merge = _block(MergeSettings, run.get("merge"))
    experts = run.get("experts")

    if model and model.vocabulary_size < TOKENIZER_SIZE:
        yield (
            "model.vocabulary_size",
            f"{model.vocabulary_size} is less than the {TOKENIZER_SIZE} ids of the tokenizer",
        )
    if model and layout:
        yield from layout_violations(model, layout)
    if model and engine:
        yield from _engine_rules(model, engine)
    if cold_start:
        yield from _schedule_rules("cold_start", cold_start.optimizer, cold_start.loop)
    for name, given in experts.items() if isinstance(experts, dict) else ():
        yield from _name_rules(name)
        if domain := _block(DomainSettings, given):
            yield from _domain_rules(f"experts.{name}", domain, layout, engine)
    if merge:
        yield from _schedule_rules("merge", merge.optimizer, merge.loop)
        yield from _sampling_rules("merge.sampling", merge.sampling, layout, engine)


def _block(settings: type[Block], given: Any) -> Block | None:
    try:
        return settings.model_validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError:
        return None


def _engine_rules(model: ModelSettings, engine: EngineSettings) -> Found:
    if engine.max_model_tokens > model.max_positions:
        yield (
            "engine.max_model_tokens",
            f"{engine.max_model_tokens} is more than model.max_positions = {model.max_positions}",
        )


def _name_rules(name: str) -> Found:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        yield (
            f"experts.{name}",
            "a domain's name is made of letters, digits, _ and -, since it names a folder",
        )


def _domain_rules(
    key: str,
    domain: DomainSettings,
    layout: LayoutSettings | None,
    engine: EngineSettings | None,
) -> Found:
    yield from _schedule_rules(key, domain.optimizer, domain.loop)
    yield from _sampling_rules(f"{key}.sampling", domain.sampling, layout, engine)
    if domain.sampling.group_size < 2:
        yield (
            f"{key}.sampling.group_size",
            "a group of one has no advantage, since it is its own mean; use 2 or more",
        )
    if fault := reward_fault(domain.reward):
        yield f"{key}.reward", fault
    if layout:
        yield from _share_rules(key, domain, layout.ranks)


def _share_rules(key: str, domain: DomainSettings, ranks: int) -> Found:
    """Every rank takes the same share of an update."""
    if domain.demonstrations.sequences_per_step % ranks:
        yield (
            f"{key}.demonstrations.sequences_per_step",
            f"{domain.demonstrations.sequences_per_step} is no multiple of layout.ranks = {ranks}",
        )
    samples = domain.sampling.prompts_per_step * domain.sampling.group_size
    if domain.updates_per_rollout > 1 and samples % (domain.updates_per_rollout * ranks):
        yield (
            f"{key}.updates_per_rollout",
            f"{domain.updates_per_rollout} updates on {ranks} ranks do not divide the {samples} "
            "samples of a rollout",
        )


def _sampling_rules(
    key: str,
    sampling: SamplingSettings,
    layout: LayoutSettings | None,
    engine: EngineSettings | None,
) -> Found:
    if engine and sampling.max_response_tokens >= engine.max_model_tokens:
        yield (
            f"{key}.max_response_tokens",
            f"{sampling.max_response_tokens} leaves no room for a prompt: it should be less than "
            f"engine.max_model_tokens = {engine.max_model_tokens}",
        )
    samples = sampling.prompts_per_step * sampling.group_size
    if layout and samples % layout.ranks:
        yield (
            f"{key}.prompts_per_step",
            f"{sampling.prompts_per_step} prompts x {sampling.group_size} samples is no multiple "
            f"of layout.ranks = {layout.ranks}",
        )


def _schedule_rules(key: str, optimizer: OptimizerSettings, loop: LoopSettings) -> Found:
    if optimizer.warmup_steps >= loop.steps:
        yield (
            f"{key}.optimizer.warmup_steps",
            f"{optimizer.warmup_steps} should be less than {key}.loop.steps = {loop.steps}, or the "
            "learning rate never arrives",
        )
