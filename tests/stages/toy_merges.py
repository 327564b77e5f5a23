"""Toy merges on fake engines, of a domain `sums` and a domain `words`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.files import CHECKSUMS
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.kinds.distill.settings import DistillSettings
from stages.kinds.distill.work import DistillStage
from tests.fake_engines import FakeEngine, RefittedFleet, toy_domain, toy_job, toy_run
from tests.stages.conftest import OPENED
from tests.stages.toys import Killed

LOAD = load.weights
SEEDS = {"sums": 0, "words": 1}  # of the teachers' weights; the student's are of 0
SAMPLING = {"prompts_per_step": 2, "group_size": 4, "max_response_tokens": 8}
UNLIKE = ("seconds", "replayed", "preflight", "disjoint")  # in a step that is repeated


def start_by_name(policy: Policy, checkpoint: Path) -> None:
    """Stands for loading a teacher's checkpoint; the student begins elsewhere first."""
    if (checkpoint / CHECKSUMS).is_file():
        LOAD(policy, checkpoint)
    else:
        policy.start_fresh(SEEDS.get(checkpoint.name, 0))


def saved(teacher: Path) -> Path:
    """Return a teacher's first checkpoint; without any, a path that only has its name."""
    return teacher / "step_1" if (teacher / "step_1").is_dir() else teacher


def merge(
    directory: Path,
    engine: FakeEngine | None = None,
    domains: dict[str, Any] | None = None,
    collected: dict[str, Path] | None = None,
    **given: Any,
) -> DistillStage:
    """Return a merge; `domains` are settings of both, `collected` files of stages by domain.

    A domain's only teacher has the seed, or the checkpoint, of the domain; of several, each of the
    name.
    """
    shown = {"demonstrations": {"count": 20}, **(domains or {})}
    words = {"prompts": {"dataset": "spell_backward"}, **shown}
    settings = toy_run(sums=toy_domain(**shown), words=toy_domain(**words))
    block = DistillSettings.model_validate(
        {
            "from": "cold_start",
            "teachers": "experts",
            "teacher_memory": {"resident": "all"},  # no checkpoint to read one from
            "routing": {"replay": "none"},
            "sampling": SAMPLING,
            "optimizer": {"learning_rate": 1e-2},
            "loop": {"steps": 4, "micro_batch_tokens": 256},
            "data": {domain: {"stage": "collect"} for domain in collected or {}},
            **given,
        }
    )
    settings = settings.model_copy(update={"stages": {"merge": block}})
    named = block.inputs(settings, list(settings.domains)).teachers
    job = toy_job(
        directory,
        settings,
        *([engine] if engine else []),
        domain=None,
        stage="merge",
        kind="distill",
        block="merge",
        teachers={
            label: saved(directory / (name if "/" in label else label))
            for label, name in named.items()
        },
        data=collected or {},
    )
    with (
        mock.patch("stages.sampling.engines.Fleet", RefittedFleet),
        mock.patch.object(load, "weights", start_by_name),
    ):
        stage = DistillStage(job)
    OPENED.append(stage)
    stage.policy.start_fresh(0)
    return stage


def resumed(
    directory: Path, engine: FakeEngine | None = None, **given: Any
) -> tuple[DistillStage, int]:
    """Return a merge as the loop continues it from its newest checkpoint, and its last step."""
    stage = merge(directory, engine, **given)
    newest, _ = load.newest_intact(directory / "checkpoints")
    if newest is None:
        return stage, 0
    state = load.training_state(stage.policy, newest)
    stage.restore(json.loads(json.dumps(state)))
    return stage, state["step"]


def save(stage: DistillStage, directory: Path, step: int) -> Path:
    saver = Saver(directory / "checkpoints")
    saver.begin(stage.policy, step, stage.state())
    saver.finish()
    return directory / "checkpoints" / f"step_{step}"


def run(
    directory: Path, engine: FakeEngine, **given: Any
) -> tuple[DistillStage, list[dict[str, float]]]:
    """Step to the fourth, saved after the second; return the stage and its steps' metrics."""
    stage, done = resumed(directory, engine, **given)
    measured = []
    for step in range(done + 1, 5):
        metrics = stage.step(step)
        measured.append({k: v for k, v in metrics.items() if not k.startswith(UNLIKE)})
        if step == 2:
            save(stage, directory, step)
    return stage, measured


def check_kills(directory: Path, kills: list[FakeEngine], **given: Any) -> None:
    """Check that a merge that was killed ends as an undisturbed one, bit for bit."""
    calm, expected = run(directory / "calm", FakeEngine(), **given)
    for engine in kills:
        try:
            run(directory / "killed", engine, **given)
        except Killed:
            OPENED.pop().close()
        else:
            raise AssertionError("it was not killed")
    other, measured = run(directory / "killed", FakeEngine(), **given)
    assert measured == expected[-len(measured) :]
    assert other.state() == calm.state()
    policies = [[each.policy, *each.policy.averages.values()] for each in (calm, other)]
    for mine, theirs in zip(*policies, strict=True):
        for name, weight in mine.named_weights().items():
            assert torch.equal(weight, theirs.named_weights()[name]), name


def written(domain: str, lengths: list[int], seed: int = 0) -> list[Sample]:
    """Return responses of these lengths to one prompt, with a longer one for the teacher."""
    draw = np.random.default_rng(seed)
    return [
        Sample(
            domain=domain,
            prompt=np.array([2, 3, 4], np.int32),
            teacher_prompt=draw.integers(2, 70, 5 + length).astype(np.int32),
            response=draw.integers(2, 70, length).astype(np.int32),
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
        )
        for length in lengths
    ]


def gradients(stage: DistillStage, samples: list[Sample]) -> dict[str, float]:
    return stage.gradients(samples, stage.pack(samples))


def sharpen(*policies: Policy) -> None:
    """Make logits differ, so that directions of a divergence and contexts matter."""
    with torch.no_grad():
        for policy in policies:
            policy.chunks[0].output_layer.weight.mul_(30)
            policy.weights_changed()
