"""The cases that ranks run with Hugging Face checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from parallel.settings import LayoutSettings
from tests.layouts.cases import MODEL as SMALL
from tests.layouts.cases import SGD, accumulate, batches, build, samples
from tests.layouts.checkpoint_cases import save

# No setting that affects the computation has its default.
MODEL = SMALL.model_copy(update={"rope_base": 300.0, "norm_epsilon": 1e-3})
DENSE_AND_SHARED = {
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
FAMILIES = {
    "qwen3_moe": MODEL,
    "mixtral": MODEL.model_copy(update={"family": "mixtral"}),
    "glm4_moe": MODEL.model_copy(
        update={
            "family": "glm4_moe",
            "architecture": {
                **DENSE_AND_SHARED,
                "attention_bias": True,
                "use_qk_norm": True,
                "partial_rotary_factor": 0.25,
            },
        }
    ),
    "deepseek_v3": MODEL.model_copy(
        update={
            "family": "deepseek_v3",
            "norm_epsilon": 1e-6,  # the only one that transformers takes everywhere
            "key_value_heads": MODEL.attention_heads,
            "architecture": {
                **DENSE_AND_SHARED,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 12,
                "v_head_dim": 20,
            },
        }
    ),
    "glm4_moe_lite": MODEL.model_copy(
        update={
            "family": "glm4_moe_lite",
            "norm_epsilon": 1e-6,  # the only one that transformers takes everywhere
            "key_value_heads": MODEL.attention_heads,
            "architecture": {
                **DENSE_AND_SHARED,
                "first_k_dense_replace": 2,  # which transformers reads from a list
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 12,
                "v_head_dim": 20,
            },
        }
    ),
    "gpt_oss": MODEL.model_copy(
        update={
            "family": "gpt_oss",
            "norm_epsilon": 1e-5,  # the only one that vLLM takes
            "architecture": {
                "sliding_window": 5,  # shorter than most samples
                "rope_scaling": {
                    "factor": 4.0,
                    "original_max_position_embeddings": MODEL.max_positions // 4,
                    "beta_fast": 2.0,
                    "beta_slow": 0.5,
                },
            },
        }
    ),
    "qwen3_5_moe_text": MODEL.model_copy(
        update={
            "family": "qwen3_5_moe_text",
            "architecture": {
                "full_attention_interval": 2,
                "shared_expert_intermediate_size": 24,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 12,
                "linear_value_head_dim": 20,
                "linear_conv_kernel_dim": 3,
                "partial_rotary_factor": 0.5,
            },
        }
    ),
}
MODELS = {
    **FAMILIES,
    # The router's bias stays in fp32.
    "bf16": FAMILIES["deepseek_v3"].model_copy(update={"precision": "bf16"}),
    # Positions are scaled by four, and queries are not compressed.
    "yarn": MODEL.model_copy(
        update={
            "family": "deepseek_v3",
            "norm_epsilon": 1e-6,  # the only one that transformers takes everywhere
            "key_value_heads": MODEL.attention_heads,
            "architecture": {
                **FAMILIES["deepseek_v3"].architecture,
                "q_lora_rank": None,
                "rope_scaling": {
                    "factor": 4.0,
                    "original_max_position_embeddings": MODEL.max_positions // 4,
                    "beta_fast": 2.0,
                    "beta_slow": 0.5,
                    "mscale": 0.9,
                    "mscale_all_dim": 0.7,
                },
            },
        }
    ),
}
SEED = 5
SMALL_SHARDS = 20_000  # bytes: several files


def export(layout: LayoutSettings, model: str, output: str) -> None:
    """Export a random model, equal under every layout."""
    from stages.kinds.export import work as export

    export.export(_random(layout, model), Path(output), SMALL_SHARDS)


def save_checkpoint(layout: LayoutSettings, model: str, directory: str) -> dict[str, str]:
    """Save a policy as `directory`/step_1; return its `tensors`."""
    policy = build(layout, model=MODELS[model])
    save(policy, Path(directory), 1, {})
    return tensors(policy.weights())


def export_checkpoint(
    layout: LayoutSettings, model: str, checkpoint: str, output: str, start: str | None = None
) -> None:
    """Run the export stage under another layout than the checkpoint's, of a run from `start`."""
    from stages.kinds.export import work as export
    from stages.settings import RunSettings, StageJob

    ours = MODELS[model].model_copy(update={"initial_weights": Path(start) if start else None})
    settings = RunSettings.model_construct(model=ours, layout=layout)
    job = StageJob.model_construct(
        directory=Path(output).parent,
        parent=Path(checkpoint),
        output=Path(output),
        settings=settings,
    )
    export.run(job)
    torch.use_deterministic_algorithms(False)  # the next case runs in this process too


