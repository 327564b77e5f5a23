"""The rules between a model, a layout and an optimizer, and the layers of each model chunk.

This module never imports torch: `pipeline` validates a configuration on login nodes without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import get_args

from parallel.families import families_with, traits
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings, RecomputeModule

SHOWN_SIZES = 20  # sizes to choose from that a message lists
MOST_BF16_BETA2 = 0.98  # of an Adam whose second moment is in bf16


def divisors(count: int) -> list[int]:
    """Return the divisors of a positive number in ascending order, in O(sqrt(count))."""
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return small + [count // size for size in reversed(small) if size * size != count]


def one_of(sizes: list[int]) -> str:
    """Return the end of a message: the sizes to choose from, the smallest if there are many."""
    more = len(sizes) - SHOWN_SIZES
    larger = f" or {more} larger" if more > 0 else ""
    return f"use one of {sizes[:SHOWN_SIZES]}{larger}"


def chunk_layers(model: ModelSettings, layout: LayoutSettings) -> Sequence[range]:
    """Return the layers of every model chunk, in the model's order.

    Chunk `rank + pipeline * n` is the n-th chunk of a pipeline rank. All chunks of a stage have
    equally many layers, as in megatron-core. A layout with `layout_violations` has no such split;
    its chunks then differ by at most one layer.
    """
    uneven = layout.first_stage_layers, layout.last_stage_layers
    return _chunk_layers(model.layers, layout.pipeline, layout.virtual_pipeline, *uneven)


@lru_cache(maxsize=16)  # asked for once per chunk, of which there may be thousands
def _chunk_layers(
    layers: int, stages: int, virtual: int, first_stage: int | None, last_stage: int | None
) -> tuple[range, ...]:
    chunks = stages * virtual
    if first_stage is None and last_stage is None:
        starts = [layers * chunk // chunks for chunk in range(chunks + 1)]
        return tuple(range(*edges) for edges in pairwise(starts))
    sizes = [size // virtual for size in _stage_layers(layers, stages, first_stage, last_stage)]
    ends = list(accumulate(sizes * virtual))
    return tuple(range(start, end) for start, end in pairwise([0, *ends]))


def _stage_layers(
    layers: int, stages: int, first_stage: int | None, last_stage: int | None
) -> list[int]:
    """Return the layers of every stage of an uneven pipeline."""
    between = stages - (first_stage is not None) - (last_stage is not None)
    per_stage = (layers - (first_stage or 0) - (last_stage or 0)) // max(1, between)
    ends = [] if first_stage is None else [first_stage], [] if last_stage is None else [last_stage]
    return [*ends[0], *[per_stage] * between, *ends[1]]


def _divides_evenly(model: ModelSettings, layout: LayoutSettings) -> bool:
    """Return true if the stages of an uneven pipeline have all layers, in chunks of equal size."""
    first_stage, last_stage = layout.first_stage_layers, layout.last_stage_layers
    stages = _stage_layers(model.layers, layout.pipeline, first_stage, last_stage)
    whole = sum(stages) == model.layers and min(stages) > 0
    return whole and not any(size % layout.virtual_pipeline for size in stages)


def _uneven_stages(model: ModelSettings, layout: LayoutSettings, key: str) -> list[int]:
    """Return the sizes of the stage of `key` that fit the model, the closest to even first."""
    if (
        layout.pipeline > model.layers
    ):  # a mistyped digit: no sizes, and no list of a million stages
        return []
    even = model.layers / layout.pipeline
    sizes = sorted(range(1, model.layers), key=lambda size: abs(size - even))
    return [n for n in sizes if _divides_evenly(model, layout.model_copy(update={key: n}))]


def _pipeline_violations(model: ModelSettings, layout: LayoutSettings) -> Iterator[tuple[str, str]]:
    virtual, layers = layout.virtual_pipeline, model.layers
    stages, uneven = layout.pipeline, ("first_stage_layers", "last_stage_layers")
    stage_layers = {key: size for key in uneven if (size := getattr(layout, key)) is not None}
    if stages == 1:
        for key in (*(["virtual_pipeline"] if virtual > 1 else []), *stage_layers):
            yield f"layout.{key}", "requires layout.pipeline of 2 or more"
        return
    if stage_layers:
        if _divides_evenly(model, layout):
            return
        key = next(iter(stage_layers))
        without = layout.model_copy(update={key: None})
        fits = one_of(sorted(sizes)) if (sizes := _uneven_stages(model, without, key)) else ""
        between = stages - len(stage_layers)
        chunks = f", each in {virtual} chunks of equal size" if virtual > 1 else ""
        shown = " + ".join(f"{name} {size}" for name, size in stage_layers.items())
        stages_left = f"{between} stage{'' if between == 1 else 's'}"
        left = layers - sum(stage_layers.values())
        leaves = f"leaves {left} of model.layers = {layers} for {stages_left}{chunks}"
        wrong = f"is more than model.layers = {layers}" if left < 0 else leaves
        yield f"layout.{key}", f"{shown} {wrong}; {fits or 'change layout.pipeline'}"
    elif layers % (stages * virtual):
        key, product, use = "pipeline", str(stages), f"{one_of(divisors(layers))}"
        if virtual > 1:
            key, product = "virtual_pipeline", f"pipeline {stages} x virtual_pipeline {virtual}"
            use = one_of(divisors(layers // stages)) if layers % stages == 0 else ""
        if sizes := _uneven_stages(model, layout, uneven[0]):
            left = layers - sizes[0]
            leaves = f"which leaves {left} = {stages - 1} x {left // (stages - 1)}"
            use += f"{', or ' if use else 'use '}layout.first_stage_layers: {sizes[0]}, {leaves}"
        message = f"{product} does not divide model.layers = {layers}"
        yield f"layout.{key}", f"{message}; {use or 'change layout.pipeline'}"


def _recompute_violations(
    model: ModelSettings, layout: LayoutSettings
) -> Iterator[tuple[str, str]]:
    key, modules = "layout.recompute_modules", layout.recompute_modules
    names = ", ".join(get_args(RecomputeModule))
    if layout.recompute != "selective":
        if modules:
            yield key, f"requires layout.recompute: selective, not {layout.recompute}"
        return
    if not modules:
        yield key, f"must name modules with layout.recompute: selective; any of {names}"
    if repeated := sorted({name for name in modules if modules.count(name) > 1}):
        yield key, f"{', '.join(repeated)} named twice"
    family = traits(model)
    if "mla_up_proj" in modules and not family.latent_attention:
        owner = " or ".join(families_with("latent_attention"))
        yield key, f"mla_up_proj is of {owner}'s attention, not of {model.family}'s"
    for name, has_module, what in (
        ("mlp", family.dense_layers, "dense layers"),
        ("shared_experts", family.shared_experts, "shared experts"),
    ):
        if name in modules and not has_module:
            yield key, f"{name}: {model.family} has no {what}; use moe"
    inside = {"moe_act", "shared_experts"} & set(modules)
    if "moe" in modules and inside:
        yield key, f"moe recomputes {' and '.join(sorted(inside))} already; name one of them"


def optimizer_violations(
    optimizer: OptimizerSettings, model: ModelSettings, layout: LayoutSettings
) -> Iterator[tuple[str, str]]:
    """Yield what the optimizer's options need and do not have, as (field, message)."""
    options = {
        "precision_aware": optimizer.precision_aware,
        "cpu_offload": optimizer.cpu_offload > 0,
    }
    for field in (name for name, is_set in options.items() if is_set):
        low = field == "precision_aware" and model.precision != "bf16"
        for broken, needs in (
            (optimizer.algorithm != "adam", "algorithm: adam"),
            (low, "model.precision: bf16"),
            (not layout.distributed_optimizer, "layout.distributed_optimizer: true"),
        ):
            if broken:
                yield field, f"requires {needs}"
    if optimizer.precision_aware and not tracks_in_bf16(optimizer):
        yield (
            "precision_aware",
            "keeps Adam's second moment in bf16, whose rounding stops it from falling at"
            f" betas[1] = {optimizer.betas[1]:g}; use betas[1] of at most {MOST_BF16_BETA2}, or"
            " false and cpu_offload",
        )


