"""The stages that the blocks of a run stand for, their names, and what their references mean.

A block with `for_each: domain` stands for one stage of each of its domains. A reference is the name
of a stage or of a block; a block with several stages means the one of the stage's own domain. What
contains a slash is the path of a model outside the run.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from parallel.errors import hint
from stages.domains import PolicySettings
from stages.kinds.distill.settings import DistillSettings, domain_of
from stages.kinds.distill.source_settings import SELF
from stages.kinds.dpo.settings import BestWorstPairSettings, DpoSettings
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.kind import KINDS, Inputs, StageSettings, Violations
from stages.kinds.rules import At
from stages.kinds.sample.settings import SampleSettings
from stages.objectives.loss import ObjectiveSettings
from stages.settings import RunSettings

GATE_PREFIX = "gates."
# Of BLOCK.DOMAIN; with "gates." and a suffix it stays below the 255 bytes of file systems.
LONGEST_NAME = 201
MOST_NAMED = 4  # stages of a block in one message
# By what a stage leaves: what to do where nothing reads it.
UNREAD = {
    "checkpoints": "evaluate or export the model, or delete the block",
    "data": "name it in `data` of another stage, or delete the block",
}
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a stage, which names a directory
WEIGHTED = ("stages", "*", "teachers", "*")  # a reference, or a mapping of references to weights
# The keys of references to stages and models, or of lists of them: paths where they have a slash.
REFERENCES: tuple[tuple[str, ...], ...] = (
    ("stages", "*", "from"),
    ("stages", "*", "teachers"),
    WEIGHTED,
    ("stages", "*", "models"),
    ("stages", "*", "models", "*"),
    ("stages", "*", "objective", "kl", "reference"),
    ("domains", "*", "objective", "kl", "reference"),
    ("stages", "*", "data", "*", "stage"),
    ("stages", "*", "reference"),
    ("stages", "*", "method", "start"),
)


def is_path(reference: str) -> bool:
    """Return whether a reference is the path of a model outside the run."""
    return "/" in reference


@dataclass(frozen=True)
class Unrolled:
    """A stage of a block: its name, its domains, and its only one where the block has others."""

    name: str
    block: str
    settings: StageSettings
    domains: tuple[str, ...]
    domain: str | None

    @property
    def key(self) -> str:
        """The key of its block."""
        return f"stages.{self.block}"

    @property
    def seeded_as(self) -> str:
        """The name that its random numbers derive from: its first one."""
        if (template := self.settings.was) is None:
            return self.name
        if self.settings.for_each and "{domain}" not in template:
            template = f"{template}.{{domain}}"  # as the stages of a block without `as` are named
        return _named(template, self.domain)

    @property
    def gate(self) -> str | None:
        """The name of its gate, None where it has none."""
        gate = self.settings.gated
        # With for_each a gate of some domains leaves the stages of the others ungated.
        measured = set(self.domains) & set(gate.domains or self.domains) if gate else ()
        return f"{GATE_PREFIX}{self.name}" if measured else None


class Blocks:
    """The blocks of a run, unrolled."""

    def __init__(self, run: RunSettings) -> None:
        self.run = run
        self.stages = [stage for name in run.stages for stage in _unrolled(run, name)]
        self._inputs: dict[tuple[str, str | None], Inputs] = {}

    @cached_property
    def by_name(self) -> dict[str, Unrolled]:
        """The stages by name; of two with one name the first, so that references keep theirs."""
        stages: dict[str, Unrolled] = {}
        for stage in self.stages:
            stages.setdefault(stage.name, stage)
        return stages

    @cached_property
    def _by_block(self) -> dict[str, list[Unrolled]]:
        stages: dict[str, list[Unrolled]] = {name: [] for name in self.run.stages}
        for stage in self.stages:
            stages[stage.block].append(stage)
        return stages

    @cached_property
    def _of_domain(self) -> dict[tuple[str, str | None], str]:
        """The stage of each domain of the blocks that have several."""
        return {(stage.block, stage.domain): stage.name for stage in self.stages}

    def among(self, names: Collection[str] | None) -> list[Unrolled]:
        """Return the stages that `names` has, or whose gates it has; all where it is None."""
        return [
            stage for stage in self.stages if names is None or {stage.name, stage.gate} & {*names}
        ]

    def resolve(self, reference: str, domain: str | None = None) -> str | None:
        """Return the stage, or the path, that a reference means; None where it means none.

        `domain` is that of the stage that refers, or of its teacher.
        """
        reference = _named(reference, domain)
        if is_path(reference) or reference in self.by_name:
            return reference
        if len(alike := self._by_block.get(reference, [])) == 1:
            return alike[0].name
        return self._of_domain.get((reference, domain))

    def inputs(self, stage: Unrolled) -> Inputs:
        """Return the inputs of a stage as they are named."""
        key = stage.block, stage.domain
        if key not in self._inputs:  # kept: every rule asks again
            self._inputs[key] = stage.settings.inputs(self.run, stage.domains)
        return self._inputs[key]

    def references(self, stage: Unrolled) -> Iterator[tuple[str, str, str | None, str]]:
        """Yield every reference of a stage: its key, itself, the domain, and what it must leave.

        That is empty for a stage that is only waited for.
        """
        inputs, block, key = self.inputs(stage), stage.settings, stage.key
        if inputs.parent is not None:
            yield f"{key}.{block.key_of('parent')}", inputs.parent, stage.domain, "checkpoints"
        for label, name in inputs.teachers.items():
            at = f"{key}.{block.key_of('teachers', label)}"
            yield at, name, domain_of(label), "checkpoints"
        for domain, name in inputs.references.items():
            if isinstance(block, GrpoSettings):
                where = "objective.kl.reference"  # in the block, or in its domain
                yield block.keys(key, stage.domains, domain)(where), name, domain, "checkpoints"
            else:
                yield f"{key}.{block.key_of('references', domain)}", name, domain, "checkpoints"
        for known_as, name in inputs.models.items():
            at = f"{key}.{block.key_of('models', known_as)}"
            yield at, name, stage.domain, "checkpoints"
        for source, name in inputs.data.items():
            yield f"{key}.{block.key_of('data', source)}", name, stage.domain, "data"
        for name in block.after:
            yield f"{key}.after", name, stage.domain, ""


def policies(
    run: RunSettings, starting: Collection[str] | None = None
) -> Iterator[tuple[At, PolicySettings, ObjectiveSettings]]:
    """Yield every policy that trains on rewards, with each of its objectives and their keys.

    Two stages that state nothing themselves share their domain's. With `starting`, only the
    policies of these stages.
    """
    by_key: dict[str, tuple[At, PolicySettings, ObjectiveSettings]] = {}
    for stage in Blocks(run).among(starting):
        if not isinstance(block := stage.settings, GrpoSettings) or not stage.domains:
            continue  # without domains, `graph_rules` reports it
        policy = block.policy(run, stage.domains)
        for domain, objective in block.objectives(run, stage.domains).items():
            at = block.keys(stage.key, stage.domains, domain)
            by_key.setdefault(at("objective"), (at, policy, objective))
    yield from by_key.values()


def _named(template: str, domain: str | None) -> str:
    return template.replace("{domain}", domain) if domain else template


def _unrolled(run: RunSettings, block: str) -> list[Unrolled]:
    settings = run.stages[block]
    domains = run.domains_of(settings)
    if settings.for_each is None:
        only = domains[0] if len(domains) == 1 else None
        return [Unrolled(settings.as_ or block, block, settings, domains, only)]
    template = settings.as_ or f"{block}.{{domain}}"
    return [
        Unrolled(_named(template, domain), block, settings, (domain,), domain) for domain in domains
    ]


def graph_rules(run: RunSettings) -> Violations:
    """Yield everything that keeps the blocks from being a graph of stages."""
    wrong = [*_block_rules(run)]
    yield from wrong
    if wrong:
        return
    blocks = Blocks(run)
    # The stages of a block say the same.
    broken = dict.fromkeys(chain(_name_rules(blocks), _reference_rules(blocks)))
    yield from broken
    if not broken:
        yield from _cycle_rules(blocks)


def unread(run: RunSettings) -> Violations:
    """Yield each block of which stages train or collect what nothing reads.

    An evaluation, an export and a gate read a model; a stage that only waits for another does not.
    """
    blocks = Blocks(run)
    read = {
        blocks.resolve(reference, domain)
        for stage in blocks.stages
        for _, reference, domain, leaves in blocks.references(stage)
        if leaves
    }
    every = any(blocks.inputs(stage).every_model for stage in blocks.stages)
    unread_stages: dict[str, list[Unrolled]] = {}
    for stage in blocks.stages:
        leaves = KINDS[stage.settings.kind].leaves
        measured = leaves == "checkpoints" and (every or stage.gate is not None)
        if leaves in UNREAD and stage.name not in read and not measured:
            unread_stages.setdefault(stage.key, []).append(stage)
    for key, stages in unread_stages.items():
        leaves = KINDS[stages[0].settings.kind].leaves
        names = [stage.name for stage in stages[:MOST_NAMED]]
        more = f" and {len(stages) - MOST_NAMED} more" if len(stages) > MOST_NAMED else ""
        yield key, f"no stage reads the {leaves} of {', '.join(names)}{more}; {UNREAD[leaves]}"


def unread_keys(run: RunSettings) -> Violations:
    """Yield each key of a merge's method that differs from its default and is not read."""
    for name, block in run.stages.items():
        if not isinstance(block, DistillSettings):
            continue
        for key, reader in block.method.unread():
            if getattr(block.method, key) != type(block.method).model_fields[key].default:
                why = f"only read with {reader}; set that, or delete the key"
                yield f"stages.{name}.method.{key}", why


