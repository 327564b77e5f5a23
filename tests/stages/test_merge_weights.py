"""A merge of weights on one rank: what it reads of which model and how it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from parallel.weights.names import is_router, tensors
from stages.kinds.merge_weights import work as merge_weights
from stages.kinds.merge_weights.methods.tensors import overlap_counts
from stages.kinds.merge_weights.settings import MergeWeightsSettings
from stages.kinds.merge_weights.work import WeightMerge
from tests.fake_engines import MODEL, toy_domain, toy_job, toy_run

pytestmark = pytest.mark.usefixtures("one_rank")

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
ROUTER = "model.layers.0.mlp.gate.weight"
NORM = "model.norm.weight"
MODELS = {"b": "experts.words", "a": "experts.sums", "c": "other"}


class Weights:
    """A model whose tensors are drawn for its path; routers differ from the start's by 100."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> torch.Tensor:
        random = torch.Generator().manual_seed(sum(f"{self.path.name}{name}".encode()))
        moved = 100 * (self.path.name != "start") if is_router(name) else 0
        return torch.randn(8, generator=random).to(torch.bfloat16) + moved


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that were opened."""
    found: list[Path] = []

    def of(path: Path, *_: Any) -> Weights:
        found.append(path)
        return Weights(path)

    monkeypatch.setattr(merge_weights, "_opened", of)
    return found


def merge(precision: str = "bf16", seeded_as: str = "soup", **given: Any) -> WeightMerge:
    block = MergeWeightsSettings.model_validate({"from": "start", "models": MODELS, **given})
    model = MODEL.model_copy(update={"precision": precision})
    run = toy_run(sums=toy_domain()).model_copy(update={"model": model, "stages": {"soup": block}})
    models = {name: Path(f"/{name}") for name in MODELS}
    named: Any = {"stage": "soup", "kind": "merge_weights", "block": "soup"}
    job = toy_job(
        Path("/soup"),
        run,
        domain=None,
        seeded_as=seeded_as,
        models=models,
        parent=Path("/start"),
        **named,
    )
    return WeightMerge(job, {})


def test_models_are_read_in_the_order_of_their_names_with_their_weights(opened: list[Path]) -> None:
    """Sums of floats depend on the order."""
    found = merge(method="ties", weights={"a": 0.25, "c": 3.0})._merged(NORM)
    assert [path.name for path in opened] == ["b", "a", "c", "start"]
    assert list(found.weights) == [1.0, 0.25, 3.0]
    for number, name in enumerate(("b", "a", "c", "start")):
        read = found.read(number if name != "start" else -1)
        assert read.dtype == torch.float64
        assert torch.equal(read, Weights(Path(f"/{name}")).read(NORM).double())


def test_an_average_adds_up_in_double_precision_and_is_saved_in_the_models(
    opened: list[Path],
) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        whole = merge(precision, method="average", weights={"c": 2.0})
        found = whole.tensor(NORM)
        assert found.dtype == dtype
        of = {name: Weights(Path(f"/{name}")).read(NORM).double() for name in "abc"}
        assert torch.equal(found, ((of["b"] + of["a"] + 2 * of["c"]) / 4).to(dtype))
        assert whole.tensor(BIAS).dtype == torch.float32


def test_routers_are_the_start_s_where_they_are_kept(opened: list[Path]) -> None:
    for routers, moved in (("merged", 90), ("kept", 0)):
        whole = merge(routers=routers, method="average")
        start = Weights(Path("/start"))
        assert (whole.tensor(ROUTER).float() - start.read(ROUTER).float()).abs().min() >= moved
        assert torch.equal(whole.tensor(ROUTER), start.read(ROUTER)) == (routers == "kept")
        assert not torch.equal(whole.tensor(NORM), start.read(NORM))


def test_draws_are_of_the_run_the_stage_the_model_and_the_tensor(opened: list[Path]) -> None:
    dare: dict[str, Any] = {"method": {"name": "dare", "drop": 0.5}}
    one, other = merge(**dare), merge(**dare, seeded_as="other")

    def draw(of: WeightMerge, name: str, number: int) -> tuple[float, ...]:
        return tuple(of._generator(name, number).random(3).tolist())

    assert draw(one, NORM, 1) == draw(merge(**dare), NORM, 1)
    names = [(each, name, n) for each in (one, other) for name in (NORM, ROUTER) for n in range(3)]
    assert len({draw(*each) for each in names}) == len(names)
    reversed_ = dict(reversed(MODELS.items()))  # a model's draws are its own, wherever it stands
    assert draw(merge(**dare, models=reversed_), NORM, 2) == draw(one, NORM, 0)


@pytest.mark.parametrize("routers", ["merged", "kept"])
def test_overlaps_count_the_merged_tensors_alone(routers: str, opened: list[Path]) -> None:
    whole = merge(method={"name": "ram", "rescale": 0.2}, routers=routers)
    counts = sum(
        overlap_counts(whole._merged(name), whole.settings.method.changed_above or 0.0)
        for name in tensors(MODEL)
        if routers == "merged" or not is_router(name)
    )
    assert isinstance(counts, torch.Tensor)
    assert [list(each) for each in whole._overlaps] == counts.tolist()
    assert list(whole._merged(NORM).overlaps) == whole._overlaps
    assert merge(method="ties")._overlaps == []


def test_what_is_not_finite_is_named_by_its_model(
    opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Weights.read

    def infinite(self: Weights, name: str) -> torch.Tensor:
        found = read(self, name)
        return found * torch.inf if (self.path.name, name) == ("a", NORM) else found

    monkeypatch.setattr(Weights, "read", infinite)
    with pytest.raises(UserError, match=r"^stages\.soup\.models: a: model\.norm\.weight has NaN"):
        merge(method="ties").tensor(NORM)
    monkeypatch.setattr(Weights, "read", read)
    method: Any = {"name": "task_arithmetic", "lambda": 1e300}
    with pytest.raises(UserError, match=r"^stages\.soup\.method: the merged model\.norm\.weight"):
        merge(method=method).tensor(NORM)


def test_a_checkpoint_is_checked_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[str, Path]] = []
    monkeypatch.setattr(
        merge_weights.load, "check_intact", lambda path: checked.append(("intact", path))
    )
    monkeypatch.setattr(
        merge_weights, "StoredWeights", lambda path, *_: checked.append(("stored", path))
    )
    monkeypatch.setattr(
        merge_weights, "checked_files", lambda _, path: checked.append(("files", path))
    )
    merge_weights._opened(tmp_path, MODEL, {})
    assert checked == [("intact", tmp_path), ("stored", tmp_path)]
    (tmp_path / "config.json").write_text("{}")
    merge_weights._opened(tmp_path, MODEL, {})
    assert checked[2:] == [("files", tmp_path)]
