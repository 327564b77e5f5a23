"""Merges of weights: equal bits whatever layouts save the models and merge them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.settings import LayoutSettings
from parallel.weights.names import is_precise, is_router
from tests.layouts import merge_weights_cases as cases
from tests.layouts.cases import MATRIX
from tests.ranks import On
from tests.tiers import tiered

ONE = LayoutSettings()
# The layout that saves each model: none knows the other's.
SAVED = {"start": "TP2 EP2 PP2", "sums": "EP2", "words": "1 rank"}
METHODS: dict[str, dict[str, Any]] = {
    "average": {"weights": {"words": 0.25}},
    "task_arithmetic": {"method": {"name": "task_arithmetic", "lambda": 0.7}},
    "ties": {"method": {"name": "ties", "density": 0.3}},
    "dare": {"method": {"name": "dare", "drop": 0.4}},
    "dare ties": {"method": {"name": "dare", "then": "ties"}, "routers": "kept"},
    "sce": {"method": {"name": "sce", "density": 0.5}},
    "ram": {"method": {"name": "ram", "rescale": 0.2}},
}
FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "bf16")


@pytest.fixture(scope="session")
def saved(on: On, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The paths of the saved models of each family."""
    found = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        for name, layout in SAVED.items():
            on(MATRIX[layout], cases.save_model, MATRIX[layout], family, name, str(directory))
        found[family] = {name: str(directory / name / "step_0") for name in SAVED}
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    tiered(
        [(family, name) for family in FAMILIES for name in ("1 rank", "TP2 EP2 PP2", "ETP2")],
        {("qwen3_moe", "ETP2"), ("bf16", "TP2 EP2 PP2")},
    ),
)
def test_tensors_are_read_from_checkpoints_of_any_layout(
    family: str, layout: str, on: On, saved: dict[str, dict[str, str]]
) -> None:
    for checkpoint in saved[family].values():
        for wrong in on(MATRIX[layout], cases.read_by_tensors, MATRIX[layout], family, checkpoint):
            assert wrong == []


@pytest.mark.parametrize("name", METHODS)
def test_every_layout_merges_alike(
    name: str, on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    found = {}
    for layout in ("1 rank", "TP2 EP2 PP2", "DP2"):
        output = tmp_path / layout.replace(" ", "_")
        block = {"paths": saved["bf16"], **METHODS[name]}
        on(MATRIX[layout], _merge, MATRIX[layout], str(output), block)
        [found[layout]] = on(ONE, cases.weights, "bf16", str(output / "checkpoints" / "step_0"))
    first, *others = found.values()
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(first[each], other[each]) for each in first)
    models = {each: on(ONE, cases.weights, "bf16", path)[0] for each, path in saved["bf16"].items()}
    same = {each for each in first if torch.equal(first[each], models["start"][each])}
    assert same == {each for each in first if name == "dare ties" and is_router(each)}


@pytest.mark.parametrize(
    ("family", "layouts"),
    tiered(
        [
            (family, layouts)
            for family in ("qwen3_moe", "glm4_moe")  # softmax and sigmoid
            for layouts in ("DP2, CP2 EP2 VPP2", "TP2 EP2 PP2", "TP2, PP2, EP2, CP2")
        ],
        {("qwen3_moe", "DP2, CP2 EP2 VPP2"), ("glm4_moe", "TP2 EP2 PP2")},
    ),
)
def test_every_layout_recalibrates_alike(
    family: str, layouts: str, on: On, saved: dict[str, dict[str, str]]
) -> None:
    [whole] = on(ONE, cases.recalibrated_routers, ONE, family, saved[family])
    assert len(whole) == (4 if family == "qwen3_moe" else 3)  # layers with experts
    [start] = on(ONE, cases.weights, family, saved[family]["start"])
    for layout in layouts.split(", "):
        call = partial(cases.recalibrated_routers, MATRIX[layout], family, saved[family])
        found: dict[str, torch.Tensor] = {}
        for rank in on(MATRIX[layout], call):
            for name, router in rank.items():
                assert torch.equal(found.setdefault(name, router), router), (layout, name)
        assert found.keys() == whole.keys()
        for name, router in found.items():
            change = (whole[name] - start[name]).norm()
            assert change > 0.1 * start[name].norm()
            # Forward passes in fp32 differ: sigmoid routers by 2.4e-7 of the change.
            assert (router - whole[name]).norm() < 1e-5 * change, (layout, name)


def test_a_rank_without_samples_recalibrates_too(on: On, saved: dict[str, dict[str, str]]) -> None:
    found = []
    for layout in (ONE, MATRIX["DP2"]):
        call = partial(cases.recalibrated_routers, layout, "qwen3_moe", saved["qwen3_moe"], 1)
        found += on(layout, call)
    for name, router in found[0].items():
        assert torch.equal(found[1][name], found[2][name])
        torch.testing.assert_close(found[1][name], router, rtol=1e-4, atol=1e-7)


