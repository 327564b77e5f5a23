"""The files of a preview: a real policy and a real pool on samples of fake engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parallel.checkpoint import load
from parallel.model.policy import Policy
from stages.domain_tools import preview
from stages.sampling.logprob_check import MismatchError
from stages.settings import StageJob
from tests.fake_engines import toy_domain, toy_job, toy_run
from tests.stages.toys import faked, measuring

pytestmark = pytest.mark.usefixtures("one_rank")


def job(directory: Path, bound: float) -> StageJob:
    """Return a preview of 3 prompts, 5 responses each; engine and trainer differ by `bound`."""
    sampling = {"prompts_per_step": 3, "group_size": 5, "max_response_tokens": 8}
    settings = toy_run(bound, sums=toy_domain(sampling=sampling))
    return toy_job(directory, settings, stage="preview", parent=directory / "step_2")


def start_elsewhere(policy: Policy, checkpoint: Path) -> None:
    """Stands for loading a checkpoint."""
    assert checkpoint.name == "step_2"
    policy.start_fresh(seed=1)


def run(job: StageJob) -> None:
    with faked(), mock.patch.object(load, "weights", start_elsewhere):
        preview.run(job)


def test_every_sample_of_one_step_is_graded_and_written(tmp_path: Path) -> None:
    run(job(tmp_path, bound=1e9))
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failures"] == []
    assert [len(group) for group in found["groups"]] == [5, 5, 5]
    samples = [sample for group in found["groups"] for sample in group]
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}
    for sample in samples:
        assert sample["parts"] == {"parity": sample["reward"]}
        assert sample["solved"] == (sample["reward"] == 1.0)
        assert 1 <= sample["tokens"] <= 8
        assert sample["prompt"].endswith("=")
        assert len(sample["response"]) in (sample["tokens"], sample["tokens"] - 1)
        assert sample["finished"] or sample["tokens"] == 8


def test_one_check_beyond_the_bound_is_drawn_again(tmp_path: Path) -> None:
    asked = job(tmp_path, bound=1.0)
    with measuring(2.0, 0.5):
        run(asked)
    engine: Any = asked.engine_addresses[0]
    seeds = [prompt.seed for request in engine.requests for prompt in request.prompts]
    assert len(seeds) == len(set(seeds)) == 2 * 15
    assert len(json.loads((tmp_path / "results.json").read_text())["groups"]) == 3


def test_samples_of_another_model_are_not_shown(tmp_path: Path) -> None:
    """Fake engines make their log-probabilities up."""
    with pytest.raises(MismatchError):
        run(job(tmp_path, bound=1e-4))
    assert not (tmp_path / "results.json").exists()
