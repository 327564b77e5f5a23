"""Tensors of a checkpoint read by parts: chunks of any cut, and names of either kind of layer."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint import tensors as stored
from parallel.checkpoint.tensors import Place, StoredWeights, places
from parallel.files import CheckpointError
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings
from tests.layouts.hugging_face_cases import MODELS

WHOLE = torch.arange(42.0).view(7, 6).to(torch.bfloat16)
# Offsets and sizes of the chunks: from one row two of unlike lengths, and the longer one first.
CHUNKS = [((0, 0), (3, 2)), ((0, 2), (2, 4)), ((2, 2), (1, 4)), ((3, 0), (3, 6)), ((6, 0), (1, 6))]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chunks that were loaded, of a checkpoint whose only tensor is WHOLE."""
    found: list[Any] = []
    properties = TensorProperties(dtype=torch.bfloat16)
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in CHUNKS]
    tensor = TensorStorageMetadata(properties, WHOLE.size(), chunks)
    files = {
        MetadataIndex("kept", each.offsets): SimpleNamespace(relative_path="f", chunk=each)
        for each in chunks
    }
    metadata = SimpleNamespace(storage_data=files, state_dict_metadata={"kept": tensor})
    reader = SimpleNamespace(read_metadata=lambda: metadata)
    monkeypatch.setattr(stored, "CheckpointReader", lambda _: reader)

    def load(_: Path, file: Any) -> torch.Tensor:
        found.append(tuple(file.chunk.offsets))
        spans = zip(file.chunk.offsets, file.chunk.sizes, strict=True)
        return WHOLE[tuple(slice(start, start + size) for start, size in spans)]

    monkeypatch.setattr(stored, "_load", load)
    return found


def opened(monkeypatch: pytest.MonkeyPatch, **where: list[Place]) -> StoredWeights:
    ends = {
        name: tuple(max(p.box[0][d] + p.box[1][d] for p in own) for d in range(2))
        for name, own in where.items()
    }
    monkeypatch.setattr(stored, "tensors", lambda _: ends)
    nothing: Any = None
    return StoredWeights(Path("/checkpoint"), nothing, where)


def test_a_tensor_is_put_together_from_chunks_of_any_cut(
    loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [Place(((0, 0), (7, 6)), "kept", ((0, 0), (7, 6)))]
    # Rows 2 to 5 without the outer columns, below two rows from elsewhere.
    parts = [
        Place(((2, 0), (4, 4)), "kept", ((2, 1), (4, 4))),
        Place(((0, 0), (2, 4)), "kept", ((5, 2), (2, 4))),
    ]
    found = opened(monkeypatch, every=every, parts=parts)
    assert found.read("every").dtype == torch.bfloat16
    assert torch.equal(found.read("every"), WHOLE)
    assert torch.equal(found.read("parts"), torch.cat([WHOLE[5:7, 2:6], WHOLE[2:6, 1:5]]))
    for row in range(7):  # each alone: what it crosses, and nothing else
        loaded.clear()
        one = [Place(((0, 0), (1, 6)), "kept", ((row, 0), (1, 6)))]
        every_row = opened(monkeypatch, every=every, row=one)
        assert torch.equal(every_row.read("row"), WHOLE[row : row + 1])
        crossed = [at for at, size in CHUNKS if at[0] <= row < at[0] + size[0]]
        assert sorted(loaded) == sorted(crossed)


def test_a_chunk_is_loaded_once_for_tensors_that_are_read_in_turn(
    loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = {f"row_{n}": [Place(((0, 0), (1, 6)), "kept", ((n, 0), (1, 6)))] for n in (3, 4, 5, 6)}
    every = [Place(((0, 0), (7, 6)), "kept", ((0, 0), (7, 6)))]
    found = opened(monkeypatch, every=every, **cuts)
    for name, own in cuts.items():
        row = own[0].stored[0][0]
        assert torch.equal(found.read(name), WHOLE[row : row + 1])
    assert loaded == [(3, 0), (6, 0)]


@pytest.mark.parametrize("size", [(6, 6), (8, 6), (7, 5)])
@pytest.mark.usefixtures("loaded")
def test_a_tensor_of_another_shape_is_another_model_s(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape is what the places of all tensors fill together, in whatever order."""
    last = Place(((0, 0), (1, size[1])), "kept", ((size[0] - 1, 0), (1, size[1])))
    first = Place(((0, 0), (1, 1)), "kept", ((0, 0), (1, 1)))
    message = rf"kept is \[7, 6\], and \[{size[0]}, {size[1]}\] in this run's model"
    for order in ({"a": [last], "b": [first]}, {"a": [first], "b": [last]}):
        with pytest.raises(CheckpointError, match=message):
            opened(monkeypatch, **order)
    missing = [Place(((0, 0), (1, 1)), "gone", ((0, 0), (1, 1)))]
    with pytest.raises(CheckpointError, match="gone is missing, and"):
        opened(monkeypatch, a=missing)


def of_transformer_engine(name: str, latent: bool) -> str:
    """Return a parameter's name in a model of TransformerEngine's layers."""
    name = re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name
    )
    if latent:
        return re.sub(
            r"self_attention\.(q|kv)_layernorm\.weight",
            r"self_attention.linear_\1_up_proj.layer_norm_weight",
            name,
        )
    return re.sub(r"input_layernorm\.weight", "self_attention.linear_qkv.layer_norm_weight", name)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_places_do_not_depend_on_the_names_of_the_layers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransformerEngine fuses experts into one module, and norms into what comes after them."""
    policy = Policy(MODELS[family], LayoutSettings())
    expected, weights = places(policy), checkpoint_state.weights
    latent = family == "deepseek_v3"

    def renamed(of: Policy) -> dict[int, dict[str, Any]]:
        return {
            chunk: {of_transformer_engine(name, latent): shard for name, shard in own.items()}
            for chunk, own in weights(of).items()
        }

    names = {name for own in weights(policy).values() for name in own}
    assert names != {name for own in renamed(policy).values() for name in own}
    monkeypatch.setattr(checkpoint_state, "weights", renamed)
    assert places(policy) == expected
    experts = {name for name in expected if ".mlp.experts." in name}
    assert len(experts) >= 3 * MODELS[family].experts
    boxes = {(place.key, place.stored) for name in experts for place in expected[name]}
    assert len(boxes) == len(experts)  # each expert has its own
