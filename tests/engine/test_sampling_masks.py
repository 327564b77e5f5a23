"""The kept sets of vLLM's sampling masks, through its own classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

from parallel.engine import refit_extension
from parallel.engine.core import kept_sets
from parallel.engine.refit_extension import RefitExtension, empty_whole_masks
from parallel.engine.wire import Sampling

VOCABULARY, WIDTH = 40, 4
KEPT = [[3, 5], list(range(VOCABULARY)), list(range(0, VOCABULARY, 3)), [], [39]]


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SamplingMaskTensors, "tolists", SamplingMaskTensors.tolists)
    empty_whole_masks()
    yield


def tensors() -> SamplingMaskTensors:
    """Return what vLLM's kernel leaves on the device for KEPT: ids, bits and counts."""
    ids = torch.zeros(len(KEPT), WIDTH, dtype=torch.int32)
    bits = np.zeros((len(KEPT), VOCABULARY), np.uint8)
    for row, kept in enumerate(KEPT):
        ids[row, : min(WIDTH, len(kept))] = torch.tensor(kept[:WIDTH], dtype=torch.int32)
        bits[row, kept] = 1
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
    counts = torch.tensor([len(kept) for kept in KEPT], dtype=torch.int32)
    return SamplingMaskTensors(ids, packed, counts, VOCABULARY)


def completion(mask: SamplingMask, count: int) -> CompletionOutput:
    return CompletionOutput(0, "", [0] * count, None, [], sampling_mask=mask)


def test_masks_become_kept_sets_and_whole_ones_cost_nothing() -> None:
    """Also a set wider than the compact row, which vLLM unpacks from its bits."""
    found = tensors().tolists(np.ones(len(KEPT), np.int32))  # as vLLM's runner calls it
    rows = [found.slice_request(row, 1).token_ids.tolist() for row in range(len(KEPT))]
    assert rows == [[] if len(kept) == VOCABULARY else kept for kept in KEPT]
    output = completion(SamplingMask([rows[row] for row in (0, 1, 2)]), 3)
    sampling = Sampling(1.0, max_tokens=3, end_tokens=(1,), top_k=20, top_p=0.9)
    kept = kept_sets(output, sampling, VOCABULARY)
    assert [each.tolist() for each in kept] == KEPT[:3]
    assert all(each.dtype == np.int32 for each in kept)


def test_a_request_that_keeps_all_has_no_sets_on_an_engine_with_masks() -> None:
    output = completion(SamplingMask([[], []]), 2)
    assert kept_sets(output, Sampling(1.0, max_tokens=2, end_tokens=(1,)), VOCABULARY) == []
    assert kept_sets(output, Sampling(0.0, max_tokens=2, end_tokens=(1,)), VOCABULARY) == []


@pytest.mark.parametrize("masks", [True, False])
def test_a_worker_empties_whole_masks_where_its_engine_returns_masks(
    masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(refit_extension, "get_tp_group", lambda: alone)
    monkeypatch.setattr(refit_extension, "empty_whole_masks", lambda: emptied.append(True))
    worker = RefitExtension()
    worker.model_config = SimpleNamespace(return_sampling_mask=masks)
    with pytest.raises(ValidationError):
        worker.prepare("no model")  # which it reads next
    assert emptied == [True] * masks
