"""A recomputed step of a domain expert, or of the mixed policy (spec, sections 1 to 6)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stages.audit.advantages import advantages
from stages.audit.drawing import kept_sets, mismatch
from stages.audit.model import Model, Read
from stages.audit.objective import Facts, Terms, terms
from stages.audit.optimizer import Optimizer, norm
from stages.audit.recorded import NotAuditable, RecordedSample
from stages.audit.rows import Comparison, number, numbers
from stages.audit.update import RouterLosses, gradients

LEAST_RELATIVE_ENTROPY = 0.1  # of EDGE: no response counts more than ten times
LENGTH_SPREAD = 9.0  # of lambda-GRPO


@dataclass
class PlainReference:
    """The reference model of the KL penalty, with its own routes; `ema` averages the policy."""

    model: Model
    decay: float | None = None

    def update_ema(self, policy: Model) -> None:
        if self.decay is None:
            return
        with torch.no_grad():
            for name, average in self.model.parameters.items():
                average.lerp_(policy.parameters[name], 1 - self.decay)


@dataclass
class Known:
    """The audit's values of a step's samples, by sample, before its first update."""

    old: list[torch.Tensor] = field(default_factory=list)
    advantages: list[torch.Tensor] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    router_scores: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class Sums:
    """The metrics of one update, before they are divided."""

    loss: float = 0.0
    by_sequence: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_token: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class PolicyStep:
    """One step of a stage that learns from rewards."""

    def __init__(
        self,
        settings: dict[str, Any],
        weights: dict[str, dict[str, float]],
        precision: str,
        number_of_step: int,
        state: dict[str, Any],
    ) -> None:
        """Take the stage's resolved settings, the rewards' weights by domain, and a saved state.

        `state`, of the checkpoint before the step, has the objective's learned coefficients.
        """
        self.settings = settings
        self.objective = settings["objective"]
        self.weights = weights
        self.step = number_of_step
        self.temperature = settings["sampling"]["temperature"]
        self.replay = settings["routing"]["replay"] == "r3"
        kl = self.objective["kl"]
        learned_before = state if kl["target"] is not None else {}
        self.coefficient = learned_before.get("kl_coefficient", kl["coefficient"])
        self.exponent = state.get("length_exponent", 0.0)
        correction = self.objective["correction"]
        whose = correction.get("samples", "auto")
        automatic = not self.replay or precision == "bf16"
        self.correct_all = whose == "all" or (whose == "auto" and automatic)

    def run(
        self,
        samples: Sequence[RecordedSample],
        policy: Model,
        reference: PlainReference | None,
        optimizer: Optimizer,
        logged: dict[str, float],
    ) -> list[Comparison]:
        """Recompute the step; the policy, the optimizer and the reference are then as after it."""
        if without := sum(sample.fields["reward"] is None for sample in samples):
            raise NotAuditable(
                f"{without} samples have no reward; a step trains only on graded samples"
            )
        recorded, samples = samples, [self._masked(sample) for sample in samples]
        expected = self.settings["updates_per_rollout"]
        if (there := 1 + max(sample.update for sample in samples)) != expected:
            raise NotAuditable(f"samples of {there} updates; updates_per_rollout is {expected}")
        unscaled = advantages(samples, self.objective["advantage"], self.weights)
        known = self._before(samples, policy, unscaled)
        fresh = [sample for sample in samples if sample.fields["weight_version"] == self.step]
        groups = Counter(sample.group for sample in samples)
        asked = self.settings["sampling"]
        prompts = asked["prompts_per_step"] * len(self.weights)
        given = [value for sample in samples for value in _given(sample)]
        rows = [
            self._rewards(samples),
            numbers("advantages", given, [value for each in unscaled for value in each]),
            number(
                "learned tokens", *(sum(len(s.learned) for s in of) for of in (recorded, samples))
            ),
        ]
        if not logged["reward_failures"]:  # a sample without a reward is not trained on
            rows += [
                number("groups", len(groups), prompts),
                number("samples of a group", max(groups.values()), asked["group_size"]),
            ]
        rows += kept_sets(fresh, policy, self.settings["sampling"], self.replay)
        rows += mismatch(samples, known.old, logged)
        updates: list[dict[str, float]] = []
        for update in range(self.settings["updates_per_rollout"]):
            own = [place for place, sample in enumerate(samples) if sample.update == update]
            updates.append(self._update(own, samples, known, policy, reference, optimizer))
        for name in dict.fromkeys(name for update in updates for name in update):
            found = [update[name] for update in updates if name in update]
            rows.append(number(name, logged[name], sum(found) / len(found)))
        return rows

    def _masked(self, sample: RecordedSample) -> RecordedSample:
        """Return a sample with the learned tokens that it should have."""
        learned = torch.arange(len(sample.response))
        if self.objective["mask_truncated"] and not sample.fields["finished"]:
            learned = learned[:0]
        return replace(sample, learned=learned)

    def _rewards(self, samples: Sequence[RecordedSample]) -> Comparison:
        """Compare the rewards with the weighted sums of their parts."""
        sums = [
            sum(
                weight * (sample.fields["reward_parts"] or {}).get(name, 0.0)
                for name, weight in self.weights[sample.domain].items()
            )
            for sample in samples
        ]
        return numbers("rewards", [sample.fields["reward"] for sample in samples], sums)

    def _before(
        self, samples: Sequence[RecordedSample], policy: Model, unscaled: Sequence[Sequence[float]]
    ) -> Known:
        """Return pi_old and what else the weights before the step decide."""
        known = Known()
        with torch.no_grad():
            for sample in samples:
                read = policy.read(sample, self.replay)
                known.old.append(read.logprobs(self.temperature))
                log_p = read.distribution(self.temperature)
                known.entropies.append(float(-(log_p.exp() * log_p).sum(-1).mean()))
                known.router_scores.append((read.router_logits.softmax(-1), read.chosen))
        for sample, own in zip(samples, unscaled, strict=True):
            known.advantages.append(torch.tensor(own, dtype=torch.float64)[sample.learned])
        if self.objective["scaling"] == "edge":
            of_group = defaultdict(list)
            for sample, entropy in zip(samples, known.entropies, strict=True):
                if len(sample.learned):
                    of_group[sample.group].append(entropy)
            for place, sample in enumerate(samples):
                if not len(sample.learned):
                    continue
                mean = sum(of_group[sample.group]) / len(of_group[sample.group])
                relative = max(known.entropies[place] / mean, LEAST_RELATIVE_ENTROPY)
                known.advantages[place] = known.advantages[place] / relative
        return known

    def _update(
        self,
        own: list[int],
        samples: Sequence[RecordedSample],
        known: Known,
        policy: Model,
        reference: PlainReference | None,
        optimizer: Optimizer,
    ) -> dict[str, float]:
        chosen = [samples[place] for place in own]
        place_of = {id(samples[place]): place for place in own}
        tokens = sum(len(sample.learned) for sample in chosen)
        exponent = torch.tensor(self.exponent, dtype=torch.float64, requires_grad=True)
        losses = RouterLosses(self.settings["routing"], chosen)
        sums = Sums()

        def loss(read: Read) -> torch.Tensor:
            if not len(read.sample.learned):
                return read.logits.sum() * 0
            place = place_of[id(read.sample)]
            found, entropy = self._terms(read, known, place, reference)
            weight = self._length_weight(chosen, read.sample, exponent)
            value = weight * self._mean(found.surrogate, len(chosen), tokens)
            if found.kl is not None and self.coefficient > 0:
                kl = weight * self._mean(found.kl, len(chosen), tokens)
                value = value + self.coefficient * kl
            if entropy is not None:
                bonus = weight * self._mean(entropy, len(chosen), tokens)
                value = value - self.objective["entropy_bonus"] * bonus
            self._log(sums, found, entropy, read.logprobs(self.temperature).detach())
            sums.loss += float(value.detach())
            return value

        found = gradients(policy, chosen, self.replay, losses, loss)
        size = norm(found)
        after = optimizer.step(policy.weights(), found)
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                parameter.copy_(after[name])
        learned = sum(bool(len(sample.learned)) for sample in chosen)
        logged = {
            "loss": sums.loss,
            **{name: value / learned for name, value in sums.by_sequence.items()},
            **{name: value / tokens for name, value in sums.by_token.items()},
            **losses.logged(),
            "gradient_norm": size,
        }
        return {**logged, **self._learn(logged, exponent, reference, policy)}

    def _learn(
        self,
        logged: dict[str, float],
        exponent: torch.Tensor,
        reference: PlainReference | None,
        policy: Model,
    ) -> dict[str, float]:
        """Update the objective's coefficients after an update."""
        found = {}
        if reference is not None:
            reference.update_ema(policy)
        target = self.objective["kl"]["target"]
        if target is not None:
            found["kl_coefficient"] = self.coefficient
            if "kl" in logged:
                error = max(-0.2, min((logged["kl"] - target) / target, 0.2))
                self.coefficient *= 1 + 0.1 * error
        if self.objective["aggregation"] == "lambda":
            found["length_exponent"] = self.exponent
            slope = 0.0 if exponent.grad is None else float(exponent.grad)
            self.exponent -= self.objective["lambda_learning_rate"] * slope
        return found

    def _terms(
        self, read: Read, known: Known, place: int, reference: PlainReference | None
    ) -> tuple[Terms, torch.Tensor | None]:
        sample = read.sample
        theirs, full = None, None
        if reference is not None and self.coefficient > 0:
            with torch.no_grad():
                other = reference.model.read(sample, replay=False)
            if self.objective["kl"]["estimator"] == "full":
                log_p = read.distribution(self.temperature)
                log_q = other.distribution(self.temperature)
                full = (log_p.exp() * (log_p - log_q)).sum(-1)
            else:
                theirs = other.logprobs(self.temperature)
        entropy = None
        if self.objective["entropy_bonus"] > 0:
            log_p = read.distribution(self.temperature)
            entropy = -(log_p.exp() * log_p).sum(-1)
        facts = Facts(
            logprobs=read.logprobs(self.temperature),
            old=known.old[place],
            engine=sample.logprobs[sample.learned],
            advantages=known.advantages[place],
            stale=sample.fields["weight_version"] < self.step,
            reference=theirs,
            full_kl=full,
            entropy=entropy,
            router_movement=self._moved(read, known, place),
        )
        return terms(facts, self.objective, self.correct_all), entropy

    def _moved(self, read: Read, known: Known, place: int) -> torch.Tensor | None:
        """Return mean |log p - log p_old| [n] over the experts chosen then, by predicting token."""
        if self.objective["ratio"]["name"] != "rspo":
            return None
        before, chosen = known.router_scores[place]
        now = read.router_logits.detach().softmax(-1)
        apart = (now.gather(-1, chosen).log() - before.gather(-1, chosen).log()).abs()
        sample = read.sample
        return apart.mean((0, 2))[sample.first :][sample.learned]

    def _length_weight(
        self, chosen: list[RecordedSample], sample: RecordedSample, exponent: torch.Tensor
    ) -> torch.Tensor | float:
        if self.objective["aggregation"] != "lambda":
            return 1.0
        return _length_weights(chosen, exponent)[id(sample)]

    def _mean(self, values: torch.Tensor, sequences: int, tokens: int) -> torch.Tensor:
        """Return one sample's part of the mean over the update."""
        how = self.objective["aggregation"]
        if how == "sequence_mean":
            return values.mean() / sequences
        if how == "constant":
            longest = self.settings["sampling"]["max_response_tokens"]
            return values.sum() / (sequences * longest)
        return values.sum() / tokens

    def _log(
        self, sums: Sums, found: Terms, entropy: torch.Tensor | None, logprobs: torch.Tensor
    ) -> None:
        sums.by_sequence["ratio"] += float(found.ratio.mean())
        sums.by_sequence["clip_fraction"] += float(found.clipped.double().mean())
        sums.by_token["entropy"] += float(-logprobs.sum())
        if found.correction is not None:
            sums.by_sequence["correction"] += float(found.correction.mean())
        if self.objective["sequence_mask"]["enabled"]:
            sums.by_sequence["masked_sequences"] += found.masked
        if found.kl is not None and self.coefficient > 0:
            sums.by_token["kl"] += float(found.kl.detach().sum())
        if entropy is not None:
            sums.by_token["full_entropy"] += float(entropy.detach().sum())


def _given(sample: RecordedSample) -> list[float]:
    own: list[float] | None = sample.fields.get("advantages")
    return own or [sample.fields["advantage"]] * len(sample.response)


def _length_weights(
    samples: list[RecordedSample], exponent: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Return G softmax(h^lambda) over every group of an update (arXiv 2510.06870)."""
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    found: dict[int, torch.Tensor] = {}
    for group in groups.values():
        lengths = torch.tensor([float(len(s.response)) for s in group], dtype=torch.float64)
        spread = lengths.std(correction=0)
        score = (lengths - lengths.mean()) / (spread if spread > 0 else 1.0)
        weights = len(group) * ((1 + score / LENGTH_SPREAD).clamp(min=1e-3) ** exponent).softmax(0)
        found |= {id(sample): weight for sample, weight in zip(group, weights, strict=True)}
    return found


def check_no_critic(settings: dict[str, Any]) -> None:
    """Check that no critic gives the advantages.

    Raises:
        NotAuditable: one does.
    """
    if settings["objective"]["advantage"]["name"] == "gae":
        raise NotAuditable("objective.advantage gae: a critic's values are not audited")
