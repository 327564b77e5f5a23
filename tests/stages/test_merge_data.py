"""A share of a merge's sequences is data that the teacher grades like the student's samples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.checkpoint.save import Saver
from stages.data.problem import Problem
from stages.data.tokenizer import CharacterTokenizer
from stages.sampling.sample_files import read_samples, samples_file
from tests.fake_engines import FakeEngine
from tests.stages.test_sft_mixture import collected, problems
from tests.stages.toy_merges import UNLIKE, check_kills, gradients, merge, run
from tests.stages.toys import after

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENIZER = CharacterTokenizer()


def lines(directory: Path, step: int) -> list[dict[str, Any]]:
    return read_samples(samples_file(directory / "rollouts", step))


def test_half_a_step_s_groups_are_demonstrations_of_each_domain(tmp_path: Path) -> None:
    engine = FakeEngine()
    stage = merge(tmp_path, engine, data_share=0.5)
    metrics = stage.step(1)
    assert engine.drawn.total() == 2 * 1 * 4  # of 2 prompts a domain, one
    recorded = lines(tmp_path, 1)
    kinds = Counter((line["domain"], line["demonstrated"]) for line in recorded)
    assert kinds == {(name, data): 4 for name in ("sums", "words") for data in (False, True)}
    for name in ("sums", "words"):
        share = {
            data: sum(
                len(line["response_tokens"])
                for line in recorded
                if (line["domain"], line["demonstrated"]) == (name, data)
            )
            for data in (False, True)
        }
        of_data = share[True] / sum(share.values())
        assert metrics[f"data_token_share/{name}"] == pytest.approx(of_data)
        assert metrics[f"sampled_token_share/{name}"] == pytest.approx(1 - of_data)
        mean = of_data * metrics[f"data_loss/{name}"]
        mean += (1 - of_data) * metrics[f"sampled_loss/{name}"]
        assert metrics[f"teacher_kl/{name}"] == pytest.approx(mean, rel=1e-5, abs=1e-9)
        assert metrics[f"data_too_long/{name}"] == 0
    assert metrics["data_loss/words"] > 0 == metrics["data_loss/sums"]  # its teacher, the student


def test_the_loss_of_data_is_the_method_s(tmp_path: Path) -> None:
    """The gradient is that of all tokens of a domain, whichever kind they are."""
    mixed = merge(tmp_path, method="forward_kl", data_share=0.5)
    mixed.data.draw(1)
    given = mixed.data.drawn
    assert all(sample.demonstrated and sample.logprobs is None for sample in given)
    plain = merge(tmp_path, method="forward_kl")
    own = [sample for sample in given if sample.domain == "words"]
    found, expected = gradients(mixed, own), gradients(plain, own)
    assert found["data_loss/words"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["data_token_share/words"] == 1
    assert found["sampled_loss/words"] == 0
    assert mixed.policy.step() == plain.policy.step() > 0


def test_replayed_routes_are_of_samples_alone(tmp_path: Path) -> None:
    """Data have no routes and no log-probabilities of an engine; both checks are of samples."""
    found = {}
    for share in (0.0, 0.5):
        sampling = {"prompts_per_step": 1 + int(share > 0), "group_size": 4}
        stage = merge(
            tmp_path / str(share),
            data_share=share,
            routing={"replay": "r3"},
            sampling={**sampling, "max_response_tokens": 8},
        )
        found[share] = stage.step(1)
    for name in ("mismatch_max", "mismatch_mean", "router_agreement", "high_ratio"):
        assert found[0.0][name] == pytest.approx(found[0.5][name], rel=1e-6)


def test_a_step_that_is_tried_again_has_the_same_data(tmp_path: Path) -> None:
    stage = merge(tmp_path, data_share=0.5)
    stage.data.draw(1)
    drawn = stage.data.drawn
    batch = stage.collect(1)
    assert batch is not None
    updates = [stage.split_updates(batch).updates[0] for _ in range(2)]
    for update in updates:
        assert [each for each in update if each.demonstrated] == drawn


def test_no_share_is_a_merge_as_before(tmp_path: Path) -> None:
    stage, other = merge(tmp_path / "a"), merge(tmp_path / "b", data_share=0.0)
    found = [each.step(1) for each in (stage, other)]
    assert not any("data" in name for name in found[0])
    assert "data" not in stage.state()
    same = [{k: v for k, v in each.items() if "seconds" not in k} for each in found]
    assert same[0] == same[1]


def of_two_domains(directory: Path) -> Path:
    """Write what a stage collected of both domains."""
    sums = problems(held_out=False, count=8)
    words = [Problem("words", each.index, f"w{each.prompt}", "", {}) for each in sums]
    return collected(directory, [*sums, *words])


def test_what_a_stage_collected_is_read_by_domain(tmp_path: Path) -> None:
    path = of_two_domains(tmp_path)
    given: dict[str, Any] = {"data_share": 0.5, "collected": {"sums": path}}
    stage = merge(tmp_path / "merge", **given)
    stage.data.draw(1)
    prompts = {
        name: [TOKENIZER.decode(s.prompt) for s in stage.data.drawn if s.domain == name]
        for name in ("sums", "words")
    }
    assert len(prompts["sums"]) == len(prompts["words"]) == 4
    assert all(prompt.endswith("+1=") for prompt in prompts["sums"])
    assert not any(prompt.startswith("w") for prompt in prompts["sums"])
    assert stage.data.state()["data"]["sums"] == 4
    other = merge(tmp_path / "other", **given)
    other.restore(json.loads(json.dumps(stage.state())))
    for each in (stage, other):
        each.data.draw(2)
    for mine, theirs in zip(stage.data.drawn, other.data.drawn, strict=True):
        assert np.array_equal(mine.prompt, theirs.prompt)
        assert np.array_equal(mine.response, theirs.response)


def test_a_killed_merge_ends_with_the_same_bits(tmp_path: Path) -> None:
    path = of_two_domains(tmp_path)
    kills = [4, 8 + 3, 8 + 2]
    check_kills(
        tmp_path,
        [FakeEngine(trouble=after(answers)) for answers in kills],
        data_share=0.5,
        collected={"sums": path},
    )


def test_every_step_draws_further(tmp_path: Path) -> None:
    stage, _ = run(
        tmp_path, FakeEngine(), data_share=0.5, collected={"sums": of_two_domains(tmp_path)}
    )
    assert stage.state()["data"]["sums"] == 4 * 4


def test_data_has_several_teachers_whichever_are_resident(tmp_path: Path) -> None:
    """They come in turn, from checkpoints, with the results of teachers that all stay."""
    weights = {"first": 0.25, "second": 0.75}
    found = {}
    for resident in ("all", "one"):
        directory = tmp_path / resident
        writer = merge(tmp_path / f"{resident}_writer").policy
        for seed, name in enumerate(("sums", *weights)):
            writer.start_fresh(seed + 1)
            saver = Saver(directory / name, asynchronous=False)
            saver.begin(writer, 1, {})
            saver.finish()
        stage = merge(
            directory,
            teachers={"sums": "experts", "words": weights},
            teacher_memory={"resident": resident},
            data_share=0.5,
        )
        metrics = [stage.step(step) for step in (1, 2)]
        found[resident] = [
            {key: value for key, value in each.items() if not key.startswith(UNLIKE)}
            for each in metrics
        ]
        assert all(f"preflight_kl/words/{name}" in metrics[0] for name in weights)
    assert found["one"] == found["all"]
    [first, _] = found["one"]
    both = sum(weight * first[f"teacher_kl/words/{name}"] for name, weight in weights.items())
    assert first["teacher_kl/words"] == pytest.approx(both)
    mean = sum(
        first[f"{kind}_token_share/words"] * first[f"{kind}_loss/words"]
        for kind in ("data", "sampled")
    )
    assert mean == pytest.approx(both, rel=1e-5)
