"""Dotted keys of settings: patterns, leaves, and the keys that change no result.

A key of a pattern stands for everything below it, and `*` for one name. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Settings that no stage reads: they affect a result by rounding at most.
ENGINE_KEYS = (
    *("count", "tensor", "data", "placement", "max_sequences", "kv_cache_mebibytes"),
    *("start_timeout_seconds", "request_timeout_seconds", "hang_timeout_seconds", "max_restarts"),
    *("transport", "check_refit", "expert_parallel"),
    *("max_logprob_difference", "max_mean_logprob_difference", "max_high_ratio"),
)
LOOP_KEYS = (
    "micro_batch_tokens",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "async_checkpoints",
)
# Of a stage's own block: what it starts from, waits for and is called is in the graph, and the
# lineage has the digests of its inputs and the name that it is seeded as.
STRUCTURE = ("from", "for_each", "as", "domains", "after", "was", "teachers", "models")
TEACHER_KEYS = ("teacher_memory.resident", "teacher_memory.hidden_states")
NEUTRAL_KEYS = (
    *("guards", "gate", *STRUCTURE, *TEACHER_KEYS),
    *(f"loop.{key}" for key in LOOP_KEYS),
)
NON_INVALIDATING_KEYS = (
    *("name", "layout", "logging", "launch", "rewards", "domains.*.guards"),
    *(f"engine.{key}" for key in ENGINE_KEYS),
    *(f"domains.*.loop.{key}" for key in LOOP_KEYS),
    *(f"stages.*.loop.{key}" for key in LOOP_KEYS),
    *("stages.*.guards", "stages.*.after"),
    *(f"stages.*.{key}" for key in TEACHER_KEYS),
)


def matches(key: str, pattern: str) -> bool:
    """Return whether `pattern` names `key` or a key above it.

    >>> matches("domains.math.loop.steps", "domains.*.loop")
    True
    """
    key_names, pattern_names = key.split("."), pattern.split(".")
    below = len(key_names) >= len(pattern_names)
    return below and all(w in ("*", p) for p, w in zip(key_names, pattern_names, strict=False))


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return every key whose value differs, with both values; None for an absent key."""
    if before == after:  # nearly always, and faster than key by key
        return {}
    keys = dict.fromkeys([*before, *after])
    values = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: (old, new) for key, (old, new) in values.items() if old != new}


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return every leaf of nested mappings as (dotted key, value); an empty mapping is a leaf.

    >>> flatten({"loop": {"steps": 50}, "data": {}})
    [('loop.steps', 50), ('data', {})]
    """
    pairs: list[tuple[str, Any]] = []
    _flatten(value, prefix, pairs)
    return pairs


def _flatten(value: Any, prefix: str, pairs: list[tuple[str, Any]]) -> None:
    """Append to `pairs`: a list for each mapping took twice as long, a generator more."""
    if not isinstance(value, dict) or (prefix and not value):
        pairs.append((prefix, value))
        return
    for name, child in value.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(child, dict):
            _flatten(child, key, pairs)
        else:
            pairs.append((key, child))


def leaves(tree: dict[str, Any], pattern: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf at or below a dotted pattern, like `flatten`; `*` matches one name."""
    subtrees = [("", tree)]
    for segment in pattern.split("."):
        subtrees = [
            (f"{prefix}.{name}" if prefix else name, value[name])
            for prefix, value in subtrees
            if isinstance(value, dict)
            for name in (value if segment == "*" else [segment])
            if name in value
        ]
    for prefix, value in subtrees:
        yield from flatten(value, prefix)
