"""Each domain's share of a merge: its weight in the loss, and what of the gradient is its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parallel.distributed import sum_over_data, sum_over_shards
from parallel.model.vocabulary import HeadLogits
from stages.kinds.distill.settings import DistillSettings


def weights_of(
    merge: DistillSettings, tokens: Mapping[str, int], gaps: Mapping[str, float]
) -> dict[str, float]:
    """Return each domain's weight in the loss; the weights sum to 1.

    `tokens` counts the update's learned tokens by domain. A domain without any has weight 0. `gaps`
    are nats a token to each teacher; until one is above 0, `gap` weighs domains alike.

    >>> merge = DistillSettings.model_construct(averaged_over="tokens", domain_weights={"code": 2})
    >>> weights_of(merge, {"math": 300, "code": 100}, gaps={})  # 300 and 2 x 100 of 500
    {'math': 0.6, 'code': 0.4}
    """
    by = {domain: float(count > 0) for domain, count in tokens.items()}
    if merge.averaged_over == "tokens":
        by = dict(tokens)
    elif merge.averaged_over == "gap" and any(gaps.values()):
        by = {domain: present * gaps.get(domain, 0.0) for domain, present in by.items()}
    weights = {domain: merge.domain_weights.get(domain, 1.0) * by[domain] for domain in tokens}
    total = sum(weights.values())
    return {domain: weight / max(total, 1e-9) for domain, weight in weights.items()}


def gradient_shares(slopes: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return `gradient_share` by domain, of this rank's sums by domain. Collective.

    The sums are of |d loss / d logit| over tokens and vocabulary. A share of the weights' gradient
    would need a backward pass and a gradient buffer for each domain; this one is exact for the
    gradient that enters the model, costs one read of it, and knows no cancellation between tokens.

    Example: rank 0 has {"math": 3.0, "code": 0.5}, rank 1 {"math": 0.0, "code": 0.5}: both get
        {"gradient_share/math": 0.75, "gradient_share/code": 0.25}
    """
    names = list(slopes)
    rank_sums = sum_over_shards(torch.stack([slopes[name] for name in names]))
    whole = sum_over_data(dict(zip(names, rank_sums.tolist(), strict=True)))
    total = sum(whole.values())
    return {f"gradient_share/{name}": whole[name] / (total or 1.0) for name in names}


def add_slope(total: torch.Tensor, logits: torch.Tensor | HeadLogits) -> None:
    """Add the logits' gradient, when it is computed, to `total` as the sum of absolute values."""

    def add(gradient: torch.Tensor) -> None:
        total.add_(torch.linalg.vector_norm(gradient, 1, dtype=torch.float32))

    assert isinstance(logits, torch.Tensor)
    logits.register_hook(add)
