"""The cases that ranks run with the teachers of a merge."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from parallel.sample import Sample
from parallel.settings import LayoutSettings, ModelSettings
from stages.kinds.distill.settings import DistillSettings
from stages.settings import LoggingSettings, RunSettings, StageJob
from tests.layouts.cases import MODEL, SGD, batches, build, distillation, samples
from tests.layouts.checkpoint_cases import save

DOMAINS = ("a", "b", "c")
SEEDS = {"a": 1, "b": 2, "c": 3}
BLOCK = {
    "from": "cold_start",
    "optimizer": {"learning_rate": 1.0},
    "loop": {"steps": 1},
}


def write(layout: LayoutSettings, model: ModelSettings, directory: str, seed: int) -> None:
    """Write a teacher as a stage does, and as a Hugging Face directory beside it."""
    from parallel.distributed import is_main
    from parallel.hugging_face import writer
    from parallel.hugging_face.config import expected_tensors, hugging_face_config

    policy, path = build(layout, SGD, seed, model=model), Path(directory)
    save(policy, path, 3, {})
    outside, config = path / "huggingface", hugging_face_config(model)
    if is_main():
        outside.mkdir()
        config.save_pretrained(outside)
    for_main = policy.weights()
    if is_main():
        writer.write(outside, expected_tensors(config), for_main)
    else:
        list(for_main)


def filled(layout: LayoutSettings, model: ModelSettings, paths: list[str]) -> list[str]:
    """Return the tensors that a plan of each checkpoint fills otherwise than `load.weights`."""
    from parallel.checkpoint import load
    from parallel.checkpoint.planned import WeightPlan
    from parallel.model.policy import Policy

    torch.distributed.barrier()
    policy = Policy(model, layout)
    expected, plans = {}, {}
    for path in map(Path, paths):
        load.weights(policy, path)
        expected[path] = {name: each.clone() for name, each in policy.named_weights().items()}
        plans[path] = WeightPlan(policy, path)
    wrong = []
    for path, plan in plans.items():
        for tensor in policy.named_weights().values():
            tensor.fill_(float("nan"))
        plan.read_ahead()
        plan.fill()
        found = policy.named_weights()
        wrong += [
            f"{path}: {name}"
            for name in found
            if not torch.equal(
                found[name].view(torch.uint8), expected[path][name].view(torch.uint8)
            )
        ]
        if policy.chunks[-1].post_process:
            weight = policy.chunks[-1].output_layer.weight
            plan.fill_head(head := torch.empty_like(weight))
            wrong += [f"{path}: head"] * (not torch.equal(head, weight))
    return wrong


def job(layout: LayoutSettings, model: ModelSettings, directory: str, **given: Any) -> StageJob:
    """Return the job of a merge of three domains, whose teachers are in `directory`."""
    block = {"teachers": {name: name for name in DOMAINS}, **BLOCK, **given}
    settings = DistillSettings.model_validate(block)
    run = RunSettings.model_construct(
        name="toy",
        seed=0,
        model=model,
        layout=layout,
        stages={"merge": settings},
        logging=LoggingSettings(trackers=()),
    )
    path = Path(directory)
    labels = [label for name in DOMAINS for label in settings.teacher_weights(name)]
    names = settings.teachers_of(DOMAINS)
    return StageJob.model_construct(
        stage="merge",
        block="merge",
        domains=list(DOMAINS),
        directory=path / "merge",
        teachers={label: path / names[label] / "step_3" for label in labels},
        settings=run,
    )


def drawn(seed: int = 0) -> dict[str, list[Sample]]:
    """Return each domain's samples."""
    found = {name: samples(6 + 2 * n, seed=seed + n) for n, name in enumerate(DOMAINS)}
    for name, own in found.items():
        for sample in own:
            sample.domain = name
    return found


def micro_batches(own: dict[str, list[Sample]]) -> list[Any]:
    return [replace(part, domain=name) for name in DOMAINS for part in batches(own[name], count=2)]


def gradients(policy: Any, of: StageJob) -> tuple[float, list[torch.Tensor], int]:
    """Return the loss of two steps, their gradients, and the bytes of kept hidden states."""
    from stages.kinds.distill.teachers import Teachers
    from stages.objectives.loss import Totals, token_mean

    settings = of.block_settings
    assert isinstance(settings, DistillSettings)
    teachers = Teachers(of, policy, settings)
    losses, found = 0.0, []
    for _ in range(2):
        own = drawn()
        parts = micro_batches(own)
        teachers.grade(parts)
        kept = teachers.hidden_states.bytes

        def loss(totals: Any, responses: Any) -> tuple[torch.Tensor, float]:
            part = responses.batch
            weights = settings.teacher_weights(part.domain).values()
            values = [
                weight * token_mean(responses.kl(logits.load()), part.mask, totals)
                for logits, weight in zip(part.teachers, weights, strict=True)
            ]
            return sum(values[1:], values[0]), sum(each.item() for each in values)

        every = [sample for each in own.values() for sample in each]
        tokens = sum(len(sample.response) for sample in every)
        read = sum(sample.length for sample in every)
        losses += sum(policy.accumulate(parts, partial(loss, Totals(len(every), tokens)), read))
        found += [each.main_grad.clone() for each in weights_of(policy)]
        teachers.clear(parts)
    return losses, found, kept


