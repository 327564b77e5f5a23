"""The one type of the data flow, created from an engine's response and only ever added to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass
class Sample:
    """A prompt and a response to it; a demonstration has neither log-probabilities nor routes.

    Example: a prompt of 3 tokens, and a response of 2, of which the second is the end token. Weight
    versions 11 and 12 sampled them; `routes` would be [4, routed layers, experts_per_token].

        >>> sample = Sample(
        ...     "math",
        ...     prompt=np.array([5, 9, 2], np.int32),
        ...     response=np.array([7, 0], np.int32),
        ...     logprobs=np.array([-0.3, -1.2], np.float32),  # nats
        ...     versions=np.array([11, 12], np.int32),
        ... )
        >>> sample.length, sample.weight_version  # the model reads 5, 9, 2 and 7
        (4, 11)
        >>> sample.learned.tolist()  # a loss_mask of None trains on all
        [0, 1]
    """

    domain: str
    # From the engine:
    prompt: np.ndarray  # int32 token ids
    response: np.ndarray  # int32 token ids
    logprobs: np.ndarray | None = None  # mu, of the sampled tokens, fp32 [response], in nats
    # The experts of every token but the last, which no forward pass reads; uint16
    # [prompt + response - 1, routed layers, experts_per_token].
    routes: np.ndarray | None = None
    versions: np.ndarray | None = None  # that each token was sampled with, int32 [response]
    # The int32 ids that top-p or top-k sampling left of the vocabulary, one array per token.
    kept: list[np.ndarray] | None = None
    loss_mask: np.ndarray | None = None  # bool [response], tokens to train on; None is all
    finished: bool = True  # the response ends with the end token
    # From the stage:
    problem: str = ""  # the content hash of its prompt; "" where none is known
    answer: str = ""  # the reference answer of its problem; "" where it has none
    reward: float | None = None  # None where it failed
    reward_parts: dict[str, float] | None = None  # by name, before they are weighted
    reward_messages: dict[str, str] | None = None  # what rewards said of their score, by name
    reward_failure: str | None = None  # why it has no reward
    step_rewards: list[tuple[int, float]] | None = None  # each with the step's last position
    group: int = 0  # number of the prompt within the training step
    demonstrated: bool = False  # given beside the policy's own samples, and not sampled
    teacher_prompt: np.ndarray | None = None  # int32, that a teacher reads instead of `prompt`
    advantage: float = 0.0  # the mean where tokens have their own
    advantages: np.ndarray | None = None  # fp32 [response]
    # What the trainer computed of each token, fp32 [response], by the column that records it.
    recorded: dict[str, np.ndarray] = field(default_factory=dict)

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

    def outline(self) -> Sample:
        """Return the sample for ranks that do not compute on it: every length, but no contents.

        `prompt` and `response` have shape [length, 0].
        """
        return replace(
            self,
            prompt=np.empty((len(self.prompt), 0), np.int32),
            response=np.empty((len(self.response), 0), np.int32),
            logprobs=None,
            routes=None,
            versions=None,
            kept=None,
            answer="",
            reward_parts=None,
            reward_messages=None,
            reward_failure=None,
            step_rewards=None,
            teacher_prompt=None,
            advantages=None,
        )
