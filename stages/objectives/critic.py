"""PPO's critic: a model of the return that is left at every token, for advantages by GAE."""

from __future__ import annotations

import torch

from parallel.batch import MicroBatch, Responses
from parallel.checkpoint import load
from parallel.device import device
from parallel.distributed import gather, sum_over_data
from parallel.model.policy import TrainedPolicy, ValueModel, values
from parallel.sample import Sample
from stages.objectives.advantages.gae import GaeSettings, clipped_value_loss, gae
from stages.objectives.aggregation import Totals, sequence_means, token_mean
from stages.objectives.graded import STD_FLOOR
from stages.settings import PolicySettings, StageJob

NAME = "critic"


class Critic:
    """A model that starts as the policy's parent, except its head, and is saved with the policy.

    It never replays the engine's routes: it is another model than the one that sampled.
    """

    def __init__(
        self, job: StageJob, policy: TrainedPolicy, settings: GaeSettings, expert: PolicySettings
    ) -> None:
        assert job.parent is not None
        self._settings = settings
        self._model = ValueModel(
            job.settings.model,
            job.settings.layout,
            settings.critic.optimizer,
            expert.loop.steps * expert.updates_per_rollout,
            expert.routing,
        )
        load.weights(self._model, job.parent, head=False)
        policy.companions[NAME] = self._model

    def learns_alone(self, step: int) -> bool:
        """Return true in the warmup steps, in which the policy is not trained."""
        return step <= self._settings.critic.warmup_steps

    def compute_values(self, samples: list[Sample], parts: list[MicroBatch]) -> None:
        """Set values, returns and advantages of this rank's micro-batches of `samples`.

        Advantages are standardised over all tokens of a domain's samples. Collective.
        """
        found = self._model.values([part.without_routes() for part in parts])
        valued = parts[: len(found)]  # empty except on the last pipeline stage
        for part, predicted in zip(valued, found, strict=True):
            part.values = predicted.masked_fill(~part.mask, 0.0)
            part.advantages = gae(rewards(part), part.values, part.mask, self._settings)
            part.returns = part.advantages + part.values
        for domain in sorted({sample.domain for sample in samples}):
            own = [  # its learned tokens
                part.mask
                & part.mask.new_tensor([each.domain == domain for each in part.samples]).view(-1, 1)
                for part in valued
            ]
            tokens, mean, squares = _moments(
                [part.advantages[where] for part, where in zip(valued, own, strict=True)]
            )
            freedom = tokens - (self._settings.std == "sample")
            deviation = (squares / max(freedom, 1)) ** 0.5
            for part, where in zip(valued, own, strict=True):
                standard = (part.advantages - mean) / (deviation + STD_FLOOR)
                part.advantages = standard.where(where, part.advantages)
        _record_means(samples, valued)

    def learn(self, samples: list[Sample], parts: list[MicroBatch]) -> dict[str, float]:
        """Train one step towards the returns, and return metrics. Collective."""
        totals = Totals(len(samples), sum(len(sample.learned) for sample in samples))
        clip = self._settings.critic.value_clip

        def loss(responses: Responses) -> tuple[torch.Tensor, float]:
            part = responses.batch
            assert part.values is not None and part.returns is not None
            each = clipped_value_loss(values(responses), part.values, part.returns, clip)
            result = token_mean(each, part.mask, totals)
            return result, result.item()

        read = sum(sample.length for sample in samples)
        found = self._model.accumulate([part.without_routes() for part in parts], loss, read)
        self._model.step()
        shares = sum_over_data({"value_loss": sum(found)})
        return {**shares, "value_explained_variance": _explained(parts)}


def rewards(part: MicroBatch) -> torch.Tensor:
    """Return the reward of each token, [B, R]; a response's tokens sum to its reward.

    Where steps have rewards, each step's last token gets its share of their mean. The rest is at
    the response's last token. A truncated response is not bootstrapped with a value: its reward
    already is the score of the whole.
    """
    earned = torch.zeros_like(part.advantages)
    for row, sample in zip(earned, part.samples, strict=True):
        assert sample.reward is not None
        steps = sample.step_rewards or []
        shares = [reward / len(steps) for _, reward in steps]
        for (end, _), share in zip(steps, shares, strict=True):
            row[end] += share
        row[len(sample.response) - 1] += sample.reward - sum(shares)
    return earned


def _explained(parts: list[MicroBatch]) -> float:
    """Return the share of the returns' variance that the values explain; 0 without variance."""
    known = [
        (part.returns[part.mask], part.values[part.mask])
        for part in parts
        if part.returns is not None and part.values is not None
    ]
    _, _, whole = _moments([returns for returns, _ in known])
    tokens, _, missed = _moments([returns - found for returns, found in known])
    return 1 - missed / whole if whole > tokens * STD_FLOOR**2 else 0.0


def _moments(tokens: list[torch.Tensor]) -> tuple[float, float, float]:
    """Return count, mean and sum of squared deviations of all ranks' values. Collective."""
    own = torch.cat([torch.zeros(0, device=device()), *tokens]).double()
    sums = sum_over_data({"tokens": float(len(own)), "total": own.sum().item()})
    mean = sums["total"] / max(sums["tokens"], 1)
    squares = sum_over_data({"squares": (own - mean).square().sum().item()})
    return sums["tokens"], mean, squares["squares"]


def _record_means(samples: list[Sample], parts: list[MicroBatch]) -> None:
    """Set every sample's mean advantage on every rank, for the record of the step."""
    places = {id(sample): place for place, sample in enumerate(samples)}
    own = {
        places[id(sample)]: mean
        for part in parts
        for sample, mean in zip(
            part.samples, sequence_means(part.advantages, part.mask).tolist(), strict=True
        )
    }
    for found in gather(own):
        for place, mean in found.items():
            samples[place].advantage = mean
