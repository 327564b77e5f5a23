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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from stages.guards.settings import ExpertGateSettings, MergeGateSettings
from stages.kinds import COLD_START, EXPERT, GATE, INITIAL, KINDS, Kind, leaves, matches
from stages.settings import DomainSettings, PolicySettings, RunSettings

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
        return KINDS[self.kind].leaves == "results"

    @property
    def trains(self) -> bool:
        return KINDS[self.kind].trains

    @property
    def needs_engine(self) -> bool:
        return KINDS[self.kind].samples

    @property
    def takes_turns(self) -> bool:
        """True where it trains on what engines sample, and so computes while they may too."""
        return self.needs_engine and self.trains


class _Builder:
    """A builder of stages, each with the settings that its kind reads."""

    def __init__(self, settings: RunSettings) -> None:
        tree = settings.model_dump(mode="json")
        # Cached: most stages read the model, and several all domains.
        self._named = cache(lambda pattern: dict(leaves(tree, pattern)))
        if settings.cold_start is None:
            self.first = self.stage(INITIAL, "import", steps=0)
        else:
            self.first = self.stage(COLD_START, "sft", steps=settings.cold_start.loop.steps)

    def stage(self, name: str, kind: Kind, block: str = "", **fields: Any) -> Stage:
        """Return a stage; `block` is the key of the settings that have a gate's."""
        of = {"domain": fields.get("domain") or "*", "gated": block}
        patterns = [pattern.format(**of) for pattern in KINDS[kind].reads]
        reads = dict(chain.from_iterable(self._named(each).items() for each in patterns))
        return Stage(name, kind, reads=reads, **fields)

    def policy(
        self, name: str, kind: Kind, policy: PolicySettings, parent: str, **fields: Any
    ) -> Stage:
        """Return the stage of an expert, or of `mixed`."""
        kl = policy.objective.kl
        # The reference of a KL penalty is an input only where it is not the parent.
        elsewhere = kl.coefficient > 0 and kl.reference == COLD_START
        models = {COLD_START: self.first.name} if elsewhere else {}
        steps, routing = policy.loop.steps, policy.routing.replay
        return self.stage(
            name, kind, parent=parent, models=models, steps=steps, routing=routing, **fields
        )

    def gate(
        self, name: str, gated: str, against: dict[str, str], block: str, **fields: Any
    ) -> Stage:
        """Return the stage that compares `gated` with the models `against` which it is judged."""
        models = {model: model for model in (gated, *against.values())}
        return self.stage(
            name, "gate", block, gated=gated, against=against, models=models, **fields
        )


def compile_graph(settings: RunSettings) -> tuple[Stage, ...]:
    """Return the run's stages in the order they run: each after all that it waits for."""
    build, merge = _Builder(settings), settings.merge
    stages = [build.first]
    base, opened = build.first.name, tuple[str, ...]()  # what a round starts from, and its gate
    origins = {each.from_ for each in settings.domains.values()}
    for number in range(1, settings.rounds + 1):
        prefix = "" if number == 1 else f"round_{number}."
        gates = list[Stage]()
        for domain in _parents_first(settings.domains):
            own = settings.domains[domain]
            name, parent, after = f"{prefix}{EXPERT}{domain}", base, opened
            if own.from_ == COLD_START:
                parent, after = build.first.name, ()
            elif own.from_:
                parent, origin = prefix + own.from_, own.from_.removeprefix(EXPERT)
                after = (f"{prefix}{GATE}{origin}",) if settings.domains[origin].gate else ()
            stages.append(build.policy(name, "grpo", own, parent, domain=domain, after=after))
            if own.gate is not None:
                against, block = {domain: parent}, f"domains.{domain}"
                gate = build.gate(f"{prefix}{GATE}{domain}", name, against, block, domain=domain)
                # A gate that stops must not keep other experts from training: it runs after all of
                # them, unless another one starts from its expert.
                (stages if f"{EXPERT}{domain}" in origins else gates).append(gate)
        if number == 1 and settings.mixed is not None:
            stages.append(build.policy("mixed", "mixed", settings.mixed, base))
        stages += gates
        if merge is not None:
            own_gates = [f"{prefix}{GATE}{name}" for name in settings.domains]
            merged = build.stage(
                f"{prefix}merge",
                "distill",
                parent=base,
                teachers={domain: f"{prefix}{EXPERT}{domain}" for domain in settings.domains},
                steps=merge.loop.steps,
                routing=merge.routing.replay,
                after=(*opened, *(each.name for each in stages if each.name in own_gates)),
            )
            stages.append(merged)
            base, opened = merged.name, ()
            if merge.gate is not None:
                gate = build.gate(f"{prefix}{GATE}merge", base, merged.teachers, "merge")
                stages.append(gate)
                opened = (gate.name,)
    trained = {each.name: each.name for each in stages if each.trains}
    stages.append(build.stage("evaluate", "evaluate", models=trained))
    if merge is not None:
        stages.append(build.stage("export", "export", parent=base, after=opened))
    return tuple(stages)


def gate_of(stage: Stage, settings: RunSettings) -> ExpertGateSettings | MergeGateSettings:
    """Return the settings of a gate's stage."""
    gate: ExpertGateSettings | MergeGateSettings | None = None
    if stage.domain is not None:
        gate = settings.domains[stage.domain].gate
    elif settings.merge is not None:
        gate = settings.merge.gate
    assert gate is not None, "the graph has no gate without settings of one"
    return gate


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


def _parents_first(domains: Mapping[str, DomainSettings]) -> list[str]:
    """Return the domains in the configuration's order, except that a parent precedes its child."""
    found: dict[str, None] = {}

    def add(domain: str) -> None:
        if (parent := domains[domain].from_ or "").startswith(EXPERT):
            add(parent.removeprefix(EXPERT))
        found[domain] = None

    for domain in domains:
        add(domain)
    return list(found)
