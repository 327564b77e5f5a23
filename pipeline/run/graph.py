"""A run's settings compiled into its stages, in the order they run.

cold_start ─┬─ mixed (where there is one; evaluated, and no teacher)
            ├─ experts.A ─┐
            ├─ experts.B ─┼─ merge ─┬─ evaluate (of every model)
            └─ experts.C ─┘         └─ export

Without a cold start the first stage is `initial`, which imports `model.initial_weights`. An expert
may start from another one (`from: experts.A`). The merge is optional. With `rounds`, experts and a
merge are trained again from the previous merge: round_2.experts.A, round_2.merge.

Where a domain has a `gate`, the stage gates.A compares its expert with the parent, and the stages
that load the expert wait for it; gates.merge compares the merge with its teachers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import leaves
from stages.kinds import (
    COLD_START,
    EXPERT,
    GATE,
    INITIAL,
    LEAVING_CHECKPOINTS,
    MEASURING,
    SAMPLING,
    Kind,
)

if TYPE_CHECKING:  # building the settings classes takes longer than all of `braid status`
    from stages.settings import DomainSettings, MergeSettings, PolicySettings, RunSettings

# The settings that each kind of stage reads. A key stands for everything below it, `*` for every
# domain, `{domain}` for the stage's domain (every domain where it has none) and `{gated}` for the
# block that has the gate. A stage's result depends only on these keys and its input checkpoints,
# so a change elsewhere leaves it valid.
READS: dict[Kind, tuple[str, ...]] = {
    "import": ("model",),
    "sft": (
        "seed",
        "deterministic",
        "model",
        "cold_start.routing",
        "cold_start.optimizer",
        "cold_start.loop.steps",
        "domains.*.prompts",
        "domains.*.demonstrations",
    ),
    "grpo": (
        "seed",
        "deterministic",
        "model",
        "engine.max_model_tokens",
        "domains.{domain}.prompts",
        "domains.{domain}.rewards",
        "domains.{domain}.sampling",
        "domains.{domain}.rollout",
        "domains.{domain}.curriculum",
        "domains.{domain}.objective",
        "domains.{domain}.routing",
        "domains.{domain}.optimizer",
        "domains.{domain}.updates_per_rollout",
        "domains.{domain}.loop.steps",
        "domains.{domain}.stop",
        "domains.{domain}.from",
    ),
    "mixed": (
        "seed",
        "deterministic",
        "model",
        "engine.max_model_tokens",
        "domains.*.prompts",
        "domains.*.rewards",
        "domains.*.curriculum",
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
        "domains.*.prompts",
        "merge.method",
        "merge.averaged_over",
        "merge.domain_weights",
        "merge.sampling",
        "merge.rollout",
        "merge.routing",
        "merge.optimizer",
        "merge.loop.steps",
    ),
    "gate": (
        "seed",
        "model",
        "engine.max_model_tokens",
        "domains.{domain}.prompts",
        "domains.{domain}.rewards",
        "domains.{domain}.sampling.max_response_tokens",
        "evaluation.temperature",
        "evaluation.sampling_seed",
        "{gated}.gate",
    ),
    "evaluate": (
        "seed",
        "model",
        "engine.max_model_tokens",
        "domains.*.prompts",
        "domains.*.rewards",
        "domains.*.sampling.max_response_tokens",
        "evaluation",
    ),
    "export": ("model",),
}

PROBLEMS = ("domains.*.prompts", "domains.*.demonstrations")


@dataclass(frozen=True)
class Stage:
    """A node of the graph.

    `parent`, `teachers` and `models` name the stages whose checkpoints it loads, `after` the gates
    that it waits for without loading anything. A gate compares the model `gated`, on every domain
    of `against`, with the model named there.
    """

    name: str
    kind: Kind
    domain: str | None = None
    parent: str | None = None
    teachers: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    gated: str | None = None
    against: dict[str, str] = field(default_factory=dict)
    steps: int | None = None
    routing: str | None = None
    reads: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stages whose checkpoints this one loads."""
        parents = [self.parent] if self.parent else []
        return tuple(dict.fromkeys([*parents, *self.teachers.values(), *self.models.values()]))

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The stages that must be done before this one starts."""
        return (*self.inputs, *self.after)

    @property
    def evaluated_on(self) -> dict[str, list[str]]:
        """The domains of each model that a gate measures."""
        found = {self.gated: list(self.against)} if self.gated else {}
        for domain, model in self.against.items():
            found.setdefault(model, []).append(domain)
        return found

    @property
    def measures(self) -> bool:
        return self.kind in MEASURING

    @property
    def trains(self) -> bool:
        return self.kind in LEAVING_CHECKPOINTS

    @property
    def needs_engine(self) -> bool:
        return self.kind in SAMPLING

    @property
    def config_digest(self) -> str:
        """The digest of all settings that the stage reads."""
        return digest(self.reads)

    @property
    def data_digest(self) -> str:
        """The digest of the settings of the stage's problems and demonstrations."""
        return digest(problems(self.reads))


