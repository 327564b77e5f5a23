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
        block_settings = run.settings["stages"][block]
        settings = (
            _policy(run, name, block_settings, domains)
            if block_settings["kind"] == "grpo"
            else block_settings
        )
        only = domains[0] if len(domains) == 1 else None
        teachers = _teachers(block_settings, name, domains)
        parent = block_settings["from"] and _resolved(run, block_settings["from"], only)
        was = block_settings.get("was", block_settings.get("seeded_as"))  # its older name
        if was and block_settings["for_each"] and "{domain}" not in was:
            was = f"{was}.{{domain}}"
        return RecordedStage(
            name,
            block_settings["kind"],
            domains,
            settings,
            parent,
            {
                domain: _resolved(run, teachers[domain], domain)
                for domain in domains
                if domain in teachers
            },
            _model(run, block_settings["reference"], parent, only)
            if block_settings["kind"] == "dpo"
            else None,
            tuple(_objectives(run, block_settings, domains, parent))
            if block_settings["kind"] == "grpo"
            else (),
            _placed(was or name, only),
        )


def _teachers(
    block_settings: dict[str, Any], stage: str, domains: tuple[str, ...]
) -> dict[str, str]:
    """Return the teacher of each domain as it is named."""
    teachers = block_settings.get("teachers") or {}
    if isinstance(teachers, str):
        teachers = dict.fromkeys(domains, teachers)
    teacher_of = {}
    for domain, teacher in teachers.items():
        if isinstance(teacher, dict) and domain in domains and len(teacher) > 1:
            raise NotAuditable(f"{stage}: {domain} has several teachers, which are not audited")
        teacher_of[domain] = next(iter(teacher)) if isinstance(teacher, dict) else teacher
        if domain in domains and teacher_of[domain] == SELF:
            raise NotAuditable(
                f"{stage} has the teacher {SELF}, whose contexts are not recorded: it is not"
                " audited"
            )
    return teacher_of


def _model(run: RecordedRun, reference: str, parent: str | None, domain: str | None) -> str | None:
    """Return the model that a reference names; the stage's parent where it is, or starts as, it."""
    return parent if reference in ("parent", "ema") else _resolved(run, reference, domain)


def _unrolled(run: RecordedRun) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield every stage's name, block and domains."""
    for block, block_settings in run.settings["stages"].items():
        stage_domains = (
            run.settings["domains"]
            if block_settings["domains"] is None
            else block_settings["domains"]
        )
        domains = tuple(domain for domain in run.settings["domains"] if domain in stage_domains)
        if block_settings["for_each"] is None:
            yield block_settings["as"] or block, block, domains
            continue
        template = block_settings["as"] or block + ".{domain}"
        for domain in domains:
            yield template.replace("{domain}", domain), block, (domain,)


def _resolved(run: RecordedRun, reference: str, domain: str | None) -> str:
    """Return the stage or path that a reference means in a stage of `domain`."""
    reference = _placed(reference, domain)
    stages = list(_unrolled(run))
    if "/" in reference or any(name == reference for name, _, _ in stages):
        return reference
    of_block = [(name, domains) for name, block, domains in stages if block == reference]
    matches = [name for name, domains in of_block if len(of_block) == 1 or domains == (domain,)]
    if len(matches) != 1:
        raise NotAuditable(f"{run.path}/run.yaml: {reference} names no stage")
    return matches[0]


def _placed(template: str, domain: str | None) -> str:
    """Return a name with the domain in it."""
    return template.replace("{domain}", domain) if domain else template


def _objectives(
    run: RecordedRun, block_settings: dict[str, Any], domains: tuple[str, ...], parent: str | None
) -> Iterator[RecordedObjective]:
    """Yield the objectives of a policy: one where settings and references of all are equal."""
    objectives = [
        block_settings["objective"] or run.settings["domains"][domain]["objective"]
        for domain in domains
    ]
    references = [
        _model(run, objective["kl"]["reference"], parent, domain)
        if objective["kl"]["coefficient"]
        else None
        for objective, domain in zip(objectives, domains, strict=True)
    ]
    pairs = list(zip(objectives, references, strict=True))
    if all(pair == pairs[0] for pair in pairs):
        yield RecordedObjective(SHARED, domains, *pairs[0])
    else:
        for domain, (settings, reference) in zip(domains, pairs, strict=True):
            yield RecordedObjective(domain, (domain,), settings, reference)


def _policy(
    run: RecordedRun, stage: str, block_settings: dict[str, Any], domains: tuple[str, ...]
) -> dict[str, Any]:
    """Return the settings of a policy: what the stage states, and else its only domain's.

    On several domains, run.yaml does not have the defaults of what is not stated; the manifest has.
    """
    # run.yaml writes null for a key that the stage leaves to its domain.
    stated = {key: block_settings[key] for key in OF_DOMAIN if block_settings[key] is not None}
    if len(domains) == 1:
        return {**{key: run.settings["domains"][domains[0]][key] for key in OF_DOMAIN}, **stated}
    return {**_recorded(run, stage), **stated}


def _recorded(run: RecordedRun, stage: str) -> dict[str, Any]:
    """Return the settings of a stage's own block by its manifest, as nested mappings."""
    path = run.stage(stage) / "manifest.json"
    if not path.exists():
        raise NotAuditable(f"no {path}: {stage} has not started")
    settings: dict[str, Any] = {}
    for key, value in document(path)["settings"].items():
        *above, last = key.split(".")
        if key.split(".")[0] in OF_DOMAIN:
            block = settings
            for name in above:
                block = block.setdefault(name, {})
            block[last] = value
    return settings
