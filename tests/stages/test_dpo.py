"""Preference optimisation on one rank: the reference's log-probabilities, and a step's loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from parallel import batch
from parallel.batch import MicroBatch, RankPlace
from parallel.checkpoint.save import Saver
from parallel.files import HUGGING_FACE
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings
from stages.data.tokenizer import CharacterTokenizer
from stages.kinds.dpo import reference_logprobs
from stages.kinds.dpo import work as dpo
from stages.kinds.dpo.pairs import DrawnPair
from stages.kinds.dpo.reference_logprobs import ReferenceLogprobs, samples_of, sequence_logprobs
from stages.kinds.dpo.settings import DpoSettings
from stages.objectives.preference import SigmoidSettings
from stages.settings import StageJob
from tests.fake_engines import MODEL, toy_domain, toy_job, toy_run

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENIZER = CharacterTokenizer()
ROWS = [{"prompt": f"{n}+1=", "chosen": "1" * (n % 3 + 1), "rejected": "23"} for n in range(8)]


def own(directory: Path, **given: Any) -> DpoSettings:
    """Return the settings of a stage on two files of pairs, written to the directory."""
    for name, rows in (("few", ROWS[:3]), ("more", ROWS[3:])):
        text = "\n".join(map(json.dumps, rows))
        (directory / f"{name}.jsonl").write_text(text)
    sources = {
        name: {"source": "jsonl", "path": str(directory / f"{name}.jsonl")}
        for name in ("few", "more")
    }
    return DpoSettings.model_validate(
        {
            "from": "parent",
            "data": sources,
            "pairs_per_step": 2,
            "optimizer": {"learning_rate": 1e-3},
            "loop": {"steps": 2, "micro_batch_tokens": 32},
            **given,
        }
    )


def job(directory: Path, settings: DpoSettings, held_out: float = 1e-9, **given: Any) -> StageJob:
    domain = toy_domain()
    prompts = domain.prompts.model_copy(update={"held_out_fraction": held_out})
    domain = domain.model_copy(update={"prompts": prompts})
    run = toy_run(sums=domain).model_copy(update={"stages": {"tuned": settings}})
    fields = {"stage": "tuned", "kind": "dpo", "block": "tuned", "seeded_as": "tuned", **given}
    return toy_job(directory, run, domain=None, **fields)


def stream(of: StageJob, name: str) -> dpo.PairStream:
    assert isinstance(of.block_settings, DpoSettings)
    return dpo._stream(of, of.block_settings, name, TOKENIZER)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Policy, Path]:
    """A policy and its checkpoint."""
    policy = Policy(MODEL, LayoutSettings())
    policy.start_fresh(3)
    Saver(tmp_path / "checkpoints", asynchronous=False).begin(policy, 0, {})
    return policy, tmp_path / "checkpoints" / "step_0"


def test_each_response_has_its_own_sum_over_its_tokens(
    saved: tuple[Policy, Path], tmp_path: Path
) -> None:
    """Also of pairs beyond the first pass, by one sequence at a time."""
    policy, path = saved
    of = job(tmp_path, own(tmp_path))
    assert isinstance(of.block_settings, DpoSettings)
    streams = {name: stream(of, name) for name in of.block_settings.data}
    with mock.patch.object(reference_logprobs, "PASSES", 1):
        found = ReferenceLogprobs(of, of.block_settings, streams, path)
    drawn = [each for source in streams.values() for each in source.all()]
    assert len(drawn) == len(ROWS)
    seen = set()
    for pair in drawn:
        for sample, value in zip((pair.chosen, pair.rejected), found.of(pair), strict=True):
            parts = batch.split([sample], RankPlace.here(), 64, replay=False)
            [logprobs] = policy.evaluate(parts, lambda each: each.logprobs())
            assert logprobs.shape == (1, len(sample.response))
            assert value == pytest.approx(logprobs.double().sum().item(), rel=1e-6)
            seen.add(value)
    assert len(seen) > len(ROWS)
    held = np.load(of.files.reference)
    assert {name: held[name].dtype for name in held.files if name != "key"} == {
        "source/few": np.float64,
        "source/more": np.float64,
    }


def test_a_sum_of_log_probabilities_is_of_learned_tokens_in_double_precision() -> None:
    logprobs = torch.full((1, 70_000), -0.1)
    mask = torch.ones(1, 70_000, dtype=torch.bool)
    mask[0, 0], logprobs[0, 0] = False, -1e6
    responses: Any = SimpleNamespace(logprobs=lambda: logprobs, batch=SimpleNamespace(mask=mask))
    found = sequence_logprobs(responses)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(69_999 * float(np.float32(-0.1)), rel=1e-12)


@pytest.fixture
def computations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The references that were computed, each as zeros."""
    found: list[Path] = []

    def compute(self: ReferenceLogprobs) -> dict[str, np.ndarray]:
        found.append(self._reference)
        return {name: np.zeros((len(each.rows), 2)) for name, each in self._streams.items()}

    monkeypatch.setattr(ReferenceLogprobs, "_compute", compute)
    return found


