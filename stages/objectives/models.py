"""The models beside the policy: the reference of the KL penalty, and PPO's critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

import torch

from parallel.batch import MicroBatch, Responses
from parallel.checkpoint import load
from parallel.distributed import gather, sum_over_data
from parallel.machine.device import device
from parallel.model.policy import Policy, TrainedPolicy, ValueModel, values
from parallel.sample import Sample
from stages.objectives.advantages.gae import GaeSettings, clipped_value_loss, gae
from stages.objectives.graded import STD_FLOOR
from stages.objectives.groups import Group, assign_advantages, graded_samples
from stages.objectives.kl import AVERAGE, KLSettings
from stages.objectives.loss import Totals, token_mean
from stages.objectives.registry import AdvantageBase
from stages.objectives.surrogate import sequence_means
from stages.settings import StageJob

CRITIC = "critic"  # its name in a checkpoint, as AVERAGE is that of an average


class Reference:
    """The stage's parent, another model, or an exponential moving average of the policy (`ema`).

    Another model is the job's of the name `known_as`: a penalty's is known by its domain. The
    average is kept in fp32, since bf16 would round small steps away, and is saved with the policy's
    checkpoints, under `name`.
    """

    def __init__(
        self,
        job: StageJob,
        policy: TrainedPolicy,
        settings: KLSettings,
        known_as: str,
        name: str = AVERAGE,
    ) -> None:
        self._settings, self._trained = settings, policy
        model, origin = job.settings.model, job.parent
        if settings.reference == AVERAGE:
            model = model.model_copy(update={"precision": "fp32"})
        elif settings.reference != "parent":
            origin = job.models.get(known_as, job.parent)
        self._policy = Policy(model, job.settings.layout)
        policy.residency.share.add(self._policy.residency)
        assert origin is not None
        load.weights(self._policy, origin)
        if settings.reference == AVERAGE:
            policy.averages[name] = self._policy

    def compute_logprobs(
        self, batches: list[MicroBatch], temperature: float, logits: bool = False
    ) -> None:
        """Set the reference's log-probabilities, or its `logits`, in every batch. Collective.

        It never replays the engine's routes: it is another model than the one that sampled.
        """
        own_routing = [batch.without_routes() for batch in batches]
        # Both lists are empty except on the last pipeline stage.
        if logits:
            response_logits = self._policy.response_logits(own_routing)
            for batch, batch_logits in zip(batches, response_logits, strict=False):
                batch.reference = batch_logits
        else:
            logprobs = self._policy.target_logprobs(own_routing, temperature)
            for batch, batch_logprobs in zip(batches, logprobs, strict=False):
                batch.reference_logprobs = batch_logprobs

    @torch.no_grad()
    def update_ema(self) -> None:
        """Move the average towards the policy after an update; other references stay."""
        if self._settings.reference != AVERAGE:
            return
        current = self._trained.named_weights()
        for name, average in self._policy.named_weights().items():
            average.lerp_(current[name].to(average.dtype), 1 - self._settings.ema_decay)
        self._policy.weights_changed()


def references_of(
    job: StageJob, policy: TrainedPolicy, penalties: Mapping[str, KLSettings]
) -> list[Reference | None]:
    """Return the reference of each domain's penalty: one model for all that mean the same.

    None without one. An average is kept for each distinct decay.
    """
    used = [kl for kl in penalties.values() if kl.coefficient > 0]
    several = len({kl.ema_decay for kl in used if kl.reference == AVERAGE}) > 1
    by_key: dict[object, Reference] = {}
    references: list[Reference | None] = []
    for domain, kl in penalties.items():
        # Averages are of one policy and differ in decay; other references differ in what they load.
        average = kl.reference == AVERAGE
        key = kl.ema_decay if average else job.models.get(domain, job.parent)
        if kl.coefficient > 0 and key not in by_key:
            # A dot would end the model's name in a checkpoint's keys.
            decay = str(kl.ema_decay).replace(".", "_")
            name = f"{AVERAGE}_{decay}" if several else AVERAGE
            by_key[key] = Reference(job, policy, kl, domain, name)
        references.append(by_key[key] if kl.coefficient > 0 else None)
    return references


def baseline_of(job: StageJob, policy: TrainedPolicy, settings: AdvantageBase) -> GroupBaseline:
    """Return the baseline of an advantage that the stage's policy trains with."""
    if isinstance(settings, GaeSettings):
        return Critic(job, policy, settings)
    return GroupBaseline(settings)


