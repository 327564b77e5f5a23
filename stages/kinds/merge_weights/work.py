"""The merge of models by their weights: tensor by tensor, so that no second model is in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import distributed as dist

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.checkpoint.tensors import Places, StoredWeights, places
from parallel.distributed import gather
from parallel.errors import UserError
from parallel.hugging_face.files import is_finite
from parallel.hugging_face.weights import checked_files, spread_weights
from parallel.machine.device import DTYPES
from parallel.model.policy import Policy
from parallel.settings import ModelSettings
from parallel.weights.names import is_precise, is_router, tensors
from stages.kinds.merge_weights.methods.tensors import MergedTensor, overlap_counts
from stages.kinds.merge_weights.router_recalibration import recalibrate
from stages.kinds.merge_weights.settings import MergeWeightsSettings
from stages.kinds.quantize.calibration import calibration_batches, calibration_samples
from stages.objectives.registry import WEIGHT_METHODS
from stages.settings import StageJob


class WeightSource(Protocol):
    """The weights of a model on a disk, under their Hugging Face names."""

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""


def run(job: StageJob) -> None:
    """Write the merge of the job's models as the checkpoint of step 0.

    A stage that is killed leaves none, and merges again from the beginning.

    Raises:
        CheckpointError: a model is damaged, or of another architecture or vocabulary.
        WeightsError: a Hugging Face checkpoint is of another model.
        UserError: a merged tensor has NaN or infinite elements, or a domain no samples, where
            routers are recalibrated.
    """
    assert isinstance(job.block_settings, MergeWeightsSettings)
    policy = Policy(job.settings.model, job.settings.layout)
    merge = WeightMerge(job, places(policy))
    spread_weights(policy.bridge, policy.chunks, merge.tensor)
    policy.weights_changed()
    if job.block_settings.routers == "recalibrated":
        recalibrate_routers(job, policy, merge)
    Saver(job.files.checkpoints, asynchronous=False).begin(policy, 0, {})


def recalibrate_routers(job: StageJob, policy: Policy, merge: WeightMerge) -> None:
    """Recalibrate the routers of a merged policy on samples of the models' domains. Collective.

    Raises:
        UserError: a domain has no samples, or the merged model overflows on them.
    """
    data, domains = merge.settings.recalibration, merge.settings.names(job.domains)
    responses = data.data == "demonstrations"
    samples = calibration_samples(job, domains, data.samples, responses=responses)
    batches = [
        calibration_batches([sample for sample in samples if sample.domain == domain])
        for domain in domains
    ]
    recalibrate(policy, f"stages.{job.block}", batches, merge.models)


class WeightMerge:
    """The merge of a job: the models that are read, and what each tensor becomes."""

    def __init__(self, job: StageJob, where: Places) -> None:
        """Open and check every model. Collective."""
        assert isinstance(job.block_settings, MergeWeightsSettings)
        self.settings = job.block_settings
        self._overlaps: list[tuple[int, int]] = []
        self._seed = f"{job.settings.seed}/{job.seeded_as}"
        self._key = f"stages.{job.block}"
        model, self._names = job.settings.model, job.block_settings.names(job.domains)
        self._dtype = DTYPES[model.precision]
        opened: dict[Path, WeightSource] = {}

        def source(path: Path | None) -> WeightSource:
            assert path is not None
            if path not in opened:
                opened[path] = _opened(path, model, where)
            return opened[path]

        # A model that is the start too is among the inputs once.
        self._sources = [source(job.models.get(name, job.parent)) for name in self._names]
        self._start = source(job.parent) if self.settings.reads_start else None
        self._overlaps = self._counted(list(tensors(model)))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a merged tensor, in the dtype in which it is saved.

        Raises:
            UserError: it has NaN or infinite elements.
        """
        if self._keeps(name):
            assert self._start is not None
            tensor = self._start.read(name)
        else:
            method = self.settings.method
            tensor = WEIGHT_METHODS[method.name].function(self._merged(name), method)
        tensor = tensor.to(torch.float32 if is_precise(name) else self._dtype)
        if not is_finite(tensor):
            raise UserError(self._not_finite(name))
        return tensor

    def models(self, name: str) -> Iterator[tuple[float, torch.Tensor]]:
        """Yield each model's weight and its tensor of a name, whole, in float64 on the CPU."""
        return self._merged(name).models()

    def _not_finite(self, name: str) -> str:
        """Return the error of a merged tensor: of the model that has it, or of the method."""
        for number, model in [(-1, "from")] * bool(self._start) + [*enumerate(self._names)]:
            if not is_finite(self._read(name, number)):
                key = model if number < 0 else f"models: {model}"
                return f"{self._key}.{key}: {name} has NaN or infinite elements; rerun its stage"
        return (
            f"{self._key}.method: the merged {name} has NaN or infinite elements; use smaller"
            " weights, or a smaller scale of the method"
        )

    def _counted(self, names: list[str]) -> list[tuple[int, int]]:
        """Return the overlaps of the models over all merged tensors, if the method reads them."""
        if (threshold := self.settings.method.changed_above) is None:
            return []
        counts = torch.zeros(len(self._names), 2, dtype=torch.int64)
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            if not self._keeps(name):
                counts += overlap_counts(self._merged(name), threshold)
        return [(shared, alone) for shared, alone in sum(gather(counts)).tolist()]

    def _keeps(self, name: str) -> bool:
        return self.settings.routers == "kept" and is_router(name)

    def _merged(self, name: str) -> MergedTensor:
        weights = [self.settings.weights.get(model_name, 1.0) for model_name in self._names]
        read, generator = partial(self._read, name), partial(self._generator, name)
        return MergedTensor(read, weights, generator, self._overlaps)

    def _read(self, name: str, number: int) -> torch.Tensor:
        source = self._start if number < 0 else self._sources[number]
        assert source is not None
        return source.read(name).double()

    def _generator(self, name: str, number: int) -> np.random.Generator:
        """Return the generator of a model's tensor, whatever rank and order it is merged in."""
        text = f"{self._seed}/{self._names[number]}/{name}"
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])
        return np.random.Generator(np.random.Philox(key=key))


def _opened(path: Path, model: ModelSettings, where: Places) -> WeightSource:
    """Open a model and check that it is whole and of these settings. Collective."""
    if (path / "config.json").is_file():
        return checked_files(model, path)
    load.check_intact(path)
    return StoredWeights(path, model, where)
