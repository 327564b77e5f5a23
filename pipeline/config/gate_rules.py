"""Rules about gates: what they bound has to be logged, and what they measure to be enough."""

from __future__ import annotations

from collections.abc import Iterator

from stages.settings import DomainSettings, RunSettings

Found = Iterator[tuple[str, str]]


def gate_rules(run: RunSettings) -> Found:
    """Yield every broken rule of a run's gates as (dotted key, message)."""
    gates = {f"domains.{name}.gate": each.gate for name, each in run.domains.items()}
    for key, gate in {**gates, "merge.gate": run.merge and run.merge.gate}.items():
        if gate and gate.problems < run.layout.data:
            yield (
                f"{key}.problems",
                f"{gate.problems} is less than the {run.layout.data} data-parallel ranks of layout,"
                " and each needs one",
            )
    for name, domain in run.domains.items():
        yield from bound_rules(f"domains.{name}", domain)
    namesake = run.domains.get("merge")
    if namesake and namesake.gate and run.merge and run.merge.gate:
        yield (
            "domains.merge",
            "its gate and that of the merge are both gates.merge; rename the domain",
        )


def bound_rules(key: str, domain: DomainSettings) -> Found:
    """Bounds of metrics that the expert never logs."""
    gate, kl, rollout = domain.gate, domain.objective.kl, domain.rollout
    if gate is None:
        return
    if gate.max_kl is not None and kl.coefficient == 0:
        yield (
            f"{key}.gate.max_kl",
            f"{gate.max_kl:g} bounds a metric that is not logged with "
            f"{key}.objective.kl.coefficient = 0; use null, or a coefficient above 0",
        )
    if gate.max_drift is not None and rollout.mode == "sync" and rollout.oversampling == 1:
        yield (
            f"{key}.gate.max_drift",
            f"{gate.max_drift:g} bounds a metric that is not logged with {key}.rollout.mode = sync "
            "and no oversampling, where no sample is old; use null",
        )
    if gate.min_router_agreement is not None and domain.routing.replay != "r3":
        yield (
            f"{key}.gate.min_router_agreement",
            f"{gate.min_router_agreement:g} bounds a metric that is not logged with "
            f"{key}.routing.replay = {domain.routing.replay}; use null, or r3",
        )
    if gate.max_router_movement is not None and not domain.objective.ratio.needs_router_shift:
        yield (
            f"{key}.gate.max_router_movement",
            f"{gate.max_router_movement:g} bounds a metric that is logged with "
            f"{key}.objective.ratio.name = rspo alone; use null",
        )
