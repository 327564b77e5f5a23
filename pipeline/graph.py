"""A run's settings compiled into its stages, in the order they run.

cold_start ─┬─ mixed (where there is one; evaluated, and no teacher)
            ├─ experts.A ─┐
            ├─ experts.B ─┼─ merge ─┬─ evaluate (of every model)
            └─ experts.C ─┘         └─ export

An expert may grow from another one (`from: experts.A`), there may be no merge, and with `rounds`
experts and a merge grow again from the merge before: round_2.experts.A, round_2.merge.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from pipeline.trees import leaves

if TYPE_CHECKING:  # building the settings classes takes longer than all of `braid status`
    from stages.settings import DomainSettings, MergeSettings, PolicySettings, RunSettings

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
        "experts.{domain}.from",
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
EXPERT = "experts."
PROBLEMS = ("experts.*.prompts", "experts.*.demonstrations")


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
        return digest(problems(self.reads))


def compile_graph(settings: RunSettings) -> tuple[Stage, ...]:
    """The run's stages in the order they run: each after all of its inputs."""
    tree = settings.model_dump(mode="json")

    @cache  # most stages read the model, and several all domains
    def named(pattern: str) -> dict[str, Any]:
        return dict(leaves(tree, pattern))

    def stage(name: str, kind: Kind, **fields: Any) -> Stage:
        patterns = [pattern.format(domain=fields.get("domain")) for pattern in READS[kind]]
        reads = dict(chain.from_iterable(named(pattern).items() for pattern in patterns))
        return Stage(name, kind, reads=reads, **fields)

    stages = [stage("cold_start", "sft", steps=settings.cold_start.loop.steps)]
    base = "cold_start"
    for number in range(1, settings.rounds + 1):
        prefix = "" if number == 1 else f"round_{number}."
        for domain in _parents_first(settings.experts):
            stages.append(stage(**_expert(settings, domain, prefix, base)))
        if number == 1 and settings.mixed is not None:
            mixed = _policy(settings.mixed, base)
            stages.append(stage(name="mixed", kind="mixed", **mixed))
        if settings.merge is not None:
            stages.append(stage(**_merge(settings, settings.merge, prefix, base)))
            base = stages[-1].name
    trained = {each.name: each.name for each in stages}
    stages.append(stage("evaluate", "evaluate", models=trained))
    if settings.merge is not None:
        stages.append(stage("export", "export", parent=base))
    return tuple(stages)


def matches(key: str, pattern: str) -> bool:
    """Whether `key` is what `pattern` names, or stands below it."""
    parts, wanted = key.split("."), pattern.split(".")
    below = len(parts) >= len(wanted)
    return below and all(w in ("*", p) for p, w in zip(parts, wanted, strict=False))


def problems(reads: dict[str, Any]) -> dict[str, Any]:
    """Of the settings that a stage reads those that name its problems and demonstrations."""
    return {
        key: value
        for key, value in reads.items()
        if any(matches(key, pattern) for pattern in PROBLEMS)
    }


def digest(value: Any) -> str:
    """SHA-256 of the value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parents_first(experts: dict[str, DomainSettings]) -> list[str]:
    """The domains as they are written, but for those that another one grows from."""
    found: dict[str, None] = {}

    def add(domain: str) -> None:
        parent = experts[domain].from_ or ""
        if parent.startswith(EXPERT):
            add(parent.removeprefix(EXPERT))
        found[domain] = None

    for domain in experts:
        add(domain)
    return list(found)


def _expert(settings: RunSettings, domain: str, prefix: str, base: str) -> dict[str, Any]:
    """What the stage of a domain's expert is; `base` is what all grow from in this round."""
    expert = settings.experts[domain]
    parent = expert.from_ or base
    if parent.startswith(EXPERT):
        parent = prefix + parent
    return {
        "name": f"{prefix}{EXPERT}{domain}",
        "kind": "grpo",
        "domain": domain,
        **_policy(expert, parent),
    }


def _policy(policy: PolicySettings, parent: str) -> dict[str, Any]:
    """What the stages of policies that learn from rewards have in common."""
    kl = policy.objective.kl
    # The model that a KL penalty is measured against, where it is not the parent.
    elsewhere = kl.coefficient > 0 and kl.reference == "cold_start"
    return {
        "parent": parent,
        "models": {"cold_start": "cold_start"} if elsewhere else {},
        "steps": policy.loop.steps,
        "routing": policy.routing.replay,
    }


def _merge(settings: RunSettings, merge: MergeSettings, prefix: str, base: str) -> dict[str, Any]:
    return {
        "name": f"{prefix}merge",
        "kind": "distill",
        "parent": base,
        "teachers": {domain: f"{prefix}{EXPERT}{domain}" for domain in settings.experts},
        "steps": merge.loop.steps,
        "routing": merge.routing.replay,
    }