class GroupBaseline:
    """The baseline without a model: advantages are known as soon as the groups are graded."""

    def __init__(self, advantage: AdvantageBase) -> None:
        self._advantage = advantage

    def assign(
        self, groups: list[Group], weights: Mapping[str, float], first_number: int
    ) -> list[list[Sample]]:
        """Return the graded samples of a domain's groups, numbered from `first_number`."""
        return assign_advantages(groups, self._advantage, weights, first_number)

    def metrics(self, zero_advantages: Iterable[bool]) -> dict[str, float]:
        """Return the metrics of the groups sampled, by whether each has no advantage."""
        return {"zero_variance": fmean(zero_advantages)}

    def learns_alone(self, step: int) -> bool:
        """Return true in steps in which the policy is not trained."""
        return False

    def compute_values(self, samples: list[Sample], batches: list[MicroBatch]) -> None:
        """Set what advantages need a model for, in the micro-batches of `samples`. Collective."""

    def learn(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Train the baseline one step, and return metrics. Collective."""
        return {}


class Critic(GroupBaseline):
    """PPO's model of the return that is left at every token, for advantages by GAE.

    It starts as the policy's parent, except its head, and is saved with the policy.
    It never replays the engine's routes: it is another model than the one that sampled.
    """

    def __init__(self, job: StageJob, policy: TrainedPolicy, settings: GaeSettings) -> None:
        assert job.parent is not None
        expert = job.policy
        self._settings = settings
        self._model = ValueModel(
            job.settings.model,
            job.settings.layout,
            settings.critic.optimizer,
            expert.loop.steps * expert.updates_per_rollout,
            expert.routing,
        )
        policy.residency.share.add(self._model.residency)
        # The parent's head predicts tokens; a value is one number.
        load.weights(self._model, job.parent, head=False)
        policy.companions[CRITIC] = self._model

    def assign(
        self, groups: list[Group], weights: Mapping[str, float], first_number: int
    ) -> list[list[Sample]]:
        return graded_samples(groups, first_number)  # `compute_values` sets advantages

    def metrics(self, zero_advantages: Iterable[bool]) -> dict[str, float]:
        return {}  # no groups are compared

    def learns_alone(self, step: int) -> bool:
        return step <= self._settings.warmup_steps

    def compute_values(self, samples: list[Sample], batches: list[MicroBatch]) -> None:
        """Set values, returns and advantages of this rank's micro-batches of `samples`.

        Advantages are standardised over all tokens of a domain's samples. Collective.
        """
        predictions = self._model.values([batch.without_routes() for batch in batches])
        valued = batches[: len(predictions)]  # empty except on the last pipeline stage
        for batch, predicted in zip(valued, predictions, strict=True):
            batch.values = predicted.masked_fill(~batch.mask, 0.0)
            batch.advantages = gae(rewards(batch), batch.values, batch.mask, self._settings)
            batch.returns = batch.advantages + batch.values
        for domain in sorted({sample.domain for sample in samples}):
            learned_masks = [  # its learned tokens
                batch.mask
                & batch.mask.new_tensor([sample.domain == domain for sample in batch.samples]).view(
                    -1, 1
                )
                for batch in valued
            ]
            tokens, mean, squares = _moments(
                [
                    batch.advantages[where]
                    for batch, where in zip(valued, learned_masks, strict=True)
                ]
            )
            freedom = tokens - (self._settings.std == "sample")
            deviation = (squares / max(freedom, 1)) ** 0.5
            for batch, where in zip(valued, learned_masks, strict=True):
                # Tokens of the other domains are standardised in their own turn of the loop.
                standard = (batch.advantages - mean) / (deviation + STD_FLOOR)
                batch.advantages = standard.where(where, batch.advantages)
        _record_means(samples, valued)

    def learn(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        totals = Totals(len(samples), sum(len(sample.learned) for sample in samples))
        clip = self._settings.critic.value_clip

        def loss(responses: Responses) -> tuple[torch.Tensor, float]:
            batch = responses.batch
            assert batch.values is not None and batch.returns is not None
            token_losses = clipped_value_loss(values(responses), batch.values, batch.returns, clip)
            result = token_mean(token_losses, batch.mask, totals)
            return result, result.item()

        read = sum(sample.length for sample in samples)
        losses = self._model.accumulate([batch.without_routes() for batch in batches], loss, read)
        self._model.step()
        shares = sum_over_data({"value_loss": sum(losses)})
        return {**shares, "value_explained_variance": _explained(batches)}


def rewards(batch: MicroBatch) -> torch.Tensor:
    """Return the reward of each token, [B, R]; a response's tokens sum to its reward.

    Where steps have rewards, each step's last token gets its share of their mean. The rest is at
    the response's last token. A truncated response is not bootstrapped with a value: its reward
    already is the score of the whole.
    """
    earned = torch.zeros_like(batch.advantages)
    for row, sample in zip(earned, batch.samples, strict=True):
        assert sample.reward is not None
        steps = sample.step_rewards or []
        shares = [reward / len(steps) for _, reward in steps]
        for (end, _), share in zip(steps, shares, strict=True):
            row[end] += share
        row[len(sample.response) - 1] += sample.reward - sum(shares)
    return earned


def _explained(batches: list[MicroBatch]) -> float:
    """Return the share of the returns' variance that the values explain; 0 without variance."""
    pairs = [
        (batch.returns[batch.mask], batch.values[batch.mask])
        for batch in batches
        if batch.returns is not None and batch.values is not None
    ]
    _, _, whole = _moments([returns for returns, _ in pairs])
    tokens, _, missed = _moments([returns - predicted for returns, predicted in pairs])
    return 1 - missed / whole if whole > tokens * STD_FLOOR**2 else 0.0


def _moments(tokens: list[torch.Tensor]) -> tuple[float, float, float]:
    """Return count, mean and sum of squared deviations of all ranks' values. Collective."""
    flat = torch.cat([torch.zeros(0, device=device()), *tokens]).double()
    # The mean is reduced first: a mean of squares less the squared mean would cancel digits.
    sums = sum_over_data({"tokens": float(len(flat)), "total": flat.sum().item()})
    mean = sums["total"] / max(sums["tokens"], 1)
    squares = sum_over_data({"squares": (flat - mean).square().sum().item()})
    return sums["tokens"], mean, squares["squares"]


def _record_means(samples: list[Sample], batches: list[MicroBatch]) -> None:
    """Set every sample's mean advantage on every rank, for the record of the step."""
    places = {id(sample): place for place, sample in enumerate(samples)}
    mean_of: dict[int, float] = {}
    for batch in batches:
        means = sequence_means(batch.advantages, batch.mask).tolist()
        mean_of |= {
            places[id(sample)]: mean for sample, mean in zip(batch.samples, means, strict=True)
        }
    for rank_means in gather(mean_of):
        for place, mean in rank_means.items():
            samples[place].advantage = mean
