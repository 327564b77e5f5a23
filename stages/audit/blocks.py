"""The stages of a recorded run by its run.yaml: kind, domains, settings and inputs of each.

run.yaml is read as plain data, independently of the code that compiled it into stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.audit.recorded import NotAuditable, RecordedRun, document, naming

GATE = "gates."
# Of a policy; a stage that does not state one takes it from its only domain.
OF_DOMAIN = (
    *("sampling", "rollout", "objective", "routing", "optimizer", "updates_per_rollout", "loop"),
    *("guards", "stop"),
)


@dataclass(frozen=True)
class RecordedStage:
    """A stage as run.yaml describes it.

    `settings` are those it trains with. `parent`, `teachers` (by domain) and `reference` name
    stages, or are paths of models outside the run.
    """

    name: str
    kind: str
    domains: tuple[str, ...]
    settings: dict[str, Any]
    parent: str | None = None
    teachers: dict[str, str] | None = None
    reference: str | None = None


def recorded_stage(run: RecordedRun, name: str) -> RecordedStage:
    """Return a stage of the run, or a gate.

    Raises:
        NotAuditable: run.yaml has no such stage, or its blocks are damaged.
    """
    with naming(run.path / "run.yaml"):
        stages = {stage: (block, domains) for stage, block, domains in _unrolled(run)}
        if (gated := name.removeprefix(GATE)) != name and gated in stages:
            return RecordedStage(name, "gate", stages[gated][1], {})
        if name not in stages:
            raise NotAuditable(f"{run.path}/run.yaml has no stage {name}")
        block, domains = stages[name]
        own = run.settings["stages"][block]
        settings = _policy(run, name, own, domains) if own["kind"] == "grpo" else own
        only = domains[0] if len(domains) == 1 else None
        teachers = own.get("teachers") or {}
        if isinstance(teachers, str):
            teachers = dict.fromkeys(domains, teachers)
        kl = (settings.get("objective") or {}).get("kl", {})
        parent = own["from"] and _resolved(run, own["from"], only)
        return RecordedStage(
            name,
            own["kind"],
            domains,
            settings,
            parent,
            {each: _resolved(run, teachers[each], each) for each in domains if each in teachers},
            _reference(run, name, kl, domains) or parent,
        )


def _reference(
    run: RecordedRun, stage: str, kl: dict[str, Any], domains: tuple[str, ...]
) -> str | None:
    """Return the model that a KL penalty names; None where that is the parent, or an average."""
    if not kl.get("coefficient") or kl["reference"] in ("parent", "ema"):
        return None
    found = {_resolved(run, kl["reference"], domain) for domain in domains}
    if len(found) > 1:
        raise NotAuditable(
            f"the domains of {stage} have different references, which are not audited together"
        )
    return found.pop()


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
    reference = reference.replace("{domain}", domain) if domain else reference
    stages = list(_unrolled(run))
    if "/" in reference or any(name == reference for name, _, _ in stages):
        return reference
    of_block = [(name, domains) for name, block, domains in stages if block == reference]
    found = [name for name, own in of_block if len(of_block) == 1 or own == (domain,)]
    if len(found) != 1:
        raise NotAuditable(f"{run.path}/run.yaml: {reference} names no stage")
    return found[0]


def _policy(
    run: RecordedRun, stage: str, own: dict[str, Any], domains: tuple[str, ...]
) -> dict[str, Any]:
    """Return the settings of a policy: what the stage states, and else its only domain's.

    On several domains, run.yaml does not have the defaults of what is not stated; the manifest has.
    """
    stated = {key: own[key] for key in OF_DOMAIN if own[key] is not None}
    if len(domains) == 1:
        return {**{key: run.settings["domains"][domains[0]][key] for key in OF_DOMAIN}, **stated}
    objectives = [run.settings["domains"][each]["objective"] for each in domains]
    if "objective" not in stated and any(each != objectives[0] for each in objectives):
        raise NotAuditable(
            f"the domains of {stage} have different objectives, which are not audited together"
        )
    return {**_recorded(run, stage), "objective": objectives[0], **stated}


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
