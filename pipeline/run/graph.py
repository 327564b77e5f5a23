"""A run's blocks compiled into its stages, in the order they run.

With configs/pipelines/experts-merge.yaml and three domains:

cold_start ─┬─ experts.A ─┐
            ├─ experts.B ─┼─ merge ─┬─ evaluate (of every model)
            └─ experts.C ─┘         └─ export

Where a block has a `gate`, the stage gates.STAGE compares each of its stages with what that starts
from, and the stages that load the stage wait for it; the gate of a merge compares it with its
teachers.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from typing import Any

from pipeline.config.unroll import GATE_PREFIX, Blocks, Unrolled, is_path
from stages.guards.settings import GateSettings, MergeGateSettings
from stages.keys import NEUTRAL_KEYS, flatten, leaves, matches
from stages.kinds.distill.settings import DistillSettings, domain_of
from stages.kinds.evaluate.settings import GATE
from stages.kinds.kind import GATE_KEY, KINDS, StageKind, with_domains
from stages.settings import RunSettings

PROBLEMS = ("domains.*.prompts", "domains.*.demonstrations", "data")


@dataclass(frozen=True)
class Stage:
    """A node of the graph, of the block `block` of the run's stages.

    `parent`, `teachers`, `models` and `data` name the stages whose output it loads, or are paths of
    models outside the run; the references of a KL penalty are `models` by domain, `teachers` too,
    or by DOMAIN/N where a domain has several. `after` names
    stages that it waits for without loading anything. A gate compares the model `gated`, on every
    domain of `against`, with the model named there. Its random numbers derive from `seeded_as`.
    """

    name: str
    kind: str
    block: str | None = None
    domain: str | None = None
    domains: tuple[str, ...] = ()
    parent: str | None = None
    teachers: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    gated: str | None = None
    against: dict[str, str] = field(default_factory=dict)
    steps: int | None = None
    routing: str | None = None
    seeded_as: str = ""
    reads: dict[str, Any] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, str]:
        """The stages and paths that this one loads, by what it loads each as."""
        by_role = {
            **{"from": self.parent or "", "gated": self.gated or ""},
            **{f"teachers.{domain}": name for domain, name in self.teachers.items()},
            **{f"against.{domain}": name for domain, name in self.against.items()},
            **{f"models.{known_as}": name for known_as, name in self.models.items()},
            **{f"data.{source}": name for source, name in self.data.items()},
        }
        return {role: name for role, name in by_role.items() if name}

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The stages and paths that this one loads."""
        parents = [self.parent] if self.parent else []
        further = (*self.teachers.values(), *self.models.values(), *self.data.values())
        return tuple(dict.fromkeys([*parents, *further]))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The stages whose output this one loads."""
        return tuple(source for source in self.sources if not is_path(source))

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The stages that must be done before this one starts."""
        return (*self.inputs, *self.after)

    @property
    def evaluated_on(self) -> dict[str, list[str]]:
        """The domains of each model that a gate measures."""
        domains = {self.gated: list(self.against)} if self.gated else {}
        for domain, model in self.against.items():
            domains.setdefault(model, []).append(domain)
        return domains

    @property
    def declared(self) -> StageKind:
        """The declaration of its kind, whose traits the pipeline asks for."""
        return KINDS[self.kind]

    @property
    def measures(self) -> bool:
        return self.declared.measures

    @property
    def trains(self) -> bool:
        return self.declared.trains

    @property
    def draws(self) -> bool:
        """True where it has random numbers."""
        return "seed" in self.declared.reads

    @property
    def needs_engine(self) -> bool:
        return self.declared.samples

    @property
    def takes_turns(self) -> bool:
        """True where it trains on what engines sample, and so computes while they may too."""
        return self.needs_engine and self.trains


def compile_graph(settings: RunSettings) -> tuple[Stage, ...]:
    """Return the run's stages in the order they run: each after all that it waits for.

    The settings are valid by `graph_rules`.
    """
    return tuple(_ordered(_Compiler(settings).stages()))