def checkpoint(path: Path, digest: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "checksums.json").write_text(json.dumps({"digest": digest, "files": {}}))
    return path


def test_what_the_log_probabilities_depend_on_computes_them_again(
    computations: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(reference_logprobs, "report_notice", notices.append)
    settings = own(tmp_path)
    given = job(tmp_path, settings)
    one = checkpoint(tmp_path / "one" / "step_0", "a")

    def again(of: StageJob = given, path: Path = one, *names: str) -> bool:
        streams = {name: stream(of, name) for name in names or settings.data}
        return ReferenceLogprobs(of, settings, streams, path).computed

    assert again()
    assert not again()
    assert again(given, checkpoint(one, "b"))
    model = given.settings.model.model_copy(update={"rope_base": 12345.0})
    other = given.model_copy(
        update={"settings": given.settings.model_copy(update={"model": model})}
    )
    assert again(other) and not again(other) and again(given)
    assert again(given, one, "few") and again()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / HUGGING_FACE).write_text("{}")
    for digest in ("c", "d"):
        monkeypatch.setattr(reference_logprobs, "weights_digest", lambda _, d=digest: d)
        assert again(given, theirs) and not again(given, theirs)
    assert len(computations) == 8
    assert all("of another reference, model or other pairs" in each for each in notices)


