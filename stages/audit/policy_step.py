"""A recomputed step of a domain expert, or of the mixed policy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from stages.audit.advantages import advantages
from stages.audit.model import Model, Read
from stages.audit.objective import Facts, terms
from stages.audit.recorded import NotAuditable, RecordedSample
from stages.audit.rows import Comparison, kept_sets, mismatch, number, numbers
from stages.audit.update import Optimizer, take_update

LEAST_RELATIVE_ENTROPY = 0.1  # of EDGE: no response counts more than ten times
LENGTH_SPREAD = 9.0  # of lambda-GRPO
BY_TOKEN = ("entropy", "kl", "full_entropy")  # metrics that are means over tokens


@dataclass
class Known:
    """Facts of a sample that the weights before the step decide; log-probabilities in nats.

    `router_logprobs` [layers, tokens, experts_per_token] are of the experts `chosen` then.
    """

    old: torch.Tensor
    advantages: torch.Tensor
    entropy: float
    chosen: torch.Tensor
    router_logprobs: torch.Tensor


class PolicyStep:
    """One step of a stage that learns from rewards; it changes the models and the optimizer."""

    def __init__(
        self,
        settings: dict[str, Any],
        weights: dict[str, dict[str, float]],
        step: int,
        state: dict[str, Any],
        policy: Model,
        reference: Model | None,
        optimizer: Optimizer,
    ) -> None:
        """Take the stage's resolved settings, the rewards' weights by domain, and a saved state.

        `state`, of the checkpoint before the step, has the objective's learned coefficients.
        """
        self.settings, self.objective, self.weights = settings, settings["objective"], weights
        self.step = step
        self.policy, self.reference, self.optimizer = policy, reference, optimizer
        self.temperature = settings["sampling"]["temperature"]
        self.replay = settings["routing"]["replay"] == "r3"
        kl = self.objective["kl"]
        learned_before = state if kl["target"] is not None else {}
        self.coefficient = learned_before.get("kl_coefficient", kl["coefficient"])
        self.exponent = state.get("length_exponent", 0.0)
        whose = self.objective["correction"].get("samples", "auto")
        self.correct_all = whose == "all" or (whose == "auto" and not self.replay)

    def run(self, recorded: Sequence[RecordedSample], logged: dict[str, float]) -> list[Comparison]:
        """Recompute the step and compare it with the recorded samples and the logged metrics."""
        if without := sum(sample.fields["reward"] is None for sample in recorded):
            raise NotAuditable(
                f"{without} samples have no reward; a step trains only on graded samples"
            )
        samples = [self._masked(sample) for sample in recorded]
        expected = self.settings["updates_per_rollout"]
        if (there := 1 + max(sample.update for sample in samples)) != expected:
            raise NotAuditable(f"samples of {there} updates; updates_per_rollout is {expected}")
        unscaled = advantages(samples, self.objective["advantage"], self.weights)
        known = self._before(samples, unscaled)
        rewards = [sample.fields["reward"] for sample in samples]
        weighted = [
            sum(
                weight * (sample.fields["reward_parts"] or {}).get(name, 0.0)
                for name, weight in self.weights[sample.domain].items()
            )
            for sample in samples
        ]
        given = [
            value
            for sample in samples
            for value in sample.fields["advantages"]
            or [sample.fields["advantage"]] * len(sample.response)
        ]
        learned = [sum(len(sample.learned) for sample in each) for each in (recorded, samples)]
        rows = [
            numbers("rewards", rewards, weighted),
            numbers("advantages", given, [value for each in unscaled for value in each]),
            number("learned tokens", *learned),
        ]
        sampling = self.settings["sampling"]
        if not logged["reward_failures"]:  # a sample without a reward is not trained on
            groups = Counter(sample.group for sample in samples)
            prompts = sampling["prompts_per_step"] * len(self.weights)
            rows += [
                number("groups", len(groups), prompts),
                number("samples of a group", max(groups.values()), sampling["group_size"]),
            ]
        fresh = [sample for sample in samples if sample.fields["weight_version"] == self.step]
        rows += kept_sets(fresh, self.policy, sampling, self.replay)
        rows += mismatch(samples, [each.old for each in known.values()], logged)
        updates = [
            self._update({s: own for s, own in known.items() if s.update == update})
            for update in range(expected)
        ]
        for name in dict.fromkeys(name for update in updates for name in update):
            found = fmean(update[name] for update in updates if name in update)
            rows.append(number(name, logged[name], found))
        return rows

    def _masked(self, sample: RecordedSample) -> RecordedSample:
        """Return a sample with the learned tokens that it should have."""
        dropped = self.objective["mask_truncated"] and not sample.fields["finished"]
        return replace(sample, learned=torch.arange(0 if dropped else len(sample.response)))

    def _before(
        self, samples: Sequence[RecordedSample], unscaled: Sequence[Sequence[float]]
    ) -> dict[RecordedSample, Known]:
        known, entropies = {}, defaultdict(list)
        with torch.no_grad():
            for sample, own in zip(samples, unscaled, strict=True):
                read = self.policy.read(sample, self.replay)
                entropy = float(_entropy(read.distribution(self.temperature)).mean())
                known[sample] = Known(
                    read.logprobs(self.temperature),
                    torch.tensor(own, dtype=torch.float64)[sample.learned],
                    entropy,
                    read.chosen,
                    read.router_logits.log_softmax(-1).gather(-1, read.chosen),
                )
                if len(sample.learned):
                    entropies[sample.group].append(entropy)
        if self.objective["scaling"] == "edge":
            for sample, facts in known.items():
                if len(sample.learned):
                    relative = facts.entropy / fmean(entropies[sample.group])
                    facts.advantages /= max(relative, LEAST_RELATIVE_ENTROPY)
        return known

    def _update(self, known: dict[RecordedSample, Known]) -> dict[str, float]:
        tokens = sum(len(sample.learned) for sample in known)
        exponent = torch.tensor(self.exponent, dtype=torch.float64, requires_grad=True)
        sums: dict[str, float] = defaultdict(float, loss=0.0)

        def loss(read: Read) -> torch.Tensor:
            if not len(read.sample.learned):
                return read.logits.sum() * 0
            weight = self._length_weight(read.sample, list(known), exponent)

            def mean(values: torch.Tensor) -> torch.Tensor:
                return weight * self._mean(values, len(known), tokens)

            facts = self._facts(read, known[read.sample])
            found = terms(facts, self.objective, self.correct_all)
            value = mean(found.surrogate)
            shares = {
                "ratio": found.ratio,
                "clip_fraction": found.clipped,
                "correction": found.correction,
                "masked_sequences": found.masked,
            }
            logged = {n: each.double().mean() for n, each in shares.items() if each is not None}
            logged["entropy"] = -facts.logprobs.sum()
            if found.kl is not None and self.coefficient > 0:
                value = value + self.coefficient * mean(found.kl)
                logged["kl"] = found.kl.sum()
            if self.objective["entropy_bonus"] > 0:
                entropy = _entropy(read.distribution(self.temperature))
                value = value - self.objective["entropy_bonus"] * mean(entropy)
                logged["full_entropy"] = entropy.sum()
            for name, each in [("loss", value), *logged.items()]:
                sums[name] += float(each.detach())
            return value

        routing = self.settings["routing"]
        shared = take_update(self.policy, self.optimizer, list(known), routing, self.replay, loss)
        learned = sum(bool(len(sample.learned)) for sample in known)
        counts = {"loss": 1, **dict.fromkeys(BY_TOKEN, tokens)}
        logged = {name: value / counts.get(name, learned) for name, value in sums.items()}
        return {**logged, **shared, **self._learn(logged, exponent)}

    def _learn(self, logged: dict[str, float], exponent: torch.Tensor) -> dict[str, float]:
        """Update the `ema` reference and the coefficients; return the coefficients before."""
        kl, found = self.objective["kl"], {}
        if self.reference is not None and kl["reference"] == "ema":
            with torch.no_grad():
                for name, average in self.reference.parameters.items():
                    average.lerp_(self.policy.parameters[name], 1 - kl["ema_decay"])
        if kl["target"] is not None:
            found["kl_coefficient"] = self.coefficient
            if "kl" in logged:
                error = max(-0.2, min((logged["kl"] - kl["target"]) / kl["target"], 0.2))
                self.coefficient *= 1 + 0.1 * error
        if self.objective["aggregation"] == "lambda":
            found["length_exponent"] = self.exponent
            slope = 0.0 if exponent.grad is None else float(exponent.grad)
            self.exponent -= self.objective["lambda_learning_rate"] * slope
        return found

    def _facts(self, read: Read, known: Known) -> Facts:
        sample, theirs, full, moved = read.sample, None, None, None
        if self.reference is not None and self.coefficient > 0:
            with torch.no_grad():
                other = self.reference.read(sample, replay=False)
            if self.objective["kl"]["estimator"] == "full":
                log_p = read.distribution(self.temperature)
                log_q = other.distribution(self.temperature)
                full = (log_p.exp() * (log_p - log_q)).sum(-1)
            else:
                theirs = other.logprobs(self.temperature)
        if self.objective["ratio"]["name"] == "rspo":
            # |log p - log p_old| over the experts chosen then, by predicting token
            now = read.router_logits.detach().log_softmax(-1).gather(-1, known.chosen)
            apart = (now - known.router_logprobs).abs().mean((0, 2))
            moved = apart[sample.first :][sample.learned]
        return Facts(
            logprobs=read.logprobs(self.temperature),
            old=known.old,
            engine=sample.logprobs[sample.learned],
            advantages=known.advantages,
            stale=sample.fields["weight_version"] < self.step,
            reference=theirs,
            full_kl=full,
            router_movement=moved,
        )

    def _length_weight(
        self, sample: RecordedSample, update: list[RecordedSample], exponent: torch.Tensor
    ) -> torch.Tensor | float:
        """Return its part of G softmax(h^lambda) over its group's samples (arXiv 2510.06870)."""
        if self.objective["aggregation"] != "lambda":
            return 1.0
        group = [each for each in update if each.group == sample.group]
        lengths = torch.tensor([float(len(s.response)) for s in group], dtype=torch.float64)
        spread = lengths.std(correction=0)
        score = (lengths - lengths.mean()) / (spread if spread > 0 else 1.0)
        powers = (1 + score / LENGTH_SPREAD).clamp(min=1e-3) ** exponent
        return len(group) * powers.softmax(0)[group.index(sample)]

    def _mean(self, values: torch.Tensor, sequences: int, tokens: int) -> torch.Tensor:
        """Return one sample's part of the mean over the update."""
        how = self.objective["aggregation"]
        if how == "sequence_mean":
            return values.mean() / sequences
        if how == "constant":
            return values.sum() / (sequences * self.settings["sampling"]["max_response_tokens"])
        return values.sum() / tokens


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    return -(log_p.exp() * log_p).sum(-1)
