"""The objective of a domain without a policy: its inputs, its counts and its learned values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parallel.sample import Sample
from stages.objectives.domain_objective import SHARED, DomainObjective, StageObjectives
from stages.objectives.groups import LengthWeights
from stages.objectives.loss import ObjectiveSettings, Totals
from stages.objectives.models import GroupBaseline
from tests.stages.toys import drawn

# A target within 20 % of the measured KL, so that the controller's bound hides nothing.
CONTROLLED: dict[str, Any] = {"kl": {"coefficient": 0.5, "target": 0.1}}
LEARNED: dict[str, Any] = {"aggregation": "lambda", "lambda_learning_rate": 0.5}


def objective(name: str, *domains: str, **keys: Any) -> DomainObjective:
    settings = ObjectiveSettings.model_validate(keys)
    baseline = GroupBaseline(settings.advantage)
    return DomainObjective(name, domains or (name,), settings, baseline, None)


def of_stage(
    models: dict[str, Path] | None = None, **objectives: dict[str, Any]
) -> StageObjectives:
    """Return the objectives of a stage on domains without a penalty."""
    settings = {name: ObjectiveSettings.model_validate(keys) for name, keys in objectives.items()}
    job: Any = SimpleNamespace(models=models or {}, parent=None)
    return StageObjectives(job, job, settings)


def of_domains(*domains: str) -> list[Sample]:
    """Return a group of two responses of each domain, of 2 and 6 tokens."""
    samples = drawn([2, 6] * len(domains), [n // 2 for n in range(2 * len(domains))])
    for number, sample in enumerate(samples):
        sample.domain = domains[number // 2]
    return samples


def test_the_coefficient_follows_the_kl_of_its_own_domains() -> None:
    measured = {"kl": 0.115, "kl/sums": 0.11, "kl/words": 0.09}
    for name, domains, after in (
        ("sums", (), 0.505),
        ("words", (), 0.495),
        (SHARED, ("sums", "words"), 0.5075),
    ):
        one = objective(name, *domains, **CONTROLLED)
        logged = one.after_update(measured)
        assert one.kl_coefficient == pytest.approx(after)
        assert set(logged.values()) == {0.5}  # the one that the update had
        again = one.kl_coefficient
        one.after_update(measured)
        assert one.kl_coefficient == pytest.approx(again**2 / 0.5)  # from where it was
    alone = objective("words", **CONTROLLED)
    alone.after_update({"kl": 0.115, "kl/sums": 0.11})  # an update without its tokens
    assert alone.kl_coefficient == 0.5


def test_values_are_logged_by_domain_where_there_are_several() -> None:
    names = {
        (): {"kl_coefficient"},
        ("words",): {"kl_coefficient", "kl_coefficient/sums", "kl_coefficient/words"},
    }
    for domains, expected in names.items():
        assert objective(SHARED, "sums", *domains, **CONTROLLED).after_update({}).keys() == expected
    assert objective("sums", **CONTROLLED).after_update({}).keys() == {"kl_coefficient/sums"}


@pytest.mark.usefixtures("one_rank")
def test_the_exponent_descends_the_loss_of_its_own_samples() -> None:
    samples, policy = of_domains("sums", "words"), Any
    samples[2].response = samples[2].response[:1]
    one = objective("words", **LEARNED)
    one.length_exponent = 0.25
    one.start_update(policy, samples, [], 1.0)  # type: ignore[arg-type]
    assert one.length_weights is not None
    micro_batch: Any = SimpleNamespace(samples=samples[2:])
    loss = (one.length_weights.of(micro_batch) * torch.tensor([3.0, 1.0])).sum()
    loss.backward()
    expected = LengthWeights(samples[2:], 0.25)
    (expected.of(micro_batch) * torch.tensor([3.0, 1.0])).sum().backward()
    assert expected.gradient() < 0  # the short response has the larger loss
    assert one.after_update({}) == {"length_exponent/words": 0.25}
    assert one.length_exponent == pytest.approx(0.25 - 0.5 * expected.gradient())
    with pytest.raises(KeyError):
        one.length_weights.of(SimpleNamespace(samples=samples[:2]))  # type: ignore[arg-type]


def test_the_kl_of_each_domain_is_summed_over_its_learned_tokens() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    kl = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    samples = [SimpleNamespace(domain=domain) for domain in ("sums", "words", "sums")]
    micro_batch: Any = SimpleNamespace(mask=mask, samples=samples)
    sums = objective(SHARED, "sums", "words", "none").kl_sums(micro_batch, kl)
    assert {name: metric.total.item() for name, metric in sums.items()} == {
        "sums": 51.0,
        "words": 4.0,
        "none": 0.0,
    }
    assert {metric.denominator for metric in sums.values()} == {"tokens"}
    assert objective(SHARED, "sums").kl_sums(micro_batch, kl) == {}
    assert objective("sums").kl_sums(micro_batch, kl).keys() == {"sums"}
    assert objective("sums").kl_sums(micro_batch, None) == {}


def test_counts_are_of_each_domain_and_of_learned_tokens() -> None:
    samples = of_domains("sums", "words")
    samples[1].loss_mask = np.zeros(6, bool)
    samples[2].loss_mask = np.array([True, False])
    totals = of_stage(sums={}, words={}, none={}).totals(samples, 9)
    assert totals == {
        "sums": Totals(2, 2, 9, 1),
        "words": Totals(2, 7, 9, 2),
        "none": Totals(0, 0, 9, 0),
    }


def test_equal_objectives_are_one_and_others_have_their_own_samples() -> None:
    samples = of_domains("sums", "words", "sums")
    alike, apart = of_stage(sums={}, words={}), of_stage(sums=LEARNED, words={})
    assert alike.packed_together(samples) == {SHARED: samples}
    assert alike.of("words") is alike.of("sums")
    assert apart.packed_together(samples) == {
        "sums": [*samples[:2], *samples[4:]],
        "words": samples[2:4],
    }
    assert [
        domain_objective.name for domain_objective in (apart.of("words"), apart.of("sums"))
    ] == ["words", "sums"]
    by_reference = of_stage(
        {"sums": Path("a"), "words": Path("b")}, sums={}, words={}
    )  # two references
    assert [domain_objective.name for domain_objective in by_reference] == ["sums", "words"]
    batches: Any = [SimpleNamespace(domain=domain) for domain in ("words", "sums", "words")]
    assert apart.of("words").parts(batches) == batches[::2]


def test_what_each_objective_learned_is_restored_by_its_name() -> None:
    apart = of_stage(sums=LEARNED, words={})
    for number, domain_objective in enumerate(apart, start=1):
        domain_objective.kl_coefficient, domain_objective.length_exponent = number, -number / 2
    other = of_stage(sums=LEARNED, words={})
    other.restore(apart.state())
    assert [domain_objective.state() for domain_objective in other] == [
        {"kl_coefficient": 1, "length_exponent": -0.5},
        {"kl_coefficient": 2, "length_exponent": -1.0},
    ]