def test_recalibration_changes_routers_alone_and_repeats(
    on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    found = {}
    for name, layout, routers in (
        ("merged", "1 rank", "merged"),
        ("first", "1 rank", "recalibrated"),
        ("again", "1 rank", "recalibrated"),
        ("spread", "TP2 EP2 PP2", "recalibrated"),
    ):
        output = str(tmp_path / name)
        block = {"paths": saved["glm4_moe"], "method": "ties", "routers": routers}
        on(MATRIX[layout], _merge, MATRIX[layout], output, block, "glm4_moe")
        [found[name]] = on(ONE, cases.weights, "glm4_moe", f"{output}/checkpoints/step_0")
    merged, first, again, spread = found.values()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        recalibrated = is_router(name) and not is_precise(name)
        assert torch.equal(tensor, merged[name]) != recalibrated
        if recalibrated:
            torch.testing.assert_close(spread[name], tensor, rtol=1e-4, atol=1e-7)
        else:
            assert torch.equal(spread[name], tensor)


def test_demonstrations_recalibrate_with_their_responses(
    on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    found = []
    for data in ("prompts", "demonstrations"):
        output = str(tmp_path / data)
        recalibration = {"data": data, "samples": 4}
        block = {"routers": "recalibrated", "recalibration": recalibration}
        on(ONE, _merge, ONE, output, {"paths": saved["qwen3_moe"], **block}, "qwen3_moe")
        found += on(ONE, cases.weights, "qwen3_moe", f"{output}/checkpoints/step_0")
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]) != is_router(name)


def test_a_merge_that_overflows_on_the_samples_leaves_no_checkpoint(
    on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    on(ONE, cases.save_extreme, "qwen3_moe", str(tmp_path), "pre_mlp_layernorm", 3e38)
    paths = {**saved["qwen3_moe"], "words": str(tmp_path / "step_0")}
    block = {"paths": paths, "weights": {"words": 3}, "routers": "recalibrated"}
    said = "stages.merged.method: the merged model overflows on the domains' samples at model."
    with pytest.raises(AssertionError, match=said):
        on(MATRIX["PP2"], _merge, MATRIX["PP2"], str(tmp_path / "merged"), block, "qwen3_moe")
    assert not (tmp_path / "merged").exists()


def test_a_hugging_face_checkpoint_is_a_model_too(
    on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    on(ONE, cases.export_model, "glm4_moe", "words", str(tmp_path))
    paths = saved["glm4_moe"]
    found = []
    for words in (paths["words"], str(tmp_path / "words_exported")):
        block = {"paths": {**paths, "words": words}, "method": "ties"}
        output = tmp_path / str(len(found))
        on(MATRIX["EP2"], _merge, MATRIX["EP2"], str(output), block, "glm4_moe")
        found += on(ONE, cases.weights, "glm4_moe", str(output / "checkpoints" / "step_0"))
    assert all(torch.equal(found[0][each], found[1][each]) for each in found[0])


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"vocabulary_size": 96}, "embedding.word_embeddings.weight is [96, 32], and [80, 32]"),
        ({"layers": 5}, "decoder.layers.input_layernorm.weight is [5, 32], and [4, 32]"),
        ({"family": "mixtral"}, "decoder.layers.self_attention.q_layernorm.weight is missing"),
    ],
)
def test_another_model_is_refused(
    changed: dict[str, Any],
    found: str,
    on: On,
    saved: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    call = partial(cases.merge_another_model, saved["qwen3_moe"], str(tmp_path), **changed)
    [message] = on(ONE, call)
    assert message.startswith(f"/step_0: another model: {found}"), message
    assert not (tmp_path / "merged" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"weights": {"sums": 1e308, "words": 1e308}}, "stages.merged.method: the merged "),
        ({"method": {"name": "task_arithmetic", "lambda": 1e300}}, "stages.merged.method: the "),
        ({"method": {"name": "ram", "rescale": 1e300}}, "use smaller weights, or a smaller scale"),
    ],
)
def test_a_merge_that_overflows_leaves_no_checkpoint(
    block: dict[str, Any], said: str, on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=said):
        on(ONE, _merge, ONE, str(tmp_path / "merged"), {"paths": saved["bf16"], **block})
    assert not (tmp_path / "merged").exists()


def test_a_model_that_is_not_finite_is_named(
    on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    on(ONE, cases.save_extreme, "qwen3_moe", str(tmp_path), "final_layernorm", float("inf"))
    paths = {**saved["qwen3_moe"], "words": str(tmp_path / "step_0")}
    said = "stages.merged.models: words: model.norm.weight has NaN or infinite elements"
    with pytest.raises(AssertionError, match=said):
        on(ONE, _merge, ONE, str(tmp_path / "merged"), {"paths": paths}, "qwen3_moe")


def test_a_damaged_model_is_refused_and_a_partial_merge_replaced(
    on: On, saved: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    partial_one = tmp_path / "merged" / "checkpoints" / "tmp_step_0"
    partial_one.mkdir(parents=True)
    (partial_one / "state.json").write_text("{}")
    block = {"paths": saved["qwen3_moe"]}
    on(ONE, _merge, ONE, str(tmp_path / "merged"), block, "qwen3_moe")
    assert [each.name for each in partial_one.parent.iterdir()] == ["step_0"]
    copied = tmp_path / "step_0"
    shutil.copytree(saved["qwen3_moe"]["words"], copied)
    file = next(copied.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    damaged = {"paths": {**saved["qwen3_moe"], "words": str(copied)}}
    with pytest.raises(AssertionError, match="does not match its checksum"):
        on(ONE, _merge, ONE, str(tmp_path / "again"), damaged, "qwen3_moe")
    assert not (tmp_path / "again").exists()


def _merge(layout: LayoutSettings, output: str, block: dict[str, Any], model: str = "bf16") -> None:
    cases.merge(layout, model, output, **block)
