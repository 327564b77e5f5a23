"""The table of what the trainer uses on which machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import UserError
from parallel.estimates import memory
from parallel.layout_rules import optimizer_violations
from parallel.machine import capabilities, device
from parallel.machine.capabilities import (
    Machine,
    check_capabilities,
    check_optimizer,
    data_parallel_flags,
    rank_environment,
    this_machine,
    transformer_flags,
)
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings
from tests.layouts.hugging_face_cases import FAMILIES

CPU = Machine()
PLAIN_CUDA = Machine(cuda=True, gpus=8)
ENGINE = Machine(cuda=True, transformer_engine=True, gpus=8)
DEEP_EP = Machine(cuda=True, transformer_engine=True, deep_ep=True, gpus=8)
WIDE = LayoutSettings(ranks=16, expert=16)  # over two nodes of 8
FUSED = {"apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "moe_permute_fusion"}
OFF = {
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "overlap_param_gather",
}
TABLE: dict[str, tuple[Machine, str, set[str], str]] = {
    "CPU, fp32": (CPU, "fp32", set(), "alltoall"),
    "CPU, bf16": (CPU, "bf16", set(), "alltoall"),
    "CUDA alone, bf16": (PLAIN_CUDA, "bf16", set(), "alltoall"),
    "TransformerEngine, fp32": (ENGINE, "fp32", {"moe_grouped_gemm"}, "alltoall"),
    "TransformerEngine, bf16": (
        ENGINE,
        "bf16",
        {"moe_grouped_gemm", "overlap_grad_reduce", *FUSED},
        "alltoall",
    ),
    "DeepEP, bf16": (
        DEEP_EP,
        "bf16",
        {"moe_grouped_gemm", "overlap_grad_reduce", *FUSED},
        "flex",
    ),
}


def model(family: str = "qwen3_moe", precision: str = "fp32") -> ModelSettings:
    return FAMILIES[family].model_copy(update={"precision": precision})


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    machine, precision, used, dispatcher = TABLE[name]
    settings = model(precision=precision)
    flags = transformer_flags(machine, settings, WIDE) | data_parallel_flags(machine, settings)
    assert flags.pop("moe_token_dispatcher_type") == dispatcher
    assert flags.pop("cp_comm_type") is None
    assert {key for key, value in flags.items() if value} == used
    assert flags.keys() == {"moe_grouped_gemm", "overlap_grad_reduce"} | FUSED | OFF


def test_latent_attention_rotates_without_the_experimental_kernel() -> None:
    flags = transformer_flags(ENGINE, model("deepseek_v3", "bf16"), WIDE)
    assert not flags["apply_rope_fusion"]
    assert flags["bias_activation_fusion"]


def test_experts_with_biases_have_no_fused_bias_and_dropout() -> None:
    flags = transformer_flags(ENGINE, model("gpt_oss", "bf16"), WIDE)
    assert flags["apply_rope_fusion"]
    assert not flags["bias_dropout_fusion"]


@pytest.mark.parametrize(
    ("machine", "layout", "expected"),
    [
        (DEEP_EP, WIDE, "flex"),
        (DEEP_EP, LayoutSettings(ranks=16, expert=8), "alltoall"),  # NVLink reaches all experts
        (DEEP_EP, LayoutSettings(ranks=16, expert=8, expert_tensor=2), "flex"),
        (ENGINE, WIDE, "alltoall"),
        (DEEP_EP, WIDE.model_copy(update={"dispatcher": "alltoall"}), "alltoall"),
        (DEEP_EP, LayoutSettings(ranks=2, expert=2, dispatcher="flex"), "flex"),
    ],
)
def test_the_dispatcher_follows_the_nodes(
    machine: Machine, layout: LayoutSettings, expected: str
) -> None:
    flags = transformer_flags(machine, model(precision="bf16"), layout)
    assert flags["moe_token_dispatcher_type"] == expected


@pytest.mark.parametrize(
    ("visible", "said", "gpus"),
    [
        (8, {}, 8),
        (1, {"LOCAL_WORLD_SIZE": "8"}, 8),
        (1, {"SLURM_NTASKS_PER_NODE": "4"}, 4),
        (8, {"LOCAL_WORLD_SIZE": "2"}, 8),
    ],
)
def test_a_rank_bound_to_one_gpu_knows_of_the_others_of_its_node(
    visible: int, said: dict[str, str], gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else experts on one node would be exchanged as over several."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91800)
    monkeypatch.setattr(device, "layer_specs", lambda: "transformer_engine")
    monkeypatch.setattr(capabilities, "find_spec", lambda _: None)
    found = this_machine()
    assert found == Machine(cuda=True, transformer_engine=True, packed_sinks=True, gpus=gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_machine().gpus == 1


def test_every_flag_is_a_field_of_megatron() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    for flags, config in (
        (transformer_flags(DEEP_EP, model(), WIDE), TransformerConfig),
        (data_parallel_flags(DEEP_EP, model()), DistributedDataParallelConfig),
    ):
        assert flags.keys() <= {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("machine", "changes", "message"),
    [
        (ENGINE, {"dispatcher": "flex"}, "layout.dispatcher: flex needs CUDA, TransformerEngine, "),
        (
            CPU,
            {"recompute": "selective", "recompute_modules": ("moe_act",)},
            "layout.recompute_modules: moe_act: needs TransformerEngine, and so CUDA; use moe",
        ),
    ],
)
def test_what_the_machine_lacks_is_named(
    machine: Machine, changes: dict[str, Any], message: str
) -> None:
    settings, layout = model(precision="bf16"), LayoutSettings(**changes)
    with pytest.raises(UserError, match=f"(?m)^{message}"):
        check_capabilities(machine, settings, layout)
    check_capabilities(DEEP_EP, settings, layout)


def test_recomputing_dropped_outputs_needs_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LayoutSettings(recompute="selective", recompute_modules=("moe_act", "moe"))
    check_capabilities(ENGINE, model(precision="bf16"), layout)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        UserError, match=r"moe_act: megatron-core compiles .* no c\+\+; .* use moe$"
    ):
        check_capabilities(ENGINE, model(precision="bf16"), layout)
    whole = layout.model_copy(update={"recompute_modules": ("moe",)})
    check_capabilities(ENGINE, model(precision="bf16"), whole)
    (tmp_path / "clang").touch(mode=0o755)
    monkeypatch.setenv("CXX", "clang")  # which torch compiles extensions with
    check_capabilities(ENGINE, model(precision="bf16"), layout)


def test_collectives_start_in_order_only_where_a_product_waits_for_them() -> None:
    assert rank_environment(LayoutSettings(ranks=2)) == {}
    for changes in ({"tensor": 2}, {"context": 2}):
        layout = LayoutSettings(ranks=2, **changes)
        assert rank_environment(layout) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_bf16_moments_need_the_optimizer_of_transformer_engine() -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, precision_aware=True)
    with pytest.raises(UserError, match="precision_aware: needs TransformerEngine's FusedAdam"):
        check_optimizer(CPU, optimizer)
    check_optimizer(ENGINE, optimizer)
    check_optimizer(CPU, OptimizerSettings(learning_rate=1e-3))


@pytest.mark.parametrize(
    ("changes", "precision", "distributed", "needs"),
    [
        ({"algorithm": "sgd"}, "bf16", True, ["algorithm: adam"]),
        ({}, "fp32", True, ["model.precision: bf16"]),
        ({}, "bf16", False, ["layout.distributed_optimizer: true"]),
        ({}, "bf16", True, []),
    ],
)
def test_bf16_moments_need_adam_bf16_and_a_distributed_optimizer(
    changes: dict[str, Any], precision: str, distributed: bool, needs: list[str]
) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, precision_aware=True, **changes)
    layout = LayoutSettings(distributed_optimizer=distributed)
    found = list(optimizer_violations(optimizer, model(precision=precision), layout))
    assert found == [("precision_aware", f"requires {each}") for each in needs]


@pytest.mark.parametrize(("beta2", "refused"), [(0.95, False), (0.98, False), (0.99, True)])
def test_bf16_moments_are_refused_where_they_would_not_fall(beta2: float, refused: bool) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, precision_aware=True, betas=(0.9, beta2))
    found = list(optimizer_violations(optimizer, model(precision="bf16"), LayoutSettings()))
    assert [field for field, _ in found] == ["precision_aware"] * refused
    # By the recursion itself, as TransformerEngine stores it: squared gradients fall to a quarter.
    second = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(5000):
        second = (beta2 * second.float() + (1 - beta2) * 0.25).bfloat16()
    assert (second.item() > 1.2 * 0.25) == refused


@pytest.mark.parametrize(
    ("algorithm", "distributed", "share", "needs"),
    [
        ("sgd", True, 0.5, ["algorithm: adam"]),
        ("adam", False, 1.0, ["layout.distributed_optimizer: true"]),
        ("adam", True, 1.0, []),
        ("sgd", False, 0.0, []),
    ],
)
def test_state_on_the_host_needs_adam_and_a_distributed_optimizer(
    algorithm: str, distributed: bool, share: float, needs: list[str]
) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, algorithm=algorithm, cpu_offload=share)
    layout = LayoutSettings(distributed_optimizer=distributed)
    found = list(optimizer_violations(optimizer, model(precision="fp32"), layout))
    assert found == [("cpu_offload", f"requires {each}") for each in needs]


def test_the_memory_model_counts_the_chunks_of_the_loss() -> None:
    assert device.LOSS_CHUNK_BYTES["cuda"] == memory.LOSS_CHUNK_BYTES