def _paired(
    blocks: Blocks, starting: Collection[str] | None = None
) -> Iterator[tuple[str, Unrolled, SampleSettings]]:
    """Yield each source of preference pairs that a stage of the run samples: key, stage, block."""
    for stage in blocks.among(starting):
        data = stage.settings.data if isinstance(stage.settings, DpoSettings) else {}
        for name, source in data.items():
            if not isinstance(source, BestWorstPairSettings) or is_path(source.stage):
                continue
            sampling_stage = blocks.by_name[blocks.resolve(source.stage, stage.domain) or ""]
            if isinstance(sampling_stage.settings, SampleSettings):
                yield f"{stage.key}.data.{name}.stage", sampling_stage, sampling_stage.settings


def pair_rules(run: RunSettings, starting: Collection[str] | None) -> Violations:
    """Yield each source of pairs whose stage keeps one response to a prompt."""
    blocks = Blocks(run)
    for key, stage, settings in _paired(blocks, starting):
        sizes = {settings.sampled(blocks.run, domain).group_size for domain in stage.domains}
        least = "a pair needs two responses to a prompt, and"
        if settings.keep.per_prompt == 1:
            yield key, f"{least} {stage.key}.keep.per_prompt = 1 keeps one; use null, or 2"
        elif sizes == {1}:
            where = stage.key if settings.sampling else f"domains.{stage.domains[0]}"
            yield key, f"{least} {where}.sampling.group_size = 1 samples one; sample more"