class Taught:
    """A stage that brings a student to its teachers, as a merge does, without engines."""

    def __init__(self, of: StageJob) -> None:
        from stages.kinds.distill.teachers import Teachers

        assert isinstance(of.block_settings, DistillSettings)
        self.policy = build(of.settings.layout, SGD, 0)
        self.teachers = Teachers(of, self.policy, of.block_settings)

    def step(self, step: int) -> dict[str, float]:
        """Train on samples of this step."""
        from stages.objectives.loss import Totals

        own = drawn(seed=10 * step)
        parts = micro_batches(own)
        self.teachers.grade(parts)
        every = [sample for each in own.values() for sample in each]
        tokens = sum(len(sample.response) for sample in every)
        read = sum(sample.length for sample in every)
        loss = partial(distillation, Totals(len(every), tokens))
        found = sum(self.policy.accumulate(parts, loss, read))
        self.policy.step()
        self.teachers.clear(parts)
        return {"loss": float(found)}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore nothing: only the policy is saved."""

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["loss"]


def train(layout: LayoutSettings, directory: str, name: str, phase: str = "", at: int = 0) -> None:
    """Train a student to its end; with a `phase`, kill rank 1 the `at`th time it is in it."""
    from parallel.checkpoint.planned import WeightPlan
    from parallel.model.kept_logits import HiddenStates
    from parallel.model.policy import TrainedPolicy
    from stages.domains import LoopSettings
    from stages.loop import train as run_loop

    torch.use_deterministic_algorithms(True)
    memory = {"resident": "one", "hidden_states": "disk"}
    of = job(layout, MODEL, directory, teacher_memory=memory)
    of = of.model_copy(update={"directory": Path(directory) / name, "attempt": 1, "parent": None})
    owner: Any = {"load": WeightPlan, "write": HiddenStates, "step": TrainedPolicy}.get(phase)
    method = {"load": "_run", "write": "_write", "step": "_select_responses"}.get(phase, "")
    usual, counted = getattr(owner, method, None), itertools.count(1)

    def deadly(*arguments: Any) -> Any:
        if next(counted) == at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*arguments)

    with mock.patch.object(owner, method, deadly) if owner else nullcontext():
        # Synchronous, so that what is left does not depend on the time.
        loop = LoopSettings(steps=3, checkpoint_every=1, async_checkpoints=False)
        run_loop(Taught(of), of, loop)
    torch.use_deterministic_algorithms(False)


def weights_of(policy: Any) -> Iterator[torch.Tensor]:
    return (each for chunk in policy.chunks for each in chunk.parameters())


def differing(
    layout: LayoutSettings, model: ModelSettings, directory: str, given: dict[str, Any]
) -> list[str]:
    """Return the ways to hold teachers whose loss or gradients differ from all-resident ones."""
    layout = layout.model_copy(update={"distributed_optimizer": False})
    policy = build(layout, SGD, 0, model=model)
    policy.optimizer.zero_grad()

    def measure(**memory: str) -> tuple[float, list[torch.Tensor], int]:
        return gradients(policy, job(layout, model, directory, teacher_memory=memory, **given))

    loss, expected, _ = measure(resident="all")
    assert policy.chunks[-1].post_process == (loss > 0)
    wrong = []
    for states in ("device", "disk"):
        value, found, kept = measure(resident="one", hidden_states=states)
        same = all(map(torch.equal, found, expected))
        if not same or value != loss or (kept > 0) != policy.chunks[-1].post_process:
            wrong.append(states)
    torch.distributed.barrier()  # the other ranks have deleted theirs
    if (Path(directory) / "merge" / "hidden_states").is_dir():
        wrong += [str(each) for each in (Path(directory) / "merge" / "hidden_states").iterdir()]
    return wrong


def grade_on_a_full_disk(directory: str) -> str:
    """Return the error of hidden states of which the second micro-batch finds no room."""
    from parallel.errors import UserError
    from parallel.model import kept_logits

    of = job(LayoutSettings(), MODEL, directory, teacher_memory={"hidden_states": "disk"})
    stage, written = Taught(of), itertools.count()

    class Full:
        """A file of a disk that takes one write."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, memory: Any) -> int:
            if next(written):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self.file.write(memory))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    usual = kept_logits.open_in_place
    with mock.patch.object(kept_logits, "open_in_place", lambda *a, **k: Full(usual(*a, **k))):
        try:
            stage.teachers.grade(micro_batches(drawn()))
        except UserError as error:
            return str(error)
    return ""


def read_after_damage(checkpoint: str) -> tuple[str, str]:
    """Return the errors of a plan whose files were touched, and of one whose files are gone."""
    from parallel.checkpoint import load
    from parallel.checkpoint.planned import WeightPlan
    from parallel.files import CheckpointError
    from parallel.model.policy import Policy

    policy, path, said = Policy(MODEL, LayoutSettings()), Path(checkpoint), []
    load.weights(policy, path)
    plan = WeightPlan(policy, path)
    for damage in (os.utime, os.unlink):
        for file in path.glob("*.distcp"):
            damage(file)
        try:
            plan.fill()
        except CheckpointError as error:
            said.append(str(error))
    return said[0], said[1]
