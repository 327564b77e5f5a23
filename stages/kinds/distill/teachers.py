"""The teachers of a merge: the models that grade the student's samples, domain by domain.

One teacher's weights are in memory, whatever their number: they are read when its turn comes, while
the operating system reads the next one's files ahead. What stays of a turn are last hidden states;
the student's passes compute logits from them with the teacher's head, which is read for that.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.batch import MicroBatch, Responses
from parallel.checkpoint import load
from parallel.checkpoint.planned import WeightPlan
from parallel.distributed import on_main
from parallel.machine.device import DTYPES
from parallel.model.kept_logits import HiddenStates
from parallel.model.policy import Policy, TrainedPolicy
from parallel.model.vocabulary import Head, HeadLogits, KeptLogits
from stages.kinds.distill.settings import DistillSettings, domain_of
from stages.settings import StageJob


class Teachers:
    """The teachers of each domain; a checkpoint that teaches several is one teacher."""

    def __init__(self, job: StageJob, student: TrainedPolicy, settings: DistillSettings) -> None:
        """Verify every teacher by loading it."""
        self._of: dict[str, list[Path]] = {domain: [] for domain in job.domains}
        for label, checkpoint in job.teachers.items():
            self._of[domain_of(label)].append(checkpoint)
        memory, checkpoints = settings.teacher_memory, list(dict.fromkeys(job.teachers.values()))
        one = memory.resident == "one" and len(checkpoints) > 1
        most = max(map(len, self._of.values()))
        self._models = (_OneInTurn if one else _AllResident)(job, student, checkpoints, most)
        directory = job.files.hidden_states
        on_main(partial(shutil.rmtree, directory, ignore_errors=True))  # of an attempt before
        self.hidden_states = HiddenStates(
            memory.hidden_states,
            DTYPES.get(memory.hidden_states_precision),
            directory / f"rank_{dist.get_rank()}",
            f"free space there, or set stages.{job.block}.teacher_memory.hidden_states: host",
        )

    def of(self, domain: str) -> list[Policy]:
        """Return the teachers of a domain, with their weights if all are resident."""
        return [self._models.policy(checkpoint) for checkpoint in self._of[domain]]

    def grade(self, batches: Sequence[MicroBatch]) -> None:
        """Keep the logits of each micro-batch's teachers in it. Collective.

        Raises:
            UserError: the disk of the hidden states is full.
            CheckpointError: a teacher cannot be read any more.
        """
        graded: dict[tuple[int, Path], KeptLogits] = {}
        for checkpoint in self._models.turns():
            taught = [
                micro_batch for micro_batch in batches if checkpoint in self._of[micro_batch.domain]
            ]
            keep = partial(self._keep, checkpoint)
            # They choose their own routes. Nothing is kept except on the last pipeline stage.
            unrouted = [micro_batch.without_routes() for micro_batch in taught]
            kept_logits = self._models.policy(checkpoint).evaluate(unrouted, keep)
            for micro_batch, logits in zip(taught, kept_logits, strict=False):
                graded[id(micro_batch), checkpoint] = logits
        for micro_batch in batches if graded else ():
            micro_batch.teachers = [
                graded[id(micro_batch), checkpoint] for checkpoint in self._of[micro_batch.domain]
            ]

    def clear(self, batches: Sequence[MicroBatch]) -> None:
        """Forget what the step kept."""
        for micro_batch in batches:
            micro_batch.teachers = ()
        self.hidden_states.clear()

    def _keep(self, checkpoint: Path, responses: Responses) -> KeptLogits:
        assert isinstance(responses.logits, HeadLogits)
        return self.hidden_states.keep(responses.logits, self._models.head(checkpoint))


class _AllResident:
    """Models that all stay in memory, or on the host of a device that they share."""

    def __init__(
        self, job: StageJob, student: TrainedPolicy, checkpoints: Sequence[Path], _: int
    ) -> None:
        self._policies: dict[Path, Policy] = {}
        self._heads: dict[Path, torch.Tensor] = {}
        for checkpoint in checkpoints:
            self._policies[checkpoint] = teacher = Policy(job.settings.model, job.settings.layout)
            student.residency.share.add(teacher.residency)
            load.weights(teacher, checkpoint)

    def policy(self, checkpoint: Path) -> Policy:
        return self._policies[checkpoint]

    def turns(self) -> Iterator[Path]:
        """Yield each teacher in its turn."""
        self._heads.clear()
        yield from self._policies

    def head(self, checkpoint: Path) -> Head:
        """Return a teacher's head, of which its device keeps a copy where the model leaves."""
        policy = self._policies[checkpoint]
        weight = policy.chunks[-1].output_layer.weight
        if not policy.residency.moves:
            return weight
        if checkpoint not in self._heads:
            self._heads[checkpoint] = weight.clone()
        return self._heads[checkpoint]


class _OneInTurn:
    """One model, whose weights are read for every turn; and the heads that losses still need."""

    def __init__(
        self, job: StageJob, student: TrainedPolicy, checkpoints: Sequence[Path], most_heads: int
    ) -> None:
        """Verify every teacher; at most `most_heads` heads are needed at once, for one sample."""
        self._policy = Policy(job.settings.model, job.settings.layout)
        self._policy.residency.keeps_copy = False
        student.residency.share.add(self._policy.residency)
        self._plans: dict[Path, WeightPlan] = {}
        self._loaded: Path | None = None
        for checkpoint in checkpoints:
            load.weights(self._policy, checkpoint)
            self._plans[checkpoint] = WeightPlan(self._policy, checkpoint)
            self._loaded = checkpoint
        self._most_heads = most_heads
        self._heads: OrderedDict[Path, torch.Tensor] = OrderedDict()  # the last one used last

    def policy(self, _: Path) -> Policy:
        return self._policy

    def turns(self) -> Iterator[Path]:
        """Yield each teacher once its weights are read, beginning with the one that has them."""
        if self._policy.residency.moves:
            self._loaded = None  # it left the device without a copy
        order = sorted(self._plans, key=lambda checkpoint: checkpoint != self._loaded)
        for checkpoint, following in zip(order, [*order[1:], None], strict=True):
            if checkpoint != self._loaded:
                self._plans[checkpoint].fill()
                self._loaded = checkpoint
            if following is not None:
                self._plans[following].read_ahead()
            yield checkpoint

    def head(self, checkpoint: Path) -> Head:
        return partial(self._head, checkpoint)

    def _head(self, checkpoint: Path) -> torch.Tensor:
        """Return a teacher's head, in the memory of the one that was not used for longest."""
        if checkpoint not in self._heads:
            if len(self._heads) == self._most_heads:
                _, head = self._heads.popitem(last=False)
            else:
                head = torch.empty_like(self._policy.chunks[-1].output_layer.weight)
            self._plans[checkpoint].fill_head(head)
            self._heads[checkpoint] = head
        self._heads.move_to_end(checkpoint)
        return self._heads[checkpoint]
