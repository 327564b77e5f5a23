"""The methods of a merge of weights: against mergekit, and against the papers in plain numpy."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from stages.kinds.merge_weights.methods.tensors import MergedTensor, overlap_counts
from stages.objectives.registry import WEIGHT_METHODS
from tests.stages.mergekit_values import CASES, FILE, SHAPES, WEIGHTS, tensors

SHAPE = SHAPES["matrix"]


def merged(
    given: list[torch.Tensor], weights: tuple[float, ...] = WEIGHTS, **more: Any
) -> MergedTensor:
    """Return a start and models as a method reads them: a copy at every call."""

    def generator(number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=number))

    return MergedTensor(lambda i: given[i + 1].clone(), weights, generator, **more)


def result(name: str, of: MergedTensor, **keys: Any) -> np.ndarray:
    algorithm = WEIGHT_METHODS[name]
    assert algorithm.settings is not None
    return algorithm.function(of, algorithm.settings.model_validate(keys)).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_a_method_equals_that_of_mergekit(case: str, shape: str) -> None:
    keys, _, _, weighted = CASES[case]
    given = tensors(SHAPES[shape])
    of = merged(given, WEIGHTS if weighted else (1.0,) * len(WEIGHTS))
    if "rescale" in keys:
        counts = overlap_counts(of, keys["threshold"]).tolist()
        of = merged(given, of.weights, overlaps=[(each[0], each[1]) for each in counts])
    found = result(case.split()[0], of, **keys)
    with np.load(FILE) as expected:
        # mergekit computes the scales of RAM+ in fp32.
        bound = 1e-7 if "rescale" in keys else 1e-12
        assert np.abs(found - expected[f"{case}/{shape}"]).max() < bound


@pytest.mark.parametrize("then", ["linear", "ties"])
def test_dare_drops_and_rescales(then: str) -> None:
    start, *models = tensors(SHAPE)
    found = result("dare", merged([start, *models]), drop=0.3, then=then, **{"lambda": 0.5})
    vectors = []
    for number, model in enumerate(models):
        kept = np.random.Generator(np.random.Philox(key=number)).random(model.numel()) >= 0.3
        assert 0.6 < kept.mean() < 0.8
        vectors.append((model - start).numpy() * kept.reshape(SHAPE) / 0.7)
    weighted = np.array(WEIGHTS)[:, None, None] * np.array(vectors)
    if then == "ties":
        agrees = np.sign(weighted) == np.where(weighted.sum(0) >= 0, 1, -1)
        divisor = (agrees * np.array(WEIGHTS)[:, None, None]).sum(0)
        change = (weighted * agrees).sum(0) / np.where(divisor == 0, 1, divisor)
    else:
        change = weighted.sum(0)
    assert np.abs(found - (start.numpy() + 0.5 * change)).max() < 1e-12


def test_dare_keeps_the_expected_change() -> None:
    """4 standard errors of a mean over 100,000 weights, each of variance drop / (1 - drop)."""
    given = [torch.zeros(100_000).double(), *(torch.ones(100_000).double() for _ in WEIGHTS)]
    found = result("dare", merged(given, (1.0, 1.0, 1.0)), drop=0.9)
    assert abs(found.mean() - 3) < 4 * (3 * 9 / 100_000) ** 0.5


def test_models_equal_to_the_start_change_nothing() -> None:
    start, *_ = tensors(SHAPE)
    given = [start] * 3
    for name in WEIGHT_METHODS:
        assert np.array_equal(result(name, merged(given, (1.0, 1.0))), start.numpy()), name


def test_ram_scales_a_models_own_changes_alone() -> None:
    """A model changed weights 0 and 1, another 1, 2 and 3: each has one shared, 1 and 2 own."""
    start = torch.zeros(4).double()
    first, second = torch.tensor([1.0, 2, 0, 0]).double(), torch.tensor([0.0, 4, 8, 16]).double()
    of = merged([start, first, second], (1.0, 1.0))
    assert overlap_counts(of, 0.5).tolist() == [[1, 1], [1, 2]]
    assert result("ram", of).tolist() == [1, 3, 8, 16]
    of = merged([start, first, second], (1.0, 1.0), overlaps=[(1, 1), (1, 2)])
    assert result("ram", of, rescale=0.2).tolist() == pytest.approx([1.2, 3, 8 * 1.1, 16 * 1.1])
    of = merged([start, first, second], (1.0, 1.0), overlaps=[(5, 0), (8, 1)])
    assert result("ram", of, rescale=0.2).tolist() == pytest.approx([1, 3, 8 * 1.2, 16 * 1.2])
    further = result("ram", of, rescale=0.2, max_ratio=3).tolist()
    assert further == pytest.approx([1, 3, 8 * 1.6, 16 * 1.6])


def test_ties_keeps_one_change_of_a_short_tensor_and_the_first_of_equal_ones() -> None:
    start, model = torch.zeros(4).double(), torch.tensor([1.0, -2, 2, 0]).double()
    of = merged([start, model, model], (1.0, 1.0))
    assert result("ties", of, density=0.01).tolist() == [0, -2, 0, 0]
    assert result("ties", of, density=0.75).tolist() == [1, -2, 2, 0]


def test_models_are_read_one_after_another() -> None:
    """The tensors that a method has alive at once do not grow with the number of models."""
    for name in WEIGHT_METHODS:
        assert _most_alive(name, 12) == _most_alive(name, 3) <= 5, name


def _most_alive(name: str, count: int) -> int:
    """Return the largest number of tensors read by a method that are alive at once."""
    alive: set[int] = set()
    most = 0

    def read(number: int) -> torch.Tensor:
        nonlocal most
        tensor = torch.full((4,), float(number)).double()
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most = max(most, len(alive))
        return tensor

    result(name, MergedTensor(read, (1.0,) * count, np.random.default_rng))
    return most
