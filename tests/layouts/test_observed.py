"""The trainer's values of tokens are the same under every layout, and of the share of prompts."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from parallel.sample import Sample
from parallel.settings import LayoutSettings
from tests.layouts.cases import CORE, MATRIX, batches, build, samples
from tests.ranks import On

SHARE = 0.5
TEMPERATURE = 0.8
Recorded = list[dict[str, np.ndarray]]


def drawn() -> list[Sample]:
    """Samples of eight prompts, some of whose tokens are not learned."""
    found = samples(24)
    for number, sample in enumerate(found):
        sample.problem = sha256(str(number // 3).encode()).hexdigest()
        if number % 4 == 0:
            sample.loss_mask = np.arange(len(sample.response)) % 3 > 0
    return found


def observed(layout: LayoutSettings) -> tuple[Recorded, Recorded]:
    """Return what the main rank gets of every sample, and the entropies as an objective has them.

    Two updates, of micro-batches that hold samples of both kinds.
    """
    from stages.sampling.recording import add_observed, collect_observed, observe

    policy, whole = build(layout), drawn()
    updates = [(part, batches(part, count=3)) for part in (whole[:12], whole[12:])]

    def loss(responses: Any) -> tuple[Any, None]:
        part = responses.batch
        logprobs = responses.logprobs(TEMPERATURE)
        part.old_logprobs = logprobs.detach()
        observe(responses, TEMPERATURE, SHARE)
        add_observed(part, "teacher_kl", 0.25 * logprobs)
        add_observed(part, "teacher_kl", 0.75 * logprobs)
        return 0.0 * logprobs.sum(), None

    for _, parts in updates:
        policy.accumulate(parts, loss, tokens=1.0)
    collect_observed(updates, SHARE)
    expected: Recorded = [{} for _ in whole]
    if layout.ranks == 1:
        [part] = batches(whole)
        [every] = policy.evaluate([part], lambda r: r.entropy(TEMPERATURE))
        rows = {id(each): row.numpy() for each, row in zip(part.samples, every, strict=True)}
        expected = [{"entropies": rows[id(each)][: len(each.response)]} for each in whole]
    return [sample.recorded for sample in whole], expected


@pytest.fixture(scope="session")
def one_rank_s(on: On) -> tuple[Recorded, Recorded]:
    [found] = on(LayoutSettings(), observed, LayoutSettings())
    return found


def test_one_rank_records_the_share_of_prompts(one_rank_s: tuple[Recorded, Recorded]) -> None:
    recorded, expected = one_rank_s
    chosen = [int(sample.problem[-8:], 16) < SHARE * 16**8 for sample in drawn()]
    assert [bool(each) for each in recorded] == chosen
    assert 0 < sum(chosen) < len(chosen)
    for sample, own, other in zip(drawn(), recorded, expected, strict=True):
        if not own:
            continue
        learned = np.isin(np.arange(len(sample.response)), sample.learned)
        entropies = np.where(learned, other["entropies"], 0)
        np.testing.assert_allclose(own["entropies"], entropies, atol=1e-6)
        assert (own["entropies"][learned] > 0).all()
        assert ((own["trainer_logprobs"] < 0) == learned).all()
        np.testing.assert_allclose(own["teacher_kl"], own["trainer_logprobs"], atol=1e-6)


@pytest.mark.parametrize("name", CORE[1:])
def test_every_layout_records_the_same(
    name: str, on: On, one_rank_s: tuple[Recorded, Recorded]
) -> None:
    (recorded, _), *others = on(MATRIX[name], observed, MATRIX[name])
    for own, expected in zip(recorded, one_rank_s[0], strict=True):
        assert own.keys() == expected.keys()
        for column, values in expected.items():
            np.testing.assert_allclose(own[column], values, atol=2e-5)
    assert not any(each for found, _ in others for each in found)  # only the main rank has them
