"""The experts that recorded samples used: tokens by domain, layer and expert, a file a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow

from parallel.sample import Sample
from stages.sampling.observed import is_recorded
from stages.sampling.sample_files import write_table

# `slots[e]` of a routed layer are the tokens, of a domain's recorded samples, that expert e was
# among the chosen of; in all, tokens times experts_per_token.
SCHEMA = pyarrow.schema(
    {
        "step": pyarrow.int32(),
        "domain": pyarrow.string(),
        "layer": pyarrow.int32(),
        "slots": pyarrow.list_(pyarrow.int64()),
    }
)


def record_loads(
    path: Path, step: int, samples: Sequence[Sample], experts: int, share: float
) -> dict[str, float]:
    """Write how often each expert was chosen, by the samples of the share of prompts.

    Return the metric `idle_experts`. Nothing is written, and nothing returned, where no engine gave
    its routes, as with `routing.replay: none`.

    Raises:
        OSError: such as a full disk.
    """
    by_domain: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        if sample.routes is not None and is_recorded(sample, share):
            by_domain.setdefault(sample.domain, []).append(sample.routes)
    if not by_domain:
        return {}
    slots = {domain: expert_slots(routes, experts) for domain, routes in sorted(by_domain.items())}
    rows = [
        {"step": step, "domain": domain, "layer": layer, "slots": layer_slots}
        for domain, domain_slots in slots.items()
        for layer, layer_slots in enumerate(domain_slots)
    ]
    write_table(path, rows, SCHEMA)
    used = np.any([domain_slots > 0 for domain_slots in slots.values()], axis=0)
    return {"idle_experts": float(1 - used.mean())}


def expert_slots(routes: Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Return how often each expert is in routes [tokens, layers, K]; int64 [layers, experts]."""
    layers = routes[0].shape[1]
    counts = np.zeros(layers * experts, np.int64)
    layer_offsets = np.arange(layers)[:, None] * experts  # a layer's experts follow those before it
    for sample_routes in routes:
        counts += np.bincount(
            (sample_routes.astype(np.int64) + layer_offsets).ravel(), minlength=len(counts)
        )
    return counts.reshape(layers, experts)
