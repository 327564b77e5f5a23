"""The quantization of a model, calibrated on the domains' training prompts.

The stage leaves two forms of one model: `huggingface/`, the quantized checkpoint that vLLM loads,
and a checkpoint of the run with the weights that the quantized ones stand for, which is evaluated
and gated like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.distributed import barrier, is_main, max_over_ranks
from parallel.hugging_face.config import TensorSpec, expected_tensors, hugging_face_config
from parallel.hugging_face.files import WeightsError
from parallel.hugging_face.multi_token import MultiTokenTensors
from parallel.hugging_face.quantized import QuantizedFiles, Scheme, quantized
from parallel.hugging_face.weights import fill_weights, forget_weights
from parallel.hugging_face.writer import verify, write
from parallel.machine.device import DTYPES
from parallel.model.moments import InputMoments
from parallel.model.policy import Policy
from parallel.settings import ModelSettings
from parallel.weights.quantizable import VllmMatrix, module_name
from stages.kinds.export.work import beside, complete, probe, publish, remove_unfinished
from stages.kinds.quantize.calibration import calibration_batches, calibration_samples
from stages.kinds.quantize.settings import QuantizeSettings
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Quantize the parent, write both of its forms and verify them.

    Raises:
        WeightsError: the quantized weights were not written right.
        DomainError: a domain has no prompts.
        OSError: the output cannot be written.
    """
    assert job.parent is not None and isinstance(job.block_settings, QuantizeSettings)
    remove_unfinished(job)
    model = job.settings.model
    scheme = Scheme(job.block_settings.format, job.block_settings.group, DTYPES[model.precision])
    matrices = job.block_settings.quantized(model)
    if is_main():
        MultiTokenTensors(model)  # its errors come before a model is loaded
    policy = Policy(model, job.settings.layout)
    load.weights(policy, job.parent)
    moments = InputMoments(policy, matrices)
    samples = calibration_samples(job, job.domains, job.block_settings.calibration)
    with moments.watching():
        policy.evaluate(calibration_batches(samples), lambda _: None)
    export(policy, job, scheme, matrices, moments.by_tensor())
    Saver(job.files.checkpoints, asynchronous=False).begin(policy, 0, {})


def export(
    policy: Policy,
    job: StageJob,
    scheme: Scheme,
    matrices: Sequence[VllmMatrix],
    moments: dict[str, torch.Tensor],
) -> None:
    """Write the quantized checkpoint, and give the policy the weights read back. Collective.

    It is complete and verified, or not written at all. All ranks must see the directory.

    Raises:
        WeightsError: what was written is not what was computed, or has values that are not finite.
    """
    output = job.files.exported
    with beside(output) as unfinished:
        if is_main():
            multi_token = MultiTokenTensors(policy.settings)
            whole = expected_tensors(hugging_face_config(policy.settings))
            expected = dict(_stored(whole, scheme, matrices)) | multi_token.specs
            stream = chain(
                quantized(policy.weights(), matrices, scheme, moments), multi_token.stream()
            )
            verify(unfinished, expected, write(unfinished, expected, stream))
            print(_summary(scheme, matrices, whole, expected), flush=True)
        else:
            for _ in policy.weights():  # collective: all ranks gather
                pass
        barrier()
        forget_weights(policy.chunks)  # a weight that is not read back gives logits of NaN
        fill_weights(policy.bridge, policy.chunks, QuantizedFiles(unfinished, scheme, matrices))
        policy.weights_changed()
        if max_over_ranks(not all(logits.isfinite().all() for logits in probe(policy))):
            raise WeightsError(f"{output}: verification failed", ["logits that are not finite"])
        if is_main():
            drafting = [f"re:{re.escape(layer)}\\..*" for layer in multi_token.modules]
            configuration = scheme.configuration(ignored(policy.settings, matrices) + drafting)
            complete(policy.settings, unfinished, multi_token, configuration, job.parent)
            publish(unfinished, output, replaces=True)


def ignored(model: ModelSettings, matrices: Sequence[VllmMatrix]) -> list[str]:
    """Return the linear layers that are not quantized, as compressed-tensors and vLLM name them.

    Where the experts of a layer stay as they are, vLLM looks for their module and transformers for
    each of them.
    """
    quantized_modules = {matrix.module for matrix in matrices}
    done = {name for matrix in matrices for name, _ in matrix.tensors}
    modules = []
    for name, spec in expected_tensors(hugging_face_config(model)).items():
        module = module_name(name)
        if name in done or len(spec.shape) != 2 or "embed_tokens" in name:
            continue
        experts = re.fullmatch(r"(.*\.experts)\.\d+\..*", module)
        if experts and experts[1] not in quantized_modules:
            modules += [experts[1], rf"re:{re.escape(experts[1])}\..*"]
        else:
            modules.append(module)
    return list(dict.fromkeys(modules))


def _stored(
    whole: dict[str, TensorSpec], scheme: Scheme, matrices: Sequence[VllmMatrix]
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of the quantized checkpoint."""
    names = {name for matrix in matrices for name, _ in matrix.tensors}
    for name, spec in whole.items():
        if name not in names:
            yield name, spec
            continue
        for key, stored in scheme.specs(spec.shape).items():
            yield f"{module_name(name)}.{key}", stored


def _summary(
    scheme: Scheme,
    matrices: Sequence[VllmMatrix],
    whole: dict[str, TensorSpec],
    expected: dict[str, TensorSpec],
) -> str:
    before, after = (
        sum(spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in specs.values())
        for specs in (whole, expected)
    )
    count = sum(len(matrix.tensors) for matrix in matrices)
    return (
        f"quantized {count} of {len(whole)} tensors to {scheme.format}: {after / 2**20:.1f} MiB"
        f" of {before / 2**20:.1f}"
    )