def pairless(run: RunSettings) -> Violations:
    """Yield each source of pairs whose stage keeps only responses of the highest reward.

    That is the sum of the weights where each reward is at most 1.
    """
    cautions: dict[str, str] = {}
    for key, stage, settings in _paired(Blocks(run)):
        rewards = [run.domains[name].rewards.values() for name in stage.domains]
        highest = max(
            sum(max(reward.weight, 0.0) for reward in domain_rewards) for domain_rewards in rewards
        )
        if settings.keep.reward is not None and settings.keep.reward >= highest:
            cautions[key] = (
                f"{stage.key}.keep.reward = {settings.keep.reward:g} leaves no pair where each"
                " reward is at most 1: the two responses of a pair have different rewards; use null"
            )
    yield from cautions.items()


def _block_rules(run: RunSettings) -> Violations:
    for name, block in run.stages.items():
        key = f"stages.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
            yield (
                key,
                "a block's name must be 1 to 100 letters, digits, _ or -, and start with a letter "
                "or digit; `as` may have dots",
            )
        lists = {"domains": block.domains, "gate.domains": block.gated and block.gated.domains}
        domains = run.domains_of(block)
        for where, names in lists.items():
            for domain in names or ():
                if domain not in run.domains:
                    yield f"{key}.{where}", f"no such domain: {domain}; {hint(domain, run.domains)}"
                elif domain not in domains:
                    yield (
                        f"{key}.{where}",
                        f"{key}.domains leaves out {domain}, so no gate would measure it",
                    )
            if names == ():
                yield f"{key}.{where}", "must name at least one domain; null is all"
        if block.gated is not None and block.from_ is None:
            yield (
                f"{key}.gate",
                f"it compares the stage with what that starts from, and {key}.from is null",
            )
        for where, template in (("as", block.as_), ("was", block.was)):
            if template is None:
                continue
            if where == "as" and block.for_each and "{domain}" not in template:
                yield (
                    f"{key}.{where}",
                    f"{template} would name the stages of all domains alike; write "
                    f"{template}.{{domain}}",
                )
            elif not re.fullmatch(NAME, template.replace("{domain}", "domain")):
                written = template or '""'
                why = f"{written} must be letters, digits, _, - or ., since it names a directory"
                yield f"{key}.{where}", why
        if block.as_ and "{domain}" in block.as_ and not block.for_each:
            yield f"{key}.as", f"{block.as_} has no domain without for_each: domain; add that"


