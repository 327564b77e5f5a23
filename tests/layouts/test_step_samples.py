"""Each rank receives only the samples of its data-parallel rank, and trains as with all of them."""

from __future__ import annotations

import pickle
from dataclasses import fields
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from parallel import distributed
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main
from parallel.sample import Sample
from parallel.settings import LayoutSettings
from tests.layouts.cases import samples
from tests.ranks import On

LAYOUTS = {
    "DP2": LayoutSettings(ranks=2),
    "DP2 TP2": LayoutSettings(ranks=4, tensor=2),
    "DP2 PP2": LayoutSettings(ranks=4, pipeline=2),
    "DP4 EP2": LayoutSettings(ranks=4, expert=2),
    "TP2": LayoutSettings(ranks=2, tensor=2),
}


def distribute(kind: str) -> tuple[int, int, list[str]]:
    """Return the bytes unpickled here, the bytes of all samples, and how micro-batches differ."""
    from stages.sampling.step import StepSamples

    stage, received = _stage(kind), 0
    whole = StepSamples([_drawn(24, seed) for seed in (1, 2)], {"reward": 0.5})
    whole = broadcast(whole)
    loads = pickle.loads

    def counted(data: Any) -> Any:
        nonlocal received
        received += len(data)
        return loads(data)

    with mock.patch.object(distributed.pickle, "loads", counted):
        found = stage._distribute(whole if is_main() else None)
    assert found.metrics == whole.metrics
    differences = []
    for ours, theirs in zip(found.updates, whole.updates, strict=True):
        assert [each.length for each in ours] == [each.length for each in theirs]
        assert [len(each.learned) for each in ours] == [len(each.learned) for each in theirs]
        for part, expected in zip(stage.pack(ours), stage.pack(theirs), strict=True):
            places = [[id(each) for each in every] for every in (ours, theirs)]
            for own, other in zip(part.samples, expected.samples, strict=True):
                assert places[0].index(id(own)) == places[1].index(id(other))
            differences += _different(part, expected)
    return received, len(pickle.dumps(whole)), differences


def _stage(kind: str) -> Any:
    """Return a stage of a kind, as far as it deals samples."""
    from stages.kinds.distill.work import DistillStage
    from stages.kinds.grpo.work import GrpoStage
    from stages.objectives.domain_objective import StageObjectives
    from stages.objectives.loss import ObjectiveSettings

    stage: Any = object.__new__(DistillStage if kind == "merge" else GrpoStage)
    stage.domains, stage.replay = dict.fromkeys("ab"), True
    alike, other = ObjectiveSettings(), ObjectiveSettings(aggregation="constant")
    own = {"a": alike, "b": other if kind == "unlike experts" else alike}
    stage.objectives = StageObjectives(mock.Mock(), mock.Mock(), own)
    stage.loop = mock.Mock(micro_batch_tokens=64)
    return stage


def _drawn(count: int, seed: int) -> list[Sample]:
    drawn = samples(count, seed, routes=True)
    for number, each in enumerate(drawn):
        # Long enough for contents to outweigh the names of fields.
        each.response, each.logprobs = np.tile(each.response, 32), np.tile(each.logprobs, 32)
        each.routes = np.resize(each.routes, (each.length, *each.routes.shape[1:]))
        each.domain, each.group = "ab"[number % 2], number // 4
        each.versions = np.full(len(each.response), seed, np.int32)
        each.advantages = np.arange(len(each.response), dtype=np.float32)
        each.loss_mask = np.arange(len(each.response)) % 3 > 0
    return drawn


def _different(part: MicroBatch, other: MicroBatch) -> list[str]:
    named = [
        (each.name, getattr(part, each.name), getattr(other, each.name)) for each in fields(part)
    ]
    named.append(("routes", part.row.routes, other.row.routes))
    return [
        name
        for name, ours, theirs in named
        if isinstance(ours, torch.Tensor) and not torch.equal(ours, theirs)
    ]


@pytest.mark.parametrize("kind", ["expert", "unlike experts", "merge"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_receives_its_own_samples_and_outlines_of_the_others(
    on: On, layout: str, kind: str
) -> None:
    """Micro-batches are those of all samples, bit for bit; bytes shrink by the ranks that share."""
    data = {"TP2": 1, "DP4 EP2": 4}.get(layout, 2)
    for rank, (received, whole, differences) in enumerate(
        on(LAYOUTS[layout], partial(distribute, kind))
    ):
        assert not differences
        if rank:
            assert received < 1.2 * whole / data, (received, whole)


def test_a_sample_s_outline_has_its_lengths() -> None:
    [sample] = _drawn(1, 0)
    outline = sample.outline()
    assert outline.length == sample.length
    assert np.array_equal(outline.learned, sample.learned)
    assert outline.advantage == sample.advantage
    assert len(pickle.dumps(outline)) < 1200
