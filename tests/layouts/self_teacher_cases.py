"""The loss to a teacher that reads longer prompts, and its gradients, under layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.sample import Sample
from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL, batches, distillation, samples, worst_gradient
from tests.layouts.method_cases import models


def privileged() -> list[Sample]:
    """Return samples whose teacher reads other prompts, longer and shorter; some are masked."""
    draw = np.random.default_rng(3)
    drawn = samples(24)
    for number, sample in enumerate(drawn):
        length = int(draw.integers(1, 40))
        sample.teacher_prompt = draw.integers(2, 70, length).astype(np.int32)
        if number % 5 == 0:
            sample.loss_mask = np.zeros(len(sample.response), bool)
            sample.teacher_prompt = None
        elif number % 5 == 1:
            sample.loss_mask = np.arange(len(sample.response)) % 2 == 0
    return drawn


def accumulated(trained: list[Any], count: int) -> float:
    """Accumulate the gradients of the loss to the teacher; return it."""
    from dataclasses import replace

    from parallel.distributed import sum_over_data
    from parallel.model.kept_logits import HiddenStates
    from stages.kinds.distill.self_teacher import SelfTeacher
    from stages.kinds.distill.source_settings import SelfTeacherSettings
    from stages.objectives.loss import Totals

    policy, teacher, _ = trained
    job: Any = None  # an average of its own would read it
    states = HiddenStates("host", None, Path())
    own = SelfTeacher(job, teacher, SelfTeacherSettings(ema_decay=0), ["a"], states)
    drawn = privileged()
    parts = [replace(part, domain="a") for part in batches(drawn, count)]
    own.grade(parts)
    totals = Totals(len(drawn), sum(len(sample.learned) for sample in drawn))
    read = sum(sample.length for sample in drawn)
    values = policy.accumulate(parts, partial(distillation, totals), tokens=read)
    return sum_over_data({"loss": sum(values)})["loss"]


def reference(directory: str) -> None:
    """Write one process's loss and gradients of one micro-batch, for `differences`."""
    trained = models(LayoutSettings(distributed_optimizer=False))
    value = accumulated(trained, 1)
    named = trained[0].chunks[0].named_parameters()
    gradients = {key: parameter.main_grad.clone() for key, parameter in named}
    torch.save((value, gradients), Path(directory) / "self.pt")


def differences(layout: LayoutSettings, directory: str) -> tuple[float, float, str]:
    """Return this layout's errors: the loss's, and the worst gradient's."""
    trained = models(layout.model_copy(update={"distributed_optimizer": False}))
    value = accumulated(trained, 4)
    expected, gradients = torch.load(Path(directory) / "self.pt")
    error = abs(value - expected) / max(1.0, abs(expected))
    return (error, *worst_gradient(trained[0], gradients))


def plain_loss() -> tuple[float, float]:
    """Return the loss of one rank, and the same sample by sample without packing, in float64."""
    trained = models(LayoutSettings())
    value = accumulated(trained, 1)
    policy, teacher, _ = trained
    total, tokens = 0.0, 0
    for sample in privileged():
        if not len(sample.learned):
            continue
        rows = []
        for model, prompt in ((policy, sample.prompt), (teacher, sample.teacher_prompt)):
            alone = Sample("a", prompt, sample.response, loss_mask=sample.loss_mask)
            [head] = model.response_logits(batches([alone]))
            logits = (head.hidden @ head.weight.T).detach().double()
            assert logits.shape == (len(sample.learned), MODEL.vocabulary_size)
            rows.append(logits.log_softmax(-1))
        p, q = rows
        total += float((p.exp() * (p - q)).sum())
        tokens += len(sample.learned)
    return value, total / tokens