def compile_graph(settings: RunSettings) -> tuple[Stage, ...]:
    """Return the run's stages in the order they run: each after all that it waits for."""
    tree = settings.model_dump(mode="json")

    @cache  # most stages read the model, and several all domains
    def named(pattern: str) -> dict[str, Any]:
        return dict(leaves(tree, pattern))

    def stage(name: str, kind: Kind, block: str = "", **fields: Any) -> Stage:
        of = {"domain": fields.get("domain") or "*", "gated": block}
        patterns = [pattern.format(**of) for pattern in READS[kind]]
        reads = dict(chain.from_iterable(named(pattern).items() for pattern in patterns))
        return Stage(name, kind, reads=reads, **fields)

    if settings.cold_start is None:
        stages = [stage(INITIAL, "import", steps=0)]
    else:
        stages = [stage(COLD_START, "sft", steps=settings.cold_start.loop.steps)]
    base, opened = stages[0].name, list[str]()
    for number in range(1, settings.rounds + 1):
        prefix = "" if number == 1 else f"round_{number}."
        experts, gates = _experts(settings, prefix, base, opened)
        stages += [stage(**each) for each in experts]
        if number == 1 and settings.mixed is not None:
            mixed = _policy(settings, settings.mixed, base)
            stages.append(stage(name="mixed", kind="mixed", **mixed))
        stages += [stage(**each) for each in gates]
        if settings.merge is not None:
            own = [f"{prefix}{GATE}{name}" for name in settings.domains]
            after = (*opened, *(each.name for each in stages if each.name in own))
            merge = stage(**_merge(settings, settings.merge, prefix, base), after=after)
            stages.append(merge)
            base, opened = merge.name, []
            if settings.merge.gate is not None:
                gate = stage(**_gate(f"{prefix}{GATE}merge", base, merge.teachers, "merge"))
                stages.append(gate)
                opened = [gate.name]
    trained = {each.name: each.name for each in stages if each.trains}
    stages.append(stage("evaluate", "evaluate", models=trained))
    if settings.merge is not None:
        stages.append(stage("export", "export", parent=base, after=tuple(opened)))
    return tuple(stages)


def matches(key: str, pattern: str) -> bool:
    """Return whether `pattern` names `key` or a key above it."""
    parts, wanted = key.split("."), pattern.split(".")
    below = len(parts) >= len(wanted)
    return below and all(w in ("*", p) for p, w in zip(parts, wanted, strict=False))


def problems(reads: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a stage's problems and demonstrations among all that it reads."""
    return {
        key: value
        for key, value in reads.items()
        if any(matches(key, pattern) for pattern in PROBLEMS)
    }


def digest(value: Any) -> str:
    """Return the SHA-256 of the value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parents_first(experts: dict[str, DomainSettings]) -> list[str]:
    """Return the domains in the configuration's order, except that a parent precedes its child."""
    found: dict[str, None] = {}

    def add(domain: str) -> None:
        parent = experts[domain].from_ or ""
        if parent.startswith(EXPERT):
            add(parent.removeprefix(EXPERT))
        found[domain] = None

    for domain in experts:
        add(domain)
    return list(found)


def _experts(
    settings: RunSettings, prefix: str, base: str, opened: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the fields of a round's stages: its experts, and the gates to run after all experts.

    A gate that stops the run must not keep other experts from training, so only the gate of an
    expert that another one starts from is among the experts. `opened` names the gates that every
    stage with the parent `base` waits for.
    """
    origins = {expert.from_ for expert in settings.domains.values()}
    experts: list[dict[str, Any]] = []
    gates: list[dict[str, Any]] = []
    for domain in _parents_first(settings.domains):
        expert = _expert(settings, domain, prefix, base, opened)
        experts.append(expert)
        if settings.domains[domain].gate is not None:
            name, against = f"{prefix}{GATE}{domain}", {domain: expert["parent"]}
            gate = _gate(name, expert["name"], against, f"domains.{domain}")
            grown_from = f"{EXPERT}{domain}" in origins
            (experts if grown_from else gates).append({**gate, "domain": domain})
    return experts, gates


def _expert(
    settings: RunSettings, domain: str, prefix: str, base: str, opened: list[str]
) -> dict[str, Any]:
    """Return the fields of a domain's expert stage; `base` is the default parent of the round."""
    expert = settings.domains[domain]
    parent = expert.from_ or base
    after = opened if parent == base else []
    if parent.startswith(EXPERT):
        origin = parent.removeprefix(EXPERT)
        parent = prefix + parent
        after = [f"{prefix}{GATE}{origin}"] if settings.domains[origin].gate else []
    elif expert.from_ == COLD_START:
        parent = _first(settings)
    return {
        "name": f"{prefix}{EXPERT}{domain}",
        "kind": "grpo",
        "domain": domain,
        "after": tuple(after),
        **_policy(settings, expert, parent),
    }


def _gate(name: str, gated: str, against: dict[str, str], block: str) -> dict[str, Any]:
    """Return the fields of a gate's stage; `block` is the key of the settings with the gate."""
    return {
        "name": name,
        "kind": "gate",
        "block": block,
        "gated": gated,
        "against": against,
        "models": {model: model for model in (gated, *against.values())},
    }


def _first(settings: RunSettings) -> str:
    """Return the name of the stage that `cold_start` means where a setting names a model."""
    return INITIAL if settings.cold_start is None else COLD_START


def _policy(settings: RunSettings, policy: PolicySettings, parent: str) -> dict[str, Any]:
    """Return the fields that expert and mixed stages share."""
    kl = policy.objective.kl
    # The reference of a KL penalty is an input only where it is not the parent.
    elsewhere = kl.coefficient > 0 and kl.reference == COLD_START
    return {
        "parent": parent,
        "models": {COLD_START: _first(settings)} if elsewhere else {},
        "steps": policy.loop.steps,
        "routing": policy.routing.replay,
    }


def _merge(settings: RunSettings, merge: MergeSettings, prefix: str, base: str) -> dict[str, Any]:
    return {
        "name": f"{prefix}merge",
        "kind": "distill",
        "parent": base,
        "teachers": {domain: f"{prefix}{EXPERT}{domain}" for domain in settings.domains},
        "steps": merge.loop.steps,
        "routing": merge.routing.replay,
    }
