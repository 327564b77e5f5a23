"""The kinds of stages, the keys that each reads, and the names of stages. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["import", "sft", "grpo", "mixed", "distill", "gate", "evaluate", "export"]

COLD_START, INITIAL = "cold_start", "initial"  # a run has one of the two, its first stage
EXPERT = "experts."
GATE = "gates."


@dataclass(frozen=True)
class StageKind:
    """A kind of stage: the module that does the work, the settings it reads, what it leaves.

    A key of `reads` stands for everything below it, `*` for every domain, `{domain}` for the
    stage's domain (every domain where it has none) and `{gated}` for the block that has the gate. A
    stage's result depends only on these keys and its input checkpoints, so a change elsewhere
    leaves it valid.
    """

    module: str
    reads: tuple[str, ...]
    leaves: Literal["checkpoints", "results", "export"]
    samples: bool = False  # on engines
    script: str | None = None  # of `slurm/`, where it is another kind's

    @property
    def trains(self) -> bool:
        """True where it leaves checkpoints for other stages."""
        return self.leaves == "checkpoints"


def _below(block: str, names: str) -> tuple[str, ...]:
    return tuple(f"{block}.{name}" for name in names.split())


_TRAINING = ("seed", "deterministic", "model")
_SAMPLED = _below("engine", "max_model_tokens weights")
_SAMPLING = (*_TRAINING, *_SAMPLED)
_POLICY = "sampling rollout objective routing optimizer updates_per_rollout loop.steps stop"
_MEASURING = ("seed", "model", *_SAMPLED)
_MEASURED = "prompts rewards sampling.max_response_tokens"

KINDS: dict[Kind, StageKind] = {
    "import": StageKind("stages.import_weights", ("model",), "checkpoints"),
    "sft": StageKind(
        "stages.sft",
        (
            *_TRAINING,
            *_below("cold_start", "routing optimizer loop.steps"),
            *_below("domains.*", "prompts demonstrations"),
        ),
        "checkpoints",
    ),
    "grpo": StageKind(
        "stages.grpo",
        (*_SAMPLING, *_below("domains.{domain}", f"prompts rewards curriculum from {_POLICY}")),
        "checkpoints",
        samples=True,
    ),
    "mixed": StageKind(
        "stages.grpo",
        (
            *_SAMPLING,
            *_below("domains.*", "prompts rewards curriculum"),
            *_below("mixed", _POLICY),
        ),
        "checkpoints",
        samples=True,
        script="grpo",
    ),
    "distill": StageKind(
        "stages.distill",
        (
            *_SAMPLING,
            "domains.*.prompts",
            *_below("merge", "method averaged_over domain_weights sampling rollout"),
            *_below("merge", "routing optimizer loop.steps"),
        ),
        "checkpoints",
        samples=True,
    ),
    "gate": StageKind(
        "stages.evaluate",
        (
            *_MEASURING,
            *_below("domains.{domain}", _MEASURED),
            *_below("evaluation", "temperature sampling_seed"),
            "{gated}.gate",
        ),
        "results",
        samples=True,
    ),
    "evaluate": StageKind(
        "stages.evaluate",
        (*_MEASURING, *_below("domains.*", _MEASURED), "evaluation"),
        "results",
        samples=True,
    ),
    "export": StageKind("stages.export", ("model",), "export"),
}
# Settings that no kind reads: they affect a result by rounding at most.
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
_LOOPS = ("cold_start", "domains.*", "mixed", "merge")
NON_INVALIDATING_KEYS = (
    *("name", "rounds", "layout", "logging", "launch", "rewards", "mixed.guards"),
    "domains.*.guards",
    *(f"engine.{key}" for key in ENGINE_KEYS),
    *(f"{block}.loop.{key}" for block in _LOOPS for key in LOOP_KEYS),
)
# What `python -m stages.main` runs: the kinds, and the preview of a domain outside a run.
MODULES: dict[str, str] = {name: kind.module for name, kind in KINDS.items()}
MODULES["preview"] = "stages.preview"


def settings_key(stage: str) -> str:
    """Return the key of a stage's settings: `domains.A` for `round_2.experts.A`, else its name."""
    return f"domains.{stage.rpartition(EXPERT)[2]}" if EXPERT in stage else stage


def matches(key: str, pattern: str) -> bool:
    """Return whether `pattern` names `key` or a key above it."""
    parts, wanted = key.split("."), pattern.split(".")
    below = len(parts) >= len(wanted)
    return below and all(w in ("*", p) for p, w in zip(parts, wanted, strict=False))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested mappings as (dotted key, value); an empty mapping is a leaf."""
    if not isinstance(value, dict) or (prefix and not value):
        yield prefix, value
        return
    for name, child in value.items():
        yield from flatten(child, f"{prefix}.{name}" if prefix else name)


def leaves(tree: dict[str, Any], pattern: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf at or below a dotted pattern, like `flatten`; `*` matches one name."""
    found = [("", tree)]
    for part in pattern.split("."):
        found = [
            (f"{prefix}.{name}" if prefix else name, value[name])
            for prefix, value in found
            if isinstance(value, dict)
            for name in (value if part == "*" else [part])
            if name in value
        ]
    for prefix, value in found:
        yield from flatten(value, prefix)
