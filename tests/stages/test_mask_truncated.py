"""`objective.mask_truncated`: responses that were cut off are compared with, and not learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel.batch import RankPlace, collate
from parallel.sample import Sample
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.advantages.grpo import GrpoAdvantageSettings
from stages.objectives.advantages.reinforce_pp import ReinforcePPSettings
from stages.objectives.groups import Batch, has_zero_advantages, scale_by_entropy
from stages.sampling.step import StepSamples
from tests.stages.toys import drawn, expert, group

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant", "lambda"])
def test_a_truncated_response_is_not_learned_but_counts_in_the_baseline(
    how: str, tmp_path: Path
) -> None:
    """The tokens have no gradient, and the reward is in the others' advantages."""
    seen: dict[bool, list[Sample]] = {True: [], False: []}
    for masked in seen:
        objective = {"mask_truncated": masked, "aggregation": how, "scaling": "edge"}
        stage = expert(tmp_path / str(masked), objective)
        gradients = stage.gradients

        def watched(
            samples: list[Sample],
            batches: Any,
            into: list[Sample] = seen[masked],
            after: Any = gradients,
        ) -> dict[str, float]:
            into += samples
            found: dict[str, float] = after(samples, batches)
            return found

        stage.gradients = watched  # type: ignore[method-assign]
        assert np.isfinite(list(stage.step(1).values())).all()
    of = {sample.finished for sample in seen[True]}
    assert of == {True, False}
    for own, other in zip(seen[True], seen[False], strict=True):
        assert own.advantage == other.advantage
        assert len(own.learned) == (len(own.response) if own.finished else 0)
        assert len(other.learned) == len(other.response)


@pytest.mark.parametrize("how", ["sequence_mean", "constant", "token_mean"])
def test_a_masked_response_counts_in_the_number_of_responses(how: str, tmp_path: Path) -> None:
    """Beside one that is masked a response weighs half, unless tokens are what is counted."""
    norms, metrics = {}, {}
    for masked in (True, False):
        stage = expert(tmp_path / str(masked), {"aggregation": how}, updates=1)
        samples = drawn([3, 5])[: 1 + masked]
        for sample in samples[1:]:
            sample.loss_mask = np.zeros(5, bool)
        metrics[masked] = stage.gradients(samples, stage.pack(samples))
        norms[masked] = stage.policy.step()
    share = 1.0 if how == "token_mean" else 0.5
    assert norms[True] == pytest.approx(share * norms[False], rel=1e-4)
    assert metrics[True]["loss"] == pytest.approx(share * metrics[False]["loss"], rel=1e-4)
    for name in ("ratio", "clip_fraction", "entropy"):
        assert metrics[True][name] == pytest.approx(metrics[False][name], rel=1e-5)


def test_a_step_of_truncated_responses_changes_nothing(tmp_path: Path) -> None:
    stage = expert(tmp_path, {"mask_truncated": True, "scaling": "edge"})
    split_updates = stage.split_updates

    def cut_off(batch: Batch) -> StepSamples:
        for sample in (sample for each in batch.groups for sample in each.samples):
            sample.finished = False
        return split_updates(batch)

    stage.split_updates = cut_off  # type: ignore[method-assign]
    found = stage.step(1)
    assert found["loss"] == found["gradient_norm"] == 0
    assert np.isfinite(list(found.values())).all()
    assert not {"ratio", "entropy", "clip_fraction"} & found.keys()  # of nothing


def test_a_masked_response_has_no_advantage() -> None:
    samples = drawn([3, 2])
    one = group(samples, [1.0, 0.0])
    samples[1].finished = False
    assert not has_zero_advantages(one, GrpoAdvantageSettings(), mask_truncated=True)
    samples[0].finished = False
    assert has_zero_advantages(one, GrpoAdvantageSettings(), mask_truncated=True)
    assert not has_zero_advantages(one, GrpoAdvantageSettings())
    for masked in (True, False):  # their advantages are not of the group alone
        for settings in (GaeSettings(), ReinforcePPSettings()):
            assert has_zero_advantages(one, settings, mask_truncated=masked) == masked
    # A third that earned the mean has none, and is the only one that is learned.
    samples = drawn([3, 2, 4])
    one = group(samples, [1.0, 0.0, 0.5])
    samples[0].finished = samples[1].finished = False
    assert has_zero_advantages(one, GrpoAdvantageSettings(), mask_truncated=True)


def test_edge_excludes_masked_responses() -> None:
    """One of three in a group is truncated: the mean is over the other two alone."""
    samples = drawn([2, 3, 4], groups=[0, 0, 0])
    samples[1].loss_mask = np.zeros(3, bool)
    for sample in samples:
        sample.advantage = 3.0
    part = collate(samples, RankPlace(), False)
    part.old_entropies = torch.tensor([1.0, 7.0, 3.0])[:, None].where(part.mask, torch.nan)
    scale_by_entropy(samples, [part])
    assert part.advantages[[0, 2], 0].tolist() == pytest.approx([6.0, 2.0])