def tracks_in_bf16(optimizer: OptimizerSettings) -> bool:
    """Return whether a second moment in bf16 follows the gradients.

    TransformerEngine rounds it to the nearest of 8 significant bits, so a step that changes it by
    less than 2^-9 to 2^-8 is lost. Where squared gradients fall to a quarter, it ends 19 % too high
    with beta2 .98, 39 % with .99, and with .999 never moves: steps stay half as long.
    """
    return optimizer.betas[1] <= MOST_BF16_BETA2


_MUST_DIVIDE = (
    ("layout.expert", "model.experts"),
    ("layout.tensor", "model.key_value_heads"),
    ("layout.tensor", "model.vocabulary_size"),
    ("layout.expert_tensor", "model.expert_hidden_size"),
    ("model.key_value_heads", "model.attention_heads"),
)


def _dividing_ranks(
    model: ModelSettings, layout: LayoutSettings, name: str, sizes: dict[str, int]
) -> str:
    """Return the end of a message: sizes of `name` whose product with the others divides ranks."""
    product = math.prod(sizes.values())
    ranks, other_ranks = f"a multiple of {product} as layout.ranks", product // sizes[name]
    if layout.ranks % other_ranks:
        return f"use {ranks}"
    wholes = [whole for divisor, whole in _MUST_DIVIDE if divisor == f"layout.{name}"]
    counts = [getattr(model, whole.removeprefix("model.")) for whole in wholes]
    if name == "pipeline" and layout.first_stage_layers is layout.last_stage_layers is None:
        counts.append(model.layers)
    fits = [
        n for n in divisors(layout.ranks // other_ranks) if not any(count % n for count in counts)
    ]
    return f"{one_of(fits)}, or {ranks}"


def layout_violations(model: ModelSettings, layout: LayoutSettings) -> list[tuple[str, str]]:
    """Return every reason why the layout does not fit the model, as (dotted key, message)."""
    violations = []
    values = {f"layout.{name}": size for name, size in layout}
    values |= {f"model.{name}": size for name, size in model}
    for divisor, whole in _MUST_DIVIDE:
        if values[whole] % values[divisor]:
            use = one_of(divisors(values[whole]))
            message = f"{values[divisor]} does not divide {whole} = {values[whole]}; {use}"
            violations.append((divisor, message))
    violations += [*_pipeline_violations(model, layout), *_recompute_violations(model, layout)]
    if layout.dispatcher == "flex" and layout.expert * layout.expert_tensor == 1:
        message = "flex requires layout.expert or layout.expert_tensor of 2 or more; use auto"
        violations.append(("layout.dispatcher", message))
    for names in (("tensor", "pipeline", "context"), ("expert_tensor", "expert", "pipeline")):
        sizes = {name: getattr(layout, name) for name in names}
        if layout.ranks % math.prod(sizes.values()):
            split = [name for name, size in sizes.items() if size > 1]
            shown = " x ".join(f"{name} {sizes[name]}" for name in split)
            message = f"{shown} does not divide layout.ranks = {layout.ranks}"
            use = _dividing_ranks(model, layout, split[-1], sizes)
            violations.append((f"layout.{split[-1]}", f"{message}; {use}"))
    if model.head_dim % 2:
        message = f"{model.head_dim} must be even (rotary embeddings rotate pairs)"
        violations.append(("model.head_dim", message))
    if (per_token := model.experts_per_token) > model.experts:
        message = f"{per_token} is more than model.experts = {model.experts}"
        violations.append(("model.experts_per_token", message))
    return violations
