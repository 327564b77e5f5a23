"""The one type of the data flow, created from an engine's response and only ever added to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Sample:
    """A prompt and a response to it.

    From the engine:
        prompt, response: int32 token ids.
        logprobs: mu, of the sampled tokens, fp32 [response], in nats.
        routes: experts of every token but the last, which no forward pass reads; uint16
            [prompt + response - 1, routed layers, experts_per_token].
        versions: weight version that each token was sampled with, int32 [response].
        kept: int32 ids that top-p or top-k sampling left of the vocabulary, one array per token.
        loss_mask: tokens to train on, bool [response]; None trains on all of them.
        finished: the response ends with the end token.
    A demonstration has neither log-probabilities nor routes.

    From the stage:
        reward: None where the reward failed.
        reward_parts: its parts by name, before they are weighted.
        step_rewards: rewards of steps, each with the position of the step's last token.
        group: number of the prompt within the training step.
        advantage, advantages: per sample, and fp32 [response] where tokens have their own; then
            `advantage` is their mean.
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
        """The number of tokens that the model reads: all but the last."""
        return len(self.prompt) + len(self.response) - 1

    @property
    def learned(self) -> np.ndarray:
        """The positions in the response, int64, of the tokens to train on."""
        if self.loss_mask is None:
            return np.arange(len(self.response))
        return np.flatnonzero(self.loss_mask)

    @property
    def weight_version(self) -> int:
        """The oldest weight version that any token was sampled with; 0 for a demonstration."""
        return 0 if self.versions is None or not len(self.versions) else int(self.versions.min())
