"""The stages of a recorded run by its run.yaml: kind, domains, settings and inputs of each.

run.yaml is read as plain data, independently of the code that compiled it into stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.audit.recorded import NotAuditable, RecordedRun, document, naming

GATE = "gates."
SELF = "self"  # in place of a teacher: the student
SHARED = ""
# Of a policy; a stage that does not state one takes it from its only domain.
OF_DOMAIN = (
    *("sampling", "rollout", "objective", "routing", "optimizer", "updates_per_rollout", "loop"),
    *("guards", "stop"),
)


@dataclass(frozen=True)
class RecordedObjective:
    """An objective of rewards, the domains that it is of, and the reference of its KL penalty.

    `name` is the domain's, or `SHARED` where all domains of the stage have the same objective.
    """

    name: str
    domains: tuple[str, ...]
    settings: dict[str, Any]
    reference: str | None


@dataclass(frozen=True)
class RecordedStage:
    """A stage as run.yaml describes it.

    `settings` are those it trains with, but for the `objectives` of a policy. `parent`, `teachers`
    (by domain) and `reference`, that of preference pairs, name stages, or are paths of models
    outside the run. Its random numbers derive from `seeded_as`.
    """

    name: str
    kind: str
    domains: tuple[str, ...]
    settings: dict[str, Any]
    parent: str | None = None
    teachers: dict[str, str] | None = None
    reference: str | None = None
    objectives: tuple[RecordedObjective, ...] = ()
    seeded_as: str = ""


def recorded_stage(run: RecordedRun, name: str) -> RecordedStage:
    """Return a stage of the run, or a gate.

    Raises:
        NotAuditable: run.yaml has no such stage, or its blocks are damaged.
    """
    with naming(run.path / "run.yaml"):
        stages = {stage: (block, domains) for stage, block, domains in _unrolled(run)}
        if (gated := name.removeprefix(GATE)) != name and gated in stages:
            block, domains = stages[gated]
            return RecordedStage(name, "gate", domains, run.settings["stages"][block]["gate"])
        if name not in stages:
            raise NotAuditable(f"{run.path}/run.yaml has no stage {name}")
        block, domains = stages[name]
        own = run.settings["stages"][block]
        settings = _policy(run, name, own, domains) if own["kind"] == "grpo" else own
        only = domains[0] if len(domains) == 1 else None
        teachers = _teachers(own, name, domains)
        parent = own["from"] and _resolved(run, own["from"], only)
        was = own.get("was", own.get("seeded_as"))  # its key in older versions
        if was and own["for_each"] and "{domain}" not in was:
            was = f"{was}.{{domain}}"
        return RecordedStage(
            name,
            own["kind"],
            domains,
            settings,
            parent,
            {each: _resolved(run, teachers[each], each) for each in domains if each in teachers},
            _model(run, own["reference"], parent, only) if own["kind"] == "dpo" else None,
            tuple(_objectives(run, own, domains, parent)) if own["kind"] == "grpo" else (),
            _placed(was or name, only),
        )


def _teachers(own: dict[str, Any], stage: str, domains: tuple[str, ...]) -> dict[str, str]:
    """Return the teacher of each domain as it is named."""
    given = own.get("teachers") or {}
    if isinstance(given, str):
        given = dict.fromkeys(domains, given)
    found = {}
    for domain, named in given.items():
        if isinstance(named, dict) and domain in domains and len(named) > 1:
            raise NotAuditable(f"{stage}: {domain} has several teachers, which are not audited")
        found[domain] = next(iter(named)) if isinstance(named, dict) else named
        if domain in domains and found[domain] == SELF:
            raise NotAuditable(
                f"{stage} has the teacher {SELF}, whose contexts are not recorded: it is not"
                " audited"
            )
    return found


def _model(run: RecordedRun, named: str, parent: str | None, domain: str | None) -> str | None:
    """Return the model that a reference names; the stage's parent where it is, or starts as, it."""
    return parent if named in ("parent", "ema") else _resolved(run, named, domain)


def _unrolled(run: RecordedRun) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield every stage's name, block and domains."""
    for block, own in run.settings["stages"].items():
        named = run.settings["domains"] if own["domains"] is None else own["domains"]
        domains = tuple(each for each in run.settings["domains"] if each in named)
        if own["for_each"] is None:
            yield own["as"] or block, block, domains
            continue
        template = own["as"] or block + ".{domain}"
        for domain in domains:
            yield template.replace("{domain}", domain), block, (domain,)


def _resolved(run: RecordedRun, reference: str, domain: str | None) -> str:
    """Return the stage or path that a reference means in a stage of `domain`."""
    reference = _placed(reference, domain)
    stages = list(_unrolled(run))
    if "/" in reference or any(name == reference for name, _, _ in stages):
        return reference
    of_block = [(name, domains) for name, block, domains in stages if block == reference]
    found = [name for name, own in of_block if len(of_block) == 1 or own == (domain,)]
    if len(found) != 1:
        raise NotAuditable(f"{run.path}/run.yaml: {reference} names no stage")
    return found[0]


def _placed(template: str, domain: str | None) -> str:
    """Return a name with the domain in it."""
    return template.replace("{domain}", domain) if domain else template


def _objectives(
    run: RecordedRun, own: dict[str, Any], domains: tuple[str, ...], parent: str | None
) -> Iterator[RecordedObjective]:
    """Yield the objectives of a policy: one where settings and references of all are equal."""
    found = [own["objective"] or run.settings["domains"][domain]["objective"] for domain in domains]
    references = [
        _model(run, each["kl"]["reference"], parent, domain) if each["kl"]["coefficient"] else None
        for each, domain in zip(found, domains, strict=True)
    ]
    each = list(zip(found, references, strict=True))
    if all(other == each[0] for other in each):
        yield RecordedObjective(SHARED, domains, *each[0])
    else:
        for domain, (settings, reference) in zip(domains, each, strict=True):
            yield RecordedObjective(domain, (domain,), settings, reference)


def _policy(
    run: RecordedRun, stage: str, own: dict[str, Any], domains: tuple[str, ...]
) -> dict[str, Any]:
    """Return the settings of a policy: what the stage states, and else its only domain's.

    On several domains, run.yaml does not have the defaults of what is not stated; the manifest has.
    """
    stated = {key: own[key] for key in OF_DOMAIN if own[key] is not None}
    if len(domains) == 1:
        return {**{key: run.settings["domains"][domains[0]][key] for key in OF_DOMAIN}, **stated}
    return {**_recorded(run, stage), **stated}


def _recorded(run: RecordedRun, stage: str) -> dict[str, Any]:
    """Return the settings of a stage's own block by its manifest, as nested mappings."""
    path = run.stage(stage) / "manifest.json"
    if not path.exists():
        raise NotAuditable(f"no {path}: {stage} has not started")
    found: dict[str, Any] = {}
    for key, value in document(path)["settings"].items():
        *above, last = key.split(".")
        if key.split(".")[0] in OF_DOMAIN:
            block = found
            for part in above:
                block = block.setdefault(part, {})
            block[last] = value
    return found
