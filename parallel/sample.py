"""The one type that flows: born in the rollout engine, and only ever added to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Sample:
    """One prompt and one response to it.

    A demonstration has neither log-probabilities nor routes. Tokens are int32; `logprobs` is mu,
    fp32 in nats, [response]; `routes` holds the experts of every token but the last, which no
    forward pass reads: uint16 [prompt + response - 1, routed layers, experts_per_token].
    `versions`, int32 [response], says which weights each token was drawn with, and `kept`, int32
    each, from which set, where top-p or top-k left some of the vocabulary out. `loss_mask`, bool
    [response], says which tokens are learned, where some of them are only read, such as another's
    turn in a conversation.

    The stage adds the `reward`, None where it failed; where there are such, its parts by name,
    before they are weighed, and the rewards of its steps, each with the place in the response of
    the step's last token; then the `group`, the number of its prompt among those of the step, and
    the `advantage`. `advantages`, fp32 [response], are there where tokens have their own, of which
    `advantage` is then the mean.
    """

    domain: str
    prompt: np.ndarray
    response: np.ndarray
    logprobs: np.ndarray | None = None
    routes: np.ndarray | None = None
    versions: np.ndarray | None = None
    kept: list[np.ndarray] | None = None
    loss_mask: np.ndarray | None = None
    finished: bool = True
    reward: float | None = None
    reward_parts: dict[str, float] | None = None
    step_rewards: list[tuple[int, float]] | None = None
    group: int = 0
    advantage: float = 0.0
    advantages: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Tokens the model reads: all but the last."""
        return len(self.prompt) + len(self.response) - 1

    @property
    def learned(self) -> np.ndarray:
        """The places int64 of the response's tokens that are learned."""
        if self.loss_mask is None:
            return np.arange(len(self.response))
        return np.flatnonzero(self.loss_mask)

    @property
    def weight_version(self) -> int:
        """Of the oldest weights that drew any of it; 0 for a demonstration."""
        return 0 if self.versions is None or not len(self.versions) else int(self.versions.min())