class _Compiler:
    """The compiler of a run's blocks into stages, each with the settings that its kind reads."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._blocks = Blocks(settings)
        tree = settings.model_dump(mode="json", exclude={"stages"})
        # Cached: most stages read the model, and several all domains.
        self._named = cache(lambda pattern: dict(leaves(tree, pattern)))

    def stages(self) -> Iterator[Stage]:
        """Yield every stage and its gate, in the order of the blocks."""
        for unrolled in self._blocks.stages:
            stage = self._stage(unrolled)
            yield stage
            if unrolled.gate is not None:
                yield self._gate(unrolled.gate, stage, unrolled)

    def _stage(self, of: Unrolled) -> Stage:
        run, block = self._settings, of.settings
        inputs = self._blocks.inputs(of)
        trained = block.trained_by(run, of.domains)
        parent = self._source(inputs.parent, of.domain) if inputs.parent else None
        teachers = {
            label: self._source(name, domain_of(label)) for label, name in inputs.teachers.items()
        }
        models = {
            known_as: self._source(name, of.domain) for known_as, name in inputs.models.items()
        }
        references = {d: self._source(name, d) for d, name in inputs.references.items()}
        # A reference that is the parent needs no second copy of the weights.
        models |= {d: name for d, name in references.items() if name != parent}  # loaded anyway
        if inputs.every_model:
            models = {stage.name: stage.name for stage in self._blocks.stages if _trains(stage)}
        data = {source: self._source(name, of.domain) for source, name in inputs.data.items()}
        after = [self._source(name, of.domain) for name in block.after]
        loaded = [*([parent] if parent else []), *teachers.values(), *data.values()]
        if not inputs.every_model:  # an evaluation of all shows what a gate has stopped, too
            loaded += models.values()
        block_values = {
            key: value
            for key, value in flatten(block.read(run, of.domains))
            if not _is_neutral(key)
        }
        return Stage(
            of.name,
            block.kind,
            block=of.block,
            domain=of.domain,
            domains=of.domains,
            parent=parent,
            teachers=teachers,
            models=models,
            data=data,
            after=tuple(dict.fromkeys([*after, *self._gates(loaded)])),
            # A merge of weights trains nothing and still leaves a checkpoint, of step 0.
            steps=trained[1].steps if trained else 0 if _trains(of) else None,
            routing=block.replay(run, of.domains),
            seeded_as=of.seeded_as,
            reads={**self._values(block.run_keys(of.domains)), **block_values},
        )

    def _gate(self, name: str, stage: Stage, of: Unrolled) -> Stage:
        """Return the gate that compares a stage with its parent, or with its teachers."""
        gate = of.settings.gated
        assert gate is not None
        domains = tuple(domain for domain in of.domains if domain in (gate.domains or of.domains))
        teachers: dict[str, str] = {}
        if isinstance(gate, MergeGateSettings) and isinstance(of.settings, DistillSettings):
            for domain in of.domains:
                if (label := of.settings.main_teacher(domain)) in stage.teachers:
                    teachers[domain] = stage.teachers[label]  # else `self`: as its start was
        against = {domain: teachers.get(domain, stage.parent or "") for domain in domains}
        models = {model: model for model in (stage.name, *against.values())}
        block_values = {GATE_KEY: gate.model_dump(mode="json", exclude={"domains"})}
        return Stage(
            name,
            GATE.name,
            block=of.block,
            domain=of.domain,
            domains=domains,
            models=models,
            gated=stage.name,
            against=against,
            seeded_as=f"{GATE_PREFIX}{of.seeded_as}",
            reads={
                **self._values(with_domains(GATE.reads, domains)),
                **dict(flatten(block_values)),
            },
        )

    def _source(self, reference: str, domain: str | None) -> str:
        source = self._blocks.resolve(reference, domain)
        assert source is not None, "graph_rules has refused it"
        return source

    def _gates(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the gates of the named stages."""
        by_name = self._blocks.by_name
        yield from filter(None, (by_name[name].gate for name in names if name in by_name))

    def _values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values at and below keys of the run outside its blocks."""
        return dict(chain.from_iterable(self._named(pattern).items() for pattern in keys))


@cache  # all stages of a kind have the same keys, and matching them was 80 % of the time
def _is_neutral(key: str) -> bool:
    """Return whether a key of a block changes no result."""
    return any(matches(key, pattern) for pattern in NEUTRAL_KEYS)


def _trains(stage: Unrolled) -> bool:
    return KINDS[stage.settings.kind].trains


def _ordered(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yield the stages in the order they run, as near to the given one as their inputs allow.

    Gates come as late as they may: one that stops must not keep other stages from running. What
    only measures or exports comes last.
    """
    by_name = {stage.name: stage for stage in stages}
    numbers = {name: number for number, name in enumerate(by_name)}
    left = {name: len(set(stage.waits_for)) for name, stage in by_name.items()}
    followers: dict[str, list[str]] = {name: [] for name in by_name}
    for name, stage in by_name.items():
        for before in set(stage.waits_for):
            followers[before].append(name)

    def place(name: str) -> tuple[int, int, str]:
        stage = by_name[name]
        rank = 0 if stage.declared.trains or stage.declared.collects else 2
        return 1 if stage.declared.judges else rank, numbers[name], name

    ready = [place(name) for name, count in left.items() if count == 0]
    # A heap rather than a topological sort by levels: of all that could run next the earliest block
    # runs, as the configuration is read.
    heapq.heapify(ready)
    while ready:
        *_, name = heapq.heappop(ready)
        yield by_name[name]
        for follower in followers[name]:
            left[follower] -= 1
            if left[follower] == 0:
                heapq.heappush(ready, place(follower))


def gate_of(stage: Stage, settings: RunSettings) -> GateSettings:
    """Return the settings of a gate's stage."""
    gate = settings.stages[stage.block].gated if stage.block else None
    assert gate is not None, "the graph has no gate without settings of one"
    return gate


def problems(reads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stage's problems and data among all that it reads."""
    return {
        key: value
        for key, value in reads.items()
        if any(matches(key, pattern) for pattern in PROBLEMS)
    }


def digest(value: Any) -> str:
    """Return the SHA-256 of the value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def rerun_options(stages: Sequence[Stage], names: Iterable[str]) -> str:
    """Return the shortest list of `--from` options that rerun the named stages."""
    stale, options = set(names), []
    rerun: set[str] = set()
    for stage in stages:  # inputs come first
        follows = not rerun.isdisjoint(stage.inputs)
        if stage.name in stale and not follows:
            options.append(f"--from {stage.name}")
        if stage.name in stale or follows:
            rerun.add(stage.name)
    return " ".join(options)
