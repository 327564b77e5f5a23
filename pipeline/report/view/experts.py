"""The experts that each domain of a stage uses more than the others do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel.errors import UserError
from pipeline.run.routing import owned, read_loads, summed
from pipeline.tables import table
from stages.directory import StageDirectory

MOST = 12  # of a domain
Owned = Mapping[str, Sequence[tuple[int, int, float]]]


def owned_by_domain(directory: StageDirectory) -> Owned:
    """Return, by domain, (layer, expert, times) over all recorded steps, the largest first.

    Raises:
        UserError: the stage has recorded no loads.
    """
    if not (loads := read_loads(directory)):
        raise UserError(
            f"{directory.path.name} has recorded no experts: it has not finished a step with"
            " samples, or routing.replay is none, or logging.tokens is 0"
        )
    return {domain: experts[:MOST] for domain, experts in owned(summed(loads)).items()}


def expert_table(owned_experts: Owned) -> str:
    """Return a line for each domain's expert: its share over its share in the other domains."""
    rows = [
        [domain, str(layer), str(expert), f"{times:.2f}"]
        for domain, experts in owned_experts.items()
        for layer, expert, times in experts
    ]
    title = (
        "experts of which a domain has at least twice its share in the other domains, or twice an"
        " equal share where there is no other; of all recorded steps"
    )
    return table(title, ("domain", "layer", "expert", "times"), rows, right=(1, 2, 3))
