"""Models without vLLM kernels on a CPU are reported before and at the engine's start."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from parallel.engine.arguments import LATENT_CACHE_BLOCK, engine_arguments
from parallel.engine.platform import HEAD_DIMS, LATENT_WIDTHS, check_cpu_engine, unsupported
from parallel.errors import UserError
from parallel.settings import EngineJob
from pipeline.launch.placement import ForkServers
from stages.main import warn_of_engines
from tests.engine.engine_process import running_engine
from tests.engine.engine_settings import ENGINE, MODEL, MODELS


def test_head_dims_equal_those_of_vllm() -> None:
    assert list(HEAD_DIMS) == CPUAttentionBackend.get_supported_head_sizes()


def test_known_limits_are_reported() -> None:
    assert unsupported(MODEL) is None
    narrow = unsupported(MODEL.model_copy(update={"head_dim": 16}))
    assert narrow is not None
    assert narrow.startswith("model.head_dim = 16: vLLM's attention has kernels for 32, 64, ")
    biased = MODEL.model_copy(update={"family": "gpt_oss"})
    assert unsupported(biased) is None
    odd = unsupported(biased.model_copy(update={"expert_hidden_size": 48}))
    assert odd is not None
    assert odd.startswith("model.expert_hidden_size = 48: vLLM's experts of gpt_oss need a mult")


def test_a_run_that_samples_on_a_cpu_is_refused() -> None:
    check_cpu_engine(MODEL)
    narrow = MODEL.model_copy(update={"head_dim": 16})
    refused = r"stages that sample cannot run on a CPU: model\.head_dim = 16: .*; change the model"
    with pytest.raises(UserError, match=refused):
        check_cpu_engine(narrow)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_latent_attention_needs_the_published_widths(precision: Literal["fp32", "bf16"]) -> None:
    latent = MODELS["deepseek_v3"].model_copy(update={"precision": precision})
    assert unsupported(latent) is None
    for changes in ({"head_dim": 32}, {"architecture": {"kv_lora_rank": 256}}):
        refused = unsupported(latent.model_copy(update=changes))
        assert refused is not None
        assert refused.endswith("vLLM's latent attention has a kernel for 512 and 64 alone")


def test_widths_of_latent_attention_are_those_of_vllm() -> None:
    assert [sum(LATENT_WIDTHS)] == CPUMLABackend.get_supported_head_sizes()
    assert CPUMLABackend.get_supported_kernel_block_sizes() == [LATENT_CACHE_BLOCK]
    assert {torch.float32, torch.bfloat16} <= set(CPUMLABackend.supported_dtypes)


def test_limits_of_delta_nets_are_reported() -> None:
    hybrid = MODELS["qwen3_5_moe_text"]
    assert unsupported(hybrid) is None
    exact = unsupported(hybrid.model_copy(update={"precision": "fp32"}))
    assert exact == "model.family: vLLM's gated delta net has kernels for bf16 alone"
    narrow = {**hybrid.architecture, "linear_key_head_dim": 32}
    assert unsupported(hybrid.model_copy(update={"architecture": narrow})) == (
        "model.architecture: linear key and value heads are 32 and 64 wide: vLLM's gated delta net"
        " has kernels for equal widths of 64, 128 alone"
    )


@pytest.mark.parametrize(
    ("name", "cached"),
    [("gpt_oss", True), ("qwen3_5_moe_text", False), ("deepseek_v3", False)],
)
def test_only_what_a_prefix_leaves_in_full_is_continued(name: str, cached: bool) -> None:
    job = EngineJob(model=MODELS[name], engine=ENGINE, index=0, address=Path("unused"), seed=0)
    found = engine_arguments(job, "directory", cuda=False)
    assert (found["enable_prefix_caching"], found["enable_return_routed_experts"]) == (cached,) * 2


def test_the_first_stage_reports_a_limit_at_its_start(capfd: pytest.CaptureFixture[str]) -> None:
    warn_of_engines(MODEL)
    assert capfd.readouterr() == ("", "")
    warn_of_engines(MODEL.model_copy(update={"head_dim": 16}))
    said = "braid-notice: stages that sample will fail on a CPU: model.head_dim = 16: vLLM's"
    assert capfd.readouterr().err.startswith(said)


def test_an_engine_that_cannot_sample_is_never_ready(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    narrow = MODEL.model_copy(update={"head_dim": 16})
    error = "braid-error: the engine cannot serve this run: vLLM cannot sample from this"
    with (
        pytest.raises(AssertionError, match=error),
        running_engine(fork_servers, narrow, tmp_path),
    ):
        pass
    assert not (tmp_path / "address.json").exists()
