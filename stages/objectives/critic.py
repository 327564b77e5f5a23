"""PPO's critic: it learns what is still to be earned at every token; advantages come of that."""

from __future__ import annotations

import torch

from parallel.batch import MicroBatch, Responses
from parallel.checkpoint import load
from parallel.device import device
from parallel.distributed import gather, sum_over_data
from parallel.model.policy import TrainedPolicy
from parallel.model.value_model import ValueModel, values
from parallel.sample import Sample
from stages.objectives.aggregation import Totals, sequence_means, token_mean
from stages.objectives.gae import clipped_value_loss, gae
from stages.objectives.graded import STD_FLOOR
from stages.objectives.settings import GaeSettings
from stages.settings import PolicySettings, StageJob

NAME = "critic"


class Critic:
    """A model that begins as the policy's parent, but for its head, and is saved with the policy.

    It routes by itself, as another model than the one that sampled.
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
        """Whether the policy waits in this step until the critic knows something."""
        return step <= self._settings.critic.warmup_steps

    def compute_values(self, samples: list[Sample], parts: list[MicroBatch]) -> None:
        """Give this rank's micro-batches of `samples` values, returns and advantages, the latter
        standardised over all tokens of a domain's samples. Collective."""
        found = self._model.values([part.without_routes() for part in parts])
        judged = parts[: len(found)]  # none but on the last pipeline stage
        gamma, decay = self._settings.gamma, self._settings.lambda_
        for part, said in zip(judged, found, strict=True):
            part.values = said.masked_fill(~part.mask, 0.0)
            part.advantages = gae(rewards(part), part.values, part.mask, gamma, decay)
            part.returns = part.advantages + part.values
        for domain in sorted({sample.domain for sample in samples}):
            self._standardise([(part, _of(domain, part)) for part in judged])
        _tell(samples, judged)

    def _standardise(self, places: list[tuple[MicroBatch, torch.Tensor]]) -> None:
        """The advantages at these tokens [B, R] of micro-batches. Collective."""
        tokens, mean, squares = _moments([part.advantages[own] for part, own in places])
        freedom = tokens - (self._settings.std == "sample")
        deviation = (squares / max(freedom, 1)) ** 0.5
        for part, own in places:
            standard = (part.advantages - mean) / (deviation + STD_FLOOR)
            part.advantages = standard.where(own, part.advantages)

    def learn(self, samples: list[Sample], parts: list[MicroBatch]) -> dict[str, float]:
        """One step towards the returns; what there is to log. Collective."""
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
    """What each token earns, [B, R]; a response's tokens together its reward.

    Where steps were rewarded, the reward is made of their mean: each has its share of that at its
    end. The rest stands at the last token. One that was cut off earns as it was scored: no value is
    taken for what would have followed.
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
    """The share of the returns' variance that the values had foreseen; 0 where they are alike."""
    known = [
        (part.returns[part.mask], part.values[part.mask])
        for part in parts
        if part.returns is not None and part.values is not None
    ]
    _, _, whole = _moments([returns for returns, _ in known])
    tokens, _, missed = _moments([returns - found for returns, found in known])
    return 1 - missed / whole if whole > tokens * STD_FLOOR**2 else 0.0


def _of(domain: str, part: MicroBatch) -> torch.Tensor:
    """The learned tokens [B, R] of a domain's responses; bool."""
    rows = torch.tensor([sample.domain == domain for sample in part.samples], device=device())
    return part.mask & rows.unsqueeze(-1)


def _moments(tokens: list[torch.Tensor]) -> tuple[float, float, float]:
    """Of all ranks' values: how many, their mean, and the sum of squares around it. Collective."""
    own = torch.cat([torch.zeros(0, device=device()), *tokens]).double()
    sums = sum_over_data({"tokens": float(len(own)), "total": own.sum().item()})
    mean = sums["total"] / max(sums["tokens"], 1)
    squares = sum_over_data({"squares": (own - mean).square().sum().item()})
    return sums["tokens"], mean, squares["squares"]


def _tell(samples: list[Sample], parts: list[MicroBatch]) -> None:
    """Let every sample, on every rank, have its mean advantage, as what is recorded of it."""
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
