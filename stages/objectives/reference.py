"""The reference model of the KL penalty."""

from __future__ import annotations

import torch

from parallel.batch import MicroBatch
from parallel.checkpoint import load
from parallel.model.policy import Policy, TrainedPolicy
from stages.objectives.kl import KLSettings
from stages.settings import StageJob

AVERAGE = "ema"


class Reference:
    """The stage's parent, the cold start, or an exponential moving average of the policy (`ema`).

    The average is kept in fp32, since bf16 would round small steps away, and is saved with the
    policy's checkpoints.
    """

    def __init__(self, job: StageJob, policy: TrainedPolicy, settings: KLSettings) -> None:
        self._settings = settings
        self._trained = policy
        model = job.settings.model
        origin = job.parent
        if settings.reference == AVERAGE:
            model = model.model_copy(update={"precision": "fp32"})
        if settings.reference == "cold_start":
            origin = job.models["cold_start"]
        self._policy = Policy(model, job.settings.layout)
        assert origin is not None
        load.weights(self._policy, origin)
        if settings.reference == AVERAGE:
            policy.averages[AVERAGE] = self._policy

    def compute_logprobs(self, batches: list[MicroBatch], temperature: float) -> None:
        """Set the reference's log-probabilities, or its logits, in every batch. Collective.

        It never replays the engine's routes: it is another model than the one that sampled.
        """
        own_routing = [part.without_routes() for part in batches]
        # Both lists are empty except on the last pipeline stage.
        if self._settings.needs_logits:
            logits = self._policy.response_logits(own_routing)
            for part, values in zip(batches, logits, strict=False):
                part.reference = values
        else:
            logprobs = self._policy.target_logprobs(own_routing, temperature)
            for part, chosen in zip(batches, logprobs, strict=False):
                part.reference_logprobs = chosen

    @torch.no_grad()
    def update_ema(self) -> None:
        """Move the average towards the policy after an update; other references stay."""
        if self._settings.reference != AVERAGE:
            return
        current = self._trained.named_weights()
        for name, average in self._policy.named_weights().items():
            average.lerp_(current[name].to(average.dtype), 1 - self._settings.ema_decay)
