"""A recomputed step of a policy that learns from rewards, of one domain or several."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from stages.audit.advantages import advantages
from stages.audit.model import Model, Read
from stages.audit.objective import Facts, Objective, UpdateCounts, aggregate, terms
from stages.audit.recorded import NotAuditable, RecordedSample
from stages.audit.rows import Comparison, kept_sets, mismatch, number, numbers
from stages.audit.update import Optimizer, take_update

LEAST_RELATIVE_ENTROPY = 0.1  # of EDGE: no response counts more than ten times
LENGTH_SPREAD = 9.0  # of lambda-GRPO
BY_TOKEN = ("entropy", "kl", "full_entropy")  # metrics that are means over tokens

Domains = Sequence[str]


@dataclass
class InitialFacts:
    """Facts of a sample that the weights before the step decide; log-probabilities in nats.

    `router_logprobs` [layers, tokens, experts_per_token] are of the `experts` used then.
    """

    old: torch.Tensor
    advantages: torch.Tensor
    entropy: float
    experts: torch.Tensor
    router_logprobs: torch.Tensor


class PolicyStep:
    """One step of a stage that learns from rewards; it changes the models and the optimizer."""

    def __init__(
        self,
        settings: dict[str, Any],
        objectives: Sequence[Objective],
        weights: dict[str, dict[str, float]],
        step: int,
        policy: Model,
        optimizer: Optimizer,
    ) -> None:
        """Take the stage's resolved settings, and the rewards' weights by domain."""
        self.settings, self.objectives, self.weights = settings, objectives, weights
        self.step, self.policy, self.optimizer = step, policy, optimizer
        self.temperature = settings["sampling"]["temperature"]
        self.replay = settings["routing"]["replay"] == "r3"
        self.of = {domain: objective for objective in objectives for domain in objective.domains}

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
        unscaled = self._advantages(samples)
        initial = self._before(samples, unscaled)
        rewards = [sample.fields["reward"] for sample in samples]
        weighted = [
            sum(
                weight * (sample.fields["reward_parts"] or {}).get(name, 0.0)
                for name, weight in self.weights[sample.domain].items()
            )
            for sample in samples
        ]
        recorded_advantages = [
            value
            for sample in samples
            for value in sample.fields["advantages"]
            or [sample.fields["advantage"]] * len(sample.response)
        ]
        learned = [sum(len(sample.learned) for sample in batch) for batch in (recorded, samples)]
        rows = [
            numbers("rewards", rewards, weighted),
            numbers(
                "advantages",
                recorded_advantages,
                [value for of_sample in unscaled for value in of_sample],
            ),
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
        # Older weights kept other ids: only fresh samples can be compared with this policy.
        fresh = [sample for sample in samples if sample.fields["weight_version"] == self.step]
        rows += kept_sets(fresh, self.policy, sampling, self.replay)
        rows += mismatch(samples, [facts.old for facts in initial.values()], logged)
        updates = [
            self._update(
                {sample: facts for sample, facts in initial.items() if sample.update == update}
            )
            for update in range(expected)
        ]
        for name in dict.fromkeys(name for update in updates for name in update):
            mean = fmean(update[name] for update in updates if name in update)
            rows.append(number(name, logged[name], mean))
        return rows

    def _advantages(self, samples: Sequence[RecordedSample]) -> list[list[float]]:
        """Return the advantage of every response token, by the objective of its domain."""
        advantages_of: dict[RecordedSample, list[float]] = {}
        for objective in self.objectives:
            domain_samples = [sample for sample in samples if sample.domain in objective.domains]
            values = advantages(domain_samples, objective.settings["advantage"], self.weights)
            advantages_of |= zip(domain_samples, values, strict=True)
        return [advantages_of[sample] for sample in samples]

    def _masked(self, sample: RecordedSample) -> RecordedSample:
        """Return a sample with the learned tokens that it should have."""
        masks = self.of[sample.domain].settings["mask_truncated"]
        dropped = masks and not sample.fields["finished"]
        return replace(sample, learned=torch.arange(0 if dropped else len(sample.response)))

    def _before(
        self, samples: Sequence[RecordedSample], unscaled: Sequence[Sequence[float]]
    ) -> dict[RecordedSample, InitialFacts]:
        initial, entropies = {}, defaultdict(list)
        with torch.no_grad():
            for sample, token_advantages in zip(samples, unscaled, strict=True):
                read = self.policy.read(sample, self.replay)
                entropy = float(_entropy(read.sampled_from(self.temperature)).mean())
                initial[sample] = InitialFacts(
                    read.logprobs(self.temperature),
                    torch.tensor(token_advantages, dtype=torch.float64)[sample.learned],
                    entropy,
                    read.experts,
                    read.router_logits.log_softmax(-1).gather(-1, read.experts),
                )
                if len(sample.learned):
                    entropies[sample.group].append(entropy)
        for sample, facts in initial.items():
            if self.of[sample.domain].settings["scaling"] == "edge" and len(sample.learned):
                relative = facts.entropy / fmean(entropies[sample.group])
                facts.advantages /= max(relative, LEAST_RELATIVE_ENTROPY)
        return initial

    def _update(self, initial: dict[RecordedSample, InitialFacts]) -> dict[str, float]:
        exponents = {
            objective.name: torch.tensor(
                objective.exponent, dtype=torch.float64, requires_grad=True
            )
            for objective in self.objectives
        }
        # By metric, the domains that have it, and its sum over their samples.
        sums: dict[str, tuple[Domains, float]] = {"loss": (list(self.of), 0.0)}

        def loss(read: Read) -> torch.Tensor:
            if not len(read.sample.learned):
                # Zero with gradient: the routers' losses are of its tokens all the same.
                return read.logits.sum() * 0
            objective = self.of[read.sample.domain]
            weight = self._length_weight(
                read.sample, list(initial), objective, exponents[objective.name]
            )
            value, logged = self._loss(read, initial, objective, weight)
            _add(sums, "loss", self.of, value)
            for name, measured in logged.items():
                _add(sums, name, objective.domains, measured)
            if "kl" in logged and len(self.of) > 1:
                _add(sums, f"kl/{read.sample.domain}", [read.sample.domain], logged["kl"])
            return value

        routing = self.settings["routing"]
        shared = take_update(self.policy, self.optimizer, list(initial), routing, self.replay, loss)
        logged = {}
        for name, (domains, total) in sums.items():
            learned = [len(sample.learned) for sample in initial if sample.domain in domains]
            by_token = name.partition("/")[0] in BY_TOKEN
            count = sum(learned) if by_token else sum(map(bool, learned))
            logged[name] = total if name == "loss" else total / count
        return {**logged, **shared, **self._learn(logged, exponents)}

    def _loss(
        self,
        read: Read,
        initial: Mapping[RecordedSample, InitialFacts],
        objective: Objective,
        weight: torch.Tensor | float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a sample's part of the loss by its objective, and of the metrics."""
        tokens = sum(len(sample.learned) for sample in initial)
        counts = UpdateCounts(
            len(initial), tokens, self.settings["sampling"]["max_response_tokens"]
        )

        def mean(values: torch.Tensor) -> torch.Tensor:
            return weight * aggregate(values, objective.settings["aggregation"], counts)

        facts = self._facts(read, initial[read.sample], objective)
        loss_terms = terms(facts, objective.settings, objective.corrects_all(self.replay))
        value = mean(loss_terms.surrogate)
        shares = {
            "ratio": loss_terms.ratio,
            "clip_fraction": loss_terms.clipped,
            "correction": loss_terms.correction,
            "masked_sequences": loss_terms.masked,
        }
        logged = {n: share.double().mean() for n, share in shares.items() if share is not None}
        logged["entropy"] = -facts.logprobs.sum()
        if loss_terms.kl is not None and objective.coefficient > 0:
            value = value + objective.coefficient * mean(loss_terms.kl)
            logged["kl"] = loss_terms.kl.sum()
        if objective.settings["entropy_bonus"] > 0:
            entropy = _entropy(read.sampled_from(self.temperature))
            value = value - objective.settings["entropy_bonus"] * mean(entropy)
            logged["full_entropy"] = entropy.sum()
        return value, logged

    def _learn(
        self, logged: Mapping[str, float], exponents: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        """Update the `ema` references and the coefficients; return the coefficients before."""
        moving = {
            id(objective.reference): (objective.reference, objective.settings["kl"]["ema_decay"])
            for objective in self.objectives
            if objective.reference is not None and objective.settings["kl"]["reference"] == "ema"
        }
        for reference, decay in moving.values():  # once each, however many domains share it
            with torch.no_grad():
                for name, average in reference.parameters.items():
                    average.lerp_(self.policy.parameters[name], 1 - decay)
        coefficients: dict[str, float] = {}
        for objective in self.objectives:
            gradient = exponents[objective.name].grad
            coefficients |= objective.learn(logged, 0.0 if gradient is None else float(gradient))
        return coefficients

    def _facts(self, read: Read, initial: InitialFacts, objective: Objective) -> Facts:
        sample, theirs, full, moved = read.sample, None, None, None
        if objective.reference is not None and objective.coefficient > 0:
            with torch.no_grad():
                other = objective.reference.read(sample, replay=False)
            if objective.settings["kl"]["estimator"] == "full":
                log_p = read.sampled_from(self.temperature)
                log_q = other.sampled_from(self.temperature)
                difference = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
                full = (log_p.exp() * difference).sum(-1)
            else:
                theirs = other.logprobs(self.temperature)
        if objective.settings["ratio"]["name"] == "rspo":
            # |log p - log p_old| over the experts chosen then, by predicting token
            now = read.router_logits.detach().log_softmax(-1).gather(-1, initial.experts)
            apart = (now - initial.router_logprobs).abs().mean((0, 2))
            moved = apart[sample.first :][sample.learned]
        return Facts(
            logprobs=read.logprobs(self.temperature),
            old=initial.old,
            engine=sample.logprobs[sample.learned],
            advantages=initial.advantages,
            stale=sample.fields["weight_version"] < self.step,
            reference=theirs,
            full_kl=full,
            router_movement=moved,
        )

    def _length_weight(
        self,
        sample: RecordedSample,
        update: list[RecordedSample],
        objective: Objective,
        exponent: torch.Tensor,
    ) -> torch.Tensor | float:
        """Return its part of G softmax(h^lambda) over its group's samples (arXiv 2510.06870)."""
        if objective.settings["aggregation"] != "lambda":
            return 1.0
        group = [member for member in update if member.group == sample.group]
        lengths = torch.tensor([float(len(s.response)) for s in group], dtype=torch.float64)
        spread = lengths.std(correction=0)
        score = (lengths - lengths.mean()) / (spread if spread > 0 else 1.0)
        powers = (1 + score / LENGTH_SPREAD).clamp(min=1e-3) ** exponent
        return len(group) * powers.softmax(0)[group.index(sample)]


def _entropy(log_p: torch.Tensor) -> torch.Tensor:
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


def _add(
    sums: dict[str, tuple[Domains, float]], name: str, domains: Iterable[str], value: torch.Tensor
) -> None:
    """Add a sample's value to a metric, which the domains have from then on."""
    before, total = sums.get(name, ([], 0.0))
    sums[name] = list(dict.fromkeys([*before, *domains])), total + float(value.detach())