def test_a_file_that_cannot_be_written_leaves_none(
    computations: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(np, "savez", full)
    of = job(tmp_path / "stage", own(tmp_path))
    path = checkpoint(tmp_path / "one" / "step_0", "a")
    with pytest.raises(OSError, match="no space left"):
        ReferenceLogprobs(of, own(tmp_path), {"few": stream(of, "few")}, path)
    assert list((tmp_path / "stage").iterdir()) == []


class PairPolicy:
    """Stands for the policy: log-probabilities in fp64 that are its parameters."""

    def __init__(self) -> None:
        self.values: list[tuple[MicroBatch, torch.Tensor]] = []
        self.read = 0.0

    def accumulate(self, parts: list[MicroBatch], loss: Callable[..., Any], read: float) -> Any:
        self.read = read
        for number, part in enumerate(parts):
            draw = np.random.default_rng(number)
            values = torch.tensor(-draw.random(tuple(part.mask.shape)), requires_grad=True)
            self.values.append((part, values))
            responses: Any = SimpleNamespace(batch=part, logprobs=lambda v=values: v)
            value, sums = loss(responses)
            value.backward()
            yield sums


def test_a_step_s_loss_is_the_mean_over_pairs_by_the_formula() -> None:
    """With lengths and references that tell every response apart, over several micro-batches."""
    lengths = [(3, 1), (2, 5), (4, 4), (1, 6)]

    def sample(length: int) -> Any:
        return dpo.Sample("few", np.array([5, 6], np.int32), np.full(length, 7, np.int32))

    pairs = [DrawnPair("few", n, sample(a), sample(b)) for n, (a, b) in enumerate(lengths)]
    reference = [(-1.0, -2.0), (-0.5, -3.0), (-2.5, -0.25), (-4.0, -1.5)]
    settings = SigmoidSettings(beta=0.7, logprobs="mean", label_smoothing=0.1)
    samples = samples_of(pairs)
    parts = batch.split(samples, RankPlace.here(), 20, replay=False, together=2)
    assert len(parts) > 1
    policy: Any = PairPolicy()
    found = dpo.accumulate(policy, parts, samples, reference, settings)
    assert policy.read == sum(len(each.prompt) + len(each.response) - 1 for each in samples)
    total, rewards = torch.zeros((), dtype=torch.float64), []
    leaves = []
    for part, values in policy.values:
        leaf = values.detach().clone().requires_grad_()
        leaves.append((values, leaf))
        for row, each in enumerate(part.samples[::2]):
            better, worse = (
                (
                    leaf[2 * row + side, : lengths[each.group][side]].sum()
                    - reference[each.group][side]
                )
                / lengths[each.group][side]
                for side in (0, 1)
            )
            likely = torch.nn.functional.logsigmoid(0.7 * (better - worse))
            unlikely = torch.nn.functional.logsigmoid(-0.7 * (better - worse))
            total = total - (0.9 * likely + 0.1 * unlikely) / len(pairs)
            rewards.append((0.7 * better.item(), 0.7 * worse.item()))
    total.backward()
    assert len(rewards) == len(pairs)
    for values, leaf in leaves:
        torch.testing.assert_close(values.grad, leaf.grad, rtol=1e-5, atol=1e-9)
    expected = {
        "loss": total.item(),
        "reward_chosen": float(np.mean([better for better, _ in rewards])),
        "reward_rejected": float(np.mean([worse for _, worse in rewards])),
        "reward_margin": float(np.mean([better - worse for better, worse in rewards])),
        "reward_accuracy": float(np.mean([better > worse for better, worse in rewards])),
    }
    assert found == pytest.approx(expected)


def test_a_stage_starts_from_its_parent_and_compares_with_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on what it draws, with the rows that the audit finds it by."""
    opened: list[Path] = []

    def reference(job: Any, own: Any, streams: Any, path: Path) -> Any:
        opened.append(path)
        return SimpleNamespace(of=lambda pair: (pair.name, pair.row))

    monkeypatch.setattr(dpo, "ReferenceLogprobs", reference)
    monkeypatch.setattr(dpo, "TrainedPolicy", lambda *_: SimpleNamespace())
    settings = own(tmp_path)
    dpo.Dpo(job(tmp_path, settings, parent=tmp_path / "parent"))
    models = {"reference": tmp_path / "other"}
    stage = dpo.Dpo(job(tmp_path, settings, parent=tmp_path / "parent", models=models))
    assert opened == [tmp_path / "parent", tmp_path / "other"]
    given: dict[str, Any] = {}

    def accumulate(
        policy: Any, parts: Any, samples: Any, known: Any, loss: Any
    ) -> dict[str, float]:
        given.update(known=known, loss=loss, samples=samples)
        return {"loss": 0.0}

    def finish(step: int, parts: Any, samples: Any, rows: Any) -> dict[str, float]:
        given.update(rows=rows)
        return {}

    monkeypatch.setattr(dpo, "accumulate", accumulate)
    monkeypatch.setattr(stage, "finish_step", finish)
    stage.sources["few"].too_long = 4  # of steps before
    assert stage.step(1) == {"loss": 0.0, "too_long": 0.0}
    assert [each.domain for each in given["samples"]] == ["few", "few", "more", "more"]
    assert [name for name, _ in given["known"]] == ["few", "more"]
    assert given["rows"] == [row for _, row in given["known"] for _ in range(2)]
    assert given["loss"] == settings.loss
    texts = [TOKENIZER.decode(each.response).rstrip("!") for each in given["samples"]]
    assert [text.startswith("1") for text in texts] == [True, False, True, False]


def test_a_source_has_its_own_order_its_limit_and_no_prompt_that_is_held_out(
    tmp_path: Path,
) -> None:
    settings = own(tmp_path)
    of = job(tmp_path, settings)
    rows = "\n".join(json.dumps({**ROWS[0], "prompt": f"{n}+1="}) for n in range(60))
    for name in settings.data:
        (tmp_path / f"{name}.jsonl").write_text(rows)
    few, more = (stream(of, name) for name in settings.data)
    assert few.limit == MODEL.max_positions and len(few.rows) == 60
    orders = [[each.next().row for _ in range(60)] for each in (few, more)]
    assert orders[0] != orders[1]
    short = own(tmp_path, data={"few": {**settings.data["few"].model_dump(), "max_tokens": 7}})
    (tmp_path / "few.jsonl").write_text(rows)
    assert stream(job(tmp_path, short), "few").limit == 7
    left = len(stream(job(tmp_path, settings, held_out=0.5), "few").rows)
    assert 10 < left < 50
    elsewhere = job(tmp_path, settings, seeded_as="other")
    assert [stream(elsewhere, "few").next().row for _ in range(1)] != orders[0][:1] or (
        [each.row for each in stream(elsewhere, "few").draw(1, 60)] != orders[0]
    )