def _name_rules(blocks: Blocks) -> Violations:
    """Yield names that are too long, or that two stages have, at the later one's block.

    Of several names that the same two blocks give, the first.
    """
    by_name: dict[str, Unrolled] = {}
    pairs: set[tuple[str, str]] = set()
    for stage in blocks.stages:
        if len(stage.name) > LONGEST_NAME:
            yield (
                f"{stage.key}.as",
                f"a stage would have a name of {len(stage.name)} characters, which names a "
                f"directory; at most {LONGEST_NAME} are allowed",
            )
        if SELF in (stage.name, stage.block):
            why = f"{SELF} is the student itself in `teachers` of a merge; choose another name"
            yield stage.key, why
        for name in filter(None, (stage.name, stage.gate)):
            other = by_name.setdefault(name, stage)
            if other is not stage and (stage.key, other.key) not in pairs:
                pairs.add((stage.key, other.key))
                yield (
                    stage.key,
                    f"two stages would be named {name}, of this block and of {other.key}; rename "
                    "a block, or set `as`",
                )


def _reference_rules(blocks: Blocks) -> Violations:
    for stage in blocks.stages:
        for key, reference, domain, leaves in blocks.references(stage):
            if (target := blocks.resolve(reference, domain)) is None:
                yield key, _unresolved(blocks, reference, domain)
            elif is_path(target):
                if not leaves:
                    yield key, f"{reference} is a path; only stages of the run can be waited for"
            elif leaves and (left := KINDS[blocks.by_name[target].settings.kind].leaves) != leaves:
                yield key, f"{target} leaves {left}, and {leaves} are needed here"


def _unresolved(blocks: Blocks, reference: str, domain: str | None) -> str:
    alike = [stage.name for stage in blocks.stages if stage.block == reference]
    if domain and len(alike) > 1:
        return f"{reference} has no stage of the domain {domain}; it has {', '.join(alike)}"
    if alike:
        return f"{reference} stands for {len(alike)} stages: name one of {', '.join(alike)}"
    names = dict.fromkeys([*blocks.by_name, *blocks.run.stages])
    return f"no such stage: {reference or json.dumps(reference)}; {hint(reference, names)}"


def _cycle_rules(blocks: Blocks) -> Violations:
    """Yield a cycle once, at the reference of its first stage; of several at one key the first."""
    waits: dict[str, dict[str, str]] = {stage.name: {} for stage in blocks.stages}
    for stage in blocks.stages:
        for key, reference, domain, _ in blocks.references(stage):
            if (target := blocks.resolve(reference, domain)) and not is_path(target):
                waits[stage.name].setdefault(target, key)
    messages: dict[str, str] = {}
    for path in _cycles({name: [*targets] for name, targets in waits.items()}):
        messages.setdefault(waits[path[0]][path[1]], f"dependency cycle: {' -> '.join(path)}")
    yield from messages.items()


def _cycles(waits: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Yield every cycle that a walk along the first references finds, without recursion."""
    done: set[str] = set()
    for start in waits:
        path: list[str] = []
        # Counted, since `in path` would make a chain of 1,000 domains quadratic.
        places: Counter[str] = Counter()
        stack = [(start, iter(waits[start]))] if start not in done else []
        path += [name for name, _ in stack]
        places.update(path)
        while stack:
            name, following = stack[-1]
            step = next((successor for successor in following if successor not in done), None)
            if step is None:
                done.add(name)
                stack.pop()
                path.pop()
                places[name] -= 1
            elif places[step]:
                yield [*path[path.index(step) :], step]
            else:
                stack.append((step, iter(waits[step])))
                path.append(step)
                places[step] += 1
