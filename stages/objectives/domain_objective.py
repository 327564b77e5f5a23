"""The objectives of a stage's domains: one that all of them share, or one for each.

Domains whose objectives and references are equal share one with all that it learns, so that a
stage on several domains trains as on one. Where they differ, micro-batches hold one domain each,
and every domain has its own KL coefficient and lambda; losses are still normalised by the counts of
all domains together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from parallel.batch import MicroBatch
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from stages.objectives.groups import LengthWeights, scale_by_entropy
from stages.objectives.kl import kl_controller
from stages.objectives.loss import MetricSum, ObjectiveSettings, Totals
from stages.objectives.models import GroupBaseline, Reference, baseline_of, references_of
from stages.objectives.surrogate import masked_sum
from stages.settings import StageJob

SHARED = ""  # `MicroBatch.domain` where all domains share an objective


class DomainObjective:
    """The objective of `domains`: its settings, its models, and what it learns.

    Of one domain, or of all of a stage's domains, then named `SHARED`.

    Example: the KL of the last update was 10 % above the target:
        >>> kl = {"coefficient": 0.5, "target": 0.1}
        >>> settings = ObjectiveSettings.model_validate({"kl": kl})
        >>> words = DomainObjective("words", ["words"], settings, GroupBaseline(settings), None)
        >>> words.after_update({"kl/words": 0.11})  # what the update had
        {'kl_coefficient/words': 0.5}
        >>> round(words.kl_coefficient, 6)  # what the next has
        0.505
    """

    def __init__(
        self,
        name: str,
        domains: Sequence[str],
        settings: ObjectiveSettings,
        baseline: GroupBaseline,
        reference: Reference | None,
    ) -> None:
        self.name, self.domains, self.settings = name, tuple(domains), settings
        self.baseline, self.reference = baseline, reference
        self.kl_coefficient = settings.kl.coefficient
        self.length_exponent = 0.0  # lambda
        self.length_weights: LengthWeights | None = None  # of the current update

    def own(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples of its domains."""
        return [sample for sample in samples if self.name in (SHARED, sample.domain)]

    def parts(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches of its domains."""
        return [batch for batch in batches if batch.domain == self.name]

    def finish_advantages(self, samples: list[Sample], batches: list[MicroBatch]) -> None:
        """Compute a critic's advantages, or scale advantages by entropy. Collective."""
        own_samples, own_batches = self.own(samples), self.parts(batches)
        self.baseline.compute_values(own_samples, own_batches)
        if self.settings.needs_entropies:
            scale_by_entropy(own_samples, own_batches)

    def start_update(
        self,
        policy: TrainedPolicy,
        samples: list[Sample],
        batches: list[MicroBatch],
        temperature: float,
    ) -> None:
        """Compute what the loss of one update reads besides the policy. Collective."""
        own_batches = self.parts(batches)
        if self.reference is not None:
            self.reference.compute_logprobs(own_batches, temperature, self.settings.kl.needs_logits)
        if self.settings.ratio.needs_router_shift:
            # The movements are empty except on the last pipeline stage.
            for batch, movement in zip(
                own_batches, policy.router_movement(own_batches), strict=False
            ):
                batch.router_movement = movement
        if self.settings.learns_length_weights:
            self.length_weights = LengthWeights(self.own(samples), self.length_exponent)

    def kl_sums(self, batch: MicroBatch, kl: torch.Tensor | None) -> dict[str, MetricSum]:
        """Return the sums of each domain's KL [B, R] in a micro-batch; none on one domain alone."""
        if kl is None or (self.name == SHARED and len(self.domains) == 1):
            return {}
        sums = {}
        for domain in self.domains:  # on every rank, also where it has no sample here
            # One objective of several domains: a micro-batch may hold responses of each.
            rows = batch.mask.new_tensor([sample.domain == domain for sample in batch.samples])
            sums[domain] = MetricSum(masked_sum(kl, batch.mask & rows.view(-1, 1)), "tokens")
        return sums

    def after_update(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Update the KL coefficient and lambda; return the values of this update. Collective."""
        logged: dict[str, float] = {}
        if (target := self.settings.kl.target) is not None:
            logged |= self._logged_as("kl_coefficient", self.kl_coefficient)
            if (kl := measured.get(self._metric("kl"))) is not None:
                self.kl_coefficient = kl_controller(self.kl_coefficient, kl, target)
        if self.settings.learns_length_weights:
            assert self.length_weights is not None
            logged |= self._logged_as("length_exponent", self.length_exponent)
            rate = self.settings.lambda_learning_rate
            self.length_exponent -= rate * self.length_weights.gradient()
        return logged

    def state(self) -> dict[str, Any]:
        """Return what it has learned, as JSON."""
        return {"kl_coefficient": self.kl_coefficient, "length_exponent": self.length_exponent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.kl_coefficient = state["kl_coefficient"]
        self.length_exponent = state["length_exponent"]

    def _metric(self, name: str) -> str:
        return f"{name}/{self.name}" if self.name else name

    def _logged_as(self, name: str, value: float) -> dict[str, float]:
        """Return a metric under its name, and under each domain's where there are several."""
        by_domain = self.name or len(self.domains) > 1
        domain_metrics = {f"{name}/{domain}": value for domain in self.domains} if by_domain else {}
        return {self._metric(name): value, **domain_metrics}


class StageObjectives:
    """The objectives of all domains of a stage, in the order of the domains."""

    def __init__(
        self, job: StageJob, policy: TrainedPolicy, settings: Mapping[str, ObjectiveSettings]
    ) -> None:
        """Build the baselines and references; `settings` are each domain's."""
        self.domains = tuple(settings)
        first, *others = settings.values()
        # A reference may be each domain's own stage of one block.
        loaded = {job.models.get(domain) for domain in settings}
        if all(other == first for other in others) and len(loaded) == 1:
            settings_by_name: dict[str, ObjectiveSettings] = {SHARED: first}
        else:
            settings_by_name = dict(settings)
        penalties = {
            name or self.domains[0]: objective_settings.kl
            for name, objective_settings in settings_by_name.items()
        }
        references = references_of(job, policy, penalties)
        self.references = list(dict.fromkeys(filter(None, references)))
        self._by_name = {
            name: DomainObjective(
                name,
                [name] if name else self.domains,
                objective_settings,
                baseline_of(job, policy, objective_settings.advantage),
                reference,
            )
            for (name, objective_settings), reference in zip(
                settings_by_name.items(), references, strict=True
            )
        }

    def __iter__(self) -> Iterator[DomainObjective]:
        return iter(self._by_name.values())

    def of(self, domain: str) -> DomainObjective:
        """Return the objective of a domain, or of a micro-batch, by `MicroBatch.domain`."""
        return self._by_name[SHARED if SHARED in self._by_name else domain]

    def packed_together(self, samples: list[Sample]) -> dict[str, list[Sample]]:
        """Return the samples that may share micro-batches, by `MicroBatch.domain`."""
        return {objective.name: objective.own(samples) for objective in self}

    def totals(self, samples: list[Sample], longest: int) -> dict[str, Totals]:
        """Return the counts of one update's samples, by domain."""
        totals = {}
        for domain in self.domains:
            learned = [len(sample.learned) for sample in samples if sample.domain == domain]
            counts = len(learned), sum(learned), longest, sum(map(bool, learned))
            totals[domain] = Totals(*counts)
        return totals

    def after_update(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Update averages, KL coefficients and lambdas; return the metrics. Collective."""
        for reference in self.references:  # once each, however many domains share it
            reference.update_ema()
        logged: dict[str, float] = {}
        for objective in self:
            logged |= objective.after_update(measured)
        return logged

    def state(self) -> dict[str, Any]:
        """Return what the objectives have learned, as JSON; of domains by name unless shared."""
        states = {objective.name: objective.state() for objective in self}
        return states.get(SHARED, {"objectives": states})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for objective in self:
            objective.restore(state["objectives"][objective.name] if objective.name else state)
