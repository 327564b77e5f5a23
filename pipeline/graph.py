"""A run's settings compiled into its stages, in the order they run.

cold_start ─┬─ mixed (where there is one; evaluated, and no teacher)
            ├─ experts.A ─┐
            ├─ experts.B ─┼─ merge ─┬─ evaluate (of every model)
            └─ experts.C ─┘         └─ export
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from pipeline.schema import leaves
from stages.settings import PolicySettings, RunSettings

Kind = Literal["sft", "grpo", "mixed", "distill", "evaluate", "export"]

# What each kind of stage reads. A key stands for everything below it, `*` for every domain and
# `{domain}` for the stage's own. A stage's result depends on these keys and on its input
# checkpoints and on nothing else, so that a change elsewhere leaves it valid.
READS: dict[Kind, tuple[str, ...]] = {
    "sft": (
        "seed",
        "deterministic",
        "model",
        "cold_start.routing",
        "cold_start.optimizer",
        "cold_start.loop.steps",
        "experts.*.prompts",
        "experts.*.demonstrations",
    ),
    "grpo": (
        "seed",
        "deterministic",
        "model",
        "engine.max_model_tokens",
        "experts.{domain}.prompts",
        "experts.{domain}.rewards",
        "experts.{domain}.sampling",
        "experts.{domain}.rollout",
        "experts.{domain}.curriculum",
        "experts.{domain}.objective",
        "experts.{domain}.routing",
        "experts.{domain}.optimizer",
        "experts.{domain}.updates_per_rollout",
        "experts.{domain}.loop.steps",
        "experts.{domain}.stop",
    ),
    "mixed": (
        "seed",
        "deterministic",
        "model",
        "engine.max_model_tokens",
        "experts.*.prompts",
        "experts.*.rewards",
        "experts.*.curriculum",
        "mixed.sampling",
        "mixed.rollout",
        "mixed.objective",
        "mixed.routing",
        "mixed.optimizer",
        "mixed.updates_per_rollout",
        "mixed.loop.steps",
        "mixed.stop",
    ),
    "distill": (
        "seed",
        "deterministic",
        "model",
        "engine.max_model_tokens",
        "experts.*.prompts",
        "merge.method",
        "merge.sampling",
        "merge.rollout",
        "merge.routing",
        "merge.optimizer",
        "merge.loop.steps",
    ),
    "evaluate": (
        "seed",
        "model",
        "engine.max_model_tokens",
        "experts.*.prompts",
        "experts.*.rewards",
        "experts.*.sampling.max_response_tokens",
        "evaluation",
    ),
    "export": ("model",),
}

TRAINING: tuple[Kind, ...] = ("sft", "grpo", "mixed", "distill")
SAMPLING: tuple[Kind, ...] = ("grpo", "mixed", "distill", "evaluate")
DATA_KEYS = (".prompts", ".demonstrations")  # what patterns that name problems end with


@dataclass(frozen=True)
class Stage:
    """One node of the graph. `parent`, `teachers` and `models` name the stages it starts from."""

    name: str
    kind: Kind
    domain: str | None = None
    parent: str | None = None
    teachers: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    steps: int | None = None
    routing: str | None = None
    reads: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # of these, the problems it reads

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every stage whose checkpoint this one loads."""
        parents = [self.parent] if self.parent else []
        return tuple(dict.fromkeys([*parents, *self.teachers.values(), *self.models.values()]))

    @property
    def trains(self) -> bool:
        """Whether the stage leaves checkpoints."""
        return self.kind in TRAINING

    @property
    def needs_engine(self) -> bool:
        """Whether the stage samples."""
        return self.kind in SAMPLING

    @property
    def config_digest(self) -> str:
        """Changes when anything the stage reads changes."""
        return digest(self.reads)

    @property
    def data_digest(self) -> str:
        """Changes when the stage's problems or demonstrations change."""
        return digest(self.data)


def compile_graph(settings: RunSettings) -> tuple[Stage, ...]:
    """The run's stages in the order they run: each after all of its inputs."""
    tree = settings.model_dump(mode="json")

    def stage(name: str, kind: Kind, **fields: Any) -> Stage:
        patterns = [pattern.format(domain=fields.get("domain")) for pattern in READS[kind]]
        found = {pattern: dict(leaves(tree, pattern)) for pattern in patterns}
        data = [found[pattern] for pattern in patterns if pattern.endswith(DATA_KEYS)]
        return Stage(name, kind, reads=_joined(found.values()), data=_joined(data), **fields)

    experts = {domain: f"experts.{domain}" for domain in settings.experts}
    baseline = []
    if settings.mixed is not None:
        baseline.append(
            stage(
                "mixed",
                "mixed",
                parent="cold_start",
                models=_compared_with(settings.mixed),
                steps=settings.mixed.loop.steps,
                routing=settings.mixed.routing.replay,
            )
        )
    trained = ("cold_start", *experts.values(), *(each.name for each in baseline), "merge")
    return (
        stage("cold_start", "sft", steps=settings.cold_start.loop.steps),
        *(
            stage(
                experts[domain],
                "grpo",
                domain=domain,
                parent="cold_start",
                models=_compared_with(expert),
                steps=expert.loop.steps,
                routing=expert.routing.replay,
            )
            for domain, expert in settings.experts.items()
        ),
        *baseline,
        stage(
            "merge",
            "distill",
            parent="cold_start",
            teachers=experts,
            steps=settings.merge.loop.steps,
            routing=settings.merge.routing.replay,
        ),
        stage("evaluate", "evaluate", models={name: name for name in trained}),
        stage("export", "export", parent="merge"),
    )


def matches(key: str, pattern: str) -> bool:
    """Whether `key` is what `pattern` names, or stands below it."""
    parts, wanted = key.split("."), pattern.split(".")
    below = len(parts) >= len(wanted)
    return below and all(w in ("*", p) for p, w in zip(parts, wanted, strict=False))


def digest(value: Any) -> str:
    """SHA-256 of the value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return dict(chain.from_iterable(part.items() for part in parts))


def _compared_with(expert: PolicySettings) -> dict[str, str]:
    """The stage whose model a KL penalty is measured against, where it is not the parent."""
    kl = expert.objective.kl
    if kl.coefficient > 0 and kl.reference == "cold_start":
        return {"cold_start": "cold_start"}
    return {}