def input_moments(layout: LayoutSettings, model: str) -> dict[str, list[float]]:
    """Return the mean squares of the inputs of every matrix, of samples equal in every layout."""
    from parallel.model.moments import InputMoments
    from parallel.weights.quantizable import quantizable

    policy = _random(layout, model)
    moments = InputMoments(policy, quantizable(policy.settings))
    drawn = samples(12)
    while sum(sample.length for sample in drawn) % 2:  # two tensor-parallel ranks pad odd rows
        drawn.pop()
    with moments.watching():
        policy.evaluate(batches(drawn), lambda _: None)
    return {name: values.tolist() for name, values in moments.by_tensor().items()}


def import_checkpoint(layout: LayoutSettings, model: str, source: str, directory: str) -> None:
    """Run the import stage, which writes `directory`/checkpoints/step_0."""
    from stages.kinds.evaluate.settings import EvaluationSettings
    from stages.kinds.import_weights import work as initial
    from stages.settings import RunSettings, StageJob

    settings = RunSettings.model_construct(
        model=MODELS[model].model_copy(update={"initial_weights": Path(source)}),
        layout=layout,
        domains={},
        evaluation=EvaluationSettings(),
    )
    initial.run(StageJob.model_construct(directory=Path(directory), settings=settings))


def import_and_compare(layout: LayoutSettings, model: str, directory: str) -> dict[str, float]:
    """Compare a model read from a checkpoint with the checkpoint and with transformers."""
    from transformers import AutoModelForCausalLM

    policy = _read(layout, model, directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    streamed = tensors(policy.weights())
    layers = [name.split(".")[2] for name in streamed if ".layers." in name]
    return {
        "tensors": streamed == stored(directory),
        # The engine takes whole layers, one after another.
        "in_order": len(list(itertools.groupby(layers))) == len(set(layers)),
        "logprobs": difference(policy, theirs),
        # Without scoping, the device layer once silently zeroed what transformers computes.
        "rotary": theirs.model.rotary_emb.inv_freq.abs().min().item(),
    }


def import_mxfp4(directory: str) -> list[str]:
    """Return the tensors of a model read from experts in MXFP4 that transformers restores else.

    One rank writes the checkpoint, of random blocks, into an empty `directory`, and reads it.
    """
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from parallel.hugging_face.config import hugging_face_config
    from parallel.model.policy import Policy

    model = FAMILIES["gpt_oss"].model_copy(update={"expert_hidden_size": 32})
    policy, draw = Policy(model, LayoutSettings()), torch.Generator().manual_seed(0)
    policy.start_fresh(SEED)
    expected = {name: tensor.clone() for name, tensor in policy.weights()}
    stored = dict(expected)
    for name in [each for each in expected if re.search(r"experts\.(gate_up|down)_proj$", each)]:
        experts, inputs, outputs = stored.pop(name).shape
        grid = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*grid, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(110, 130, grid, generator=draw, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(stored, Path(directory) / "model.safetensors")
    config = hugging_face_config(model)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(directory)
    read = Policy(model.model_copy(update={"initial_weights": Path(directory)}), LayoutSettings())
    read.start_fresh(seed=99)
    found = dict(read.weights())
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def difference(policy: Any, theirs: Any) -> float:
    """Return the largest log-probability difference; 0 except on the last pipeline stage."""
    largest = 0.0
    parts = batches(samples(6))
    for batch, logprobs in zip(parts, policy.target_logprobs(parts, 1.0), strict=False):
        for row, sample in enumerate(batch.samples):
            tokens = torch.tensor(np.concatenate([sample.prompt, sample.response]))[None]
            with torch.no_grad():
                expected = theirs(tokens).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
            chosen = expected.gather(-1, tokens[0, len(sample.prompt) :, None])[:, 0]
            found = logprobs[row, : len(sample.response)]
            largest = max(largest, (found - chosen).abs().max().item())
    return largest


def tensors(stream: Any) -> dict[str, str]:
    """Return the dtype, shape and SHA-256 of every tensor."""
    found = {}
    for name, tensor in stream:
        digest = hashlib.sha256(tensor.cpu().view(torch.uint8).numpy()).hexdigest()
        found[name] = f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
    return found


def stored(directory: str) -> dict[str, str]:
    """Return the `tensors` of a checkpoint."""
    from parallel.hugging_face.files import WeightFiles

    files = WeightFiles(Path(directory))
    assert not files.errors
    return tensors((name, files.read(name)) for name in files.stored)


def _random(layout: LayoutSettings, model: str) -> Any:
    """Return a policy whose norms and biases all differ, so that confusing two shows."""
    from parallel.model.parameters import global_name, shard, split_dimension, tensor_split
    from parallel.model.policy import Policy

    policy = Policy(MODELS[model], layout)
    policy.start_fresh(SEED)
    for chunk in policy.chunks:
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if tensor.dim() == 1 and tensor.is_floating_point():
                size, rank = tensor_split(name)
                whole = len(tensor) * (1 if split_dimension(name) is None else size)
                seed = int(hashlib.sha256(global_name(chunk, name).encode()).hexdigest()[:8], 16)
                noise = torch.randn(whole, generator=torch.Generator().manual_seed(seed)) / 4
                tensor.data += shard(name, noise, size, rank)
    return policy


def _read(layout: LayoutSettings, model: str, directory: str) -> Any:
    from parallel.model.policy import Policy

    start = {"initial_weights": Path(directory)}
    policy = Policy(MODELS[model].model_copy(update=start), layout)
    policy.start_fresh(seed=99)
    return policy


def gradient_error(layout: LayoutSettings, model: str, directory: str) -> tuple[float, str]:
    """Return the largest relative difference from one rank's gradients; one rank writes them."""
    from parallel.model.parameters import global_name, shard, tensor_split

    alone = layout.model_copy(update={"distributed_optimizer": False})  # it scatters gradients
    policy = build(alone, SGD, model=MODELS[model])
    drawn = samples(12)
    accumulate(policy, "cross_entropy", drawn, batches(drawn))
    found = [
        (global_name(chunk, name), parameter.main_grad)
        for chunk in policy.chunks
        for name, parameter in chunk.named_parameters()
    ]
    file = Path(directory) / "gradients.pt"
    if layout.ranks == 1:
        torch.save({name: gradient.clone() for name, gradient in found}, file)
    expected = torch.load(file)
    errors = []
    for name, gradient in found:
        ours = shard(name, expected[name], *tensor_split(name))
        errors.append(((gradient - ours).norm().item() / max(ours.norm().item(), 1e-6), name))
    return max(errors)


def packing_errors(model: str) -> dict[str, float]:
    """Return how far sequences in one row are from each in a row of its own, on one rank.

    Of the loss and of each gradient, relative to the latter.
    """
    from parallel.batch import RankPlace, split

    here, drawn, results = RankPlace.here(), samples(12), []
    for groups in ([drawn], [[sample] for sample in drawn]):
        policy = build(LayoutSettings(distributed_optimizer=False), SGD, model=MODELS[model])
        rows = [row for group in groups for row in split(group, here, 4096, False)]
        assert len(rows) == len(groups)
        loss = accumulate(policy, "cross_entropy", drawn, rows)["loss"]
        parameters = policy.chunks[0].named_parameters()
        results.append({"loss": torch.tensor(loss)} | {n: p.main_grad for n, p in parameters})
    packed, separate = results
    return {
        name: ((packed[name] - alone).norm() / alone.norm().clamp(min=1e-6)).item()
        for name, alone in separate.items()
    }


def errors_of_gradients(model: str, directory: str) -> dict[str, float]:
    """Return the relative differences of gradients from transformers', by its parameters' names.

    Of sequences in one row, on one rank, of the model in `directory`. Experts have other names in
    transformers, and are left out. Its delta nets compute the recurrence: its rule in chunks
    subtracts sums of decays, and the gradient of A_log is then off by 1.8e-4.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as delta_nets

    start = {"initial_weights": Path(directory)}
    alone = LayoutSettings(distributed_optimizer=False)
    policy = build(alone, SGD, model=MODELS[model].model_copy(update=start))
    drawn = samples(12)
    accumulate(policy, "cross_entropy", drawn, batches(drawn))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = sum(len(sample.response) for sample in drawn)
    recurrence = delta_nets.torch_recurrent_gated_delta_rule
    for sample in drawn:
        sequence = torch.tensor(np.concatenate([sample.prompt, sample.response]))
        with patch.object(delta_nets, "torch_chunk_gated_delta_rule", recurrence):
            logits = theirs(sequence[None]).logits[0, len(sample.prompt) - 1 : -1]
        response = sequence[len(sample.prompt) :].long()
        loss = torch.nn.functional.cross_entropy(logits, response, reduction="sum")
        (loss / tokens).backward()
    with torch.no_grad():  # so that gradients are streamed as weights are
        for parameter in policy.chunks[0].parameters():
            parameter.copy_(parameter.main_grad)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    return {
        name: ((ours - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)).item()
        for name, ours in policy.weights()
        if expected.get(name) is not None
    }


def compiled_activation() -> tuple[float, int]:
    """Return the relative difference of gpt-oss's activation compiled, and the frames compiled."""
    from parallel.model.bridge import quick_gelu

    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = []
    for disable in (True, False):
        torch._dynamo.reset()  # else a function once not compiled stays so
        with torch._dynamo.config.patch(disable=disable):
            values = quick_gelu(inputs)
            (gradient,) = torch.autograd.grad(values.square().sum(), inputs)
        found.append(torch.cat([values, gradient]).detach())
    plain, compiled = found
    error = ((compiled - plain).norm() / plain.norm()).item()
    return error, torch._dynamo.utils.counters["frames"]["ok"]


def export_other_weights(layout: LayoutSettings, output: str) -> str:
    """Return the error of an export whose files are whole but not the policy's."""
    from parallel.hugging_face.files import WeightsError
    from stages.kinds.export import work as export

    policy = _random(layout, "qwen3_moe")
    stream = policy.weights

    def changed() -> Any:
        for name, tensor in stream():
            yield name, tensor * 1.01 if name == "model.norm.weight" else tensor

    policy.weights = changed
    try:
        export.export(policy, Path(output))
    except WeightsError as error:
        return str(error)
    return ""


def start_from(layout: LayoutSettings, directory: str) -> tuple[str, bool]:
    """Return the error of a start from a checkpoint, and true if the weights are unchanged."""
    from parallel.hugging_face.files import WeightsError

    policy = _random(layout, "qwen3_moe")
    before = tensors(policy.weights())
    policy.settings = policy.settings.model_copy(update={"initial_weights": Path(directory)})
    message = ""
    try:
        policy.start_fresh(seed=0)
    except WeightsError as error:
        message = str(error)
    return message, tensors(policy.weights()) == before
