"""vLLM's fused norms for CPUs equal their compositions; rotary embeddings; experts in a refit."""

from types import SimpleNamespace

import pytest
import torch
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.kernel import KernelConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.reload import layerwise

from parallel.cpu import vllm_kernels as cpu_kernels
from parallel.engine import refit_extension
from parallel.engine.refit_extension import RefitExtension


@pytest.fixture
def preferred():
    config = KernelConfig()
    cpu_kernels.prefer(config)
    with config.ir_op_priority.set_priority():
        yield


def heads(width: int) -> torch.Tensor:
    """Return queries of a fused QKV of 5 tokens: three heads of four, with gaps between rows."""
    fused = torch.randn(5, 4 * width, generator=torch.Generator().manual_seed(width))
    return fused[:, : 3 * width].view(5, 3, width)


def test_a_weight_sync_warns_of_no_rotary_embedding(caplog):
    layerwise.logger.propagate = True  # which vLLM's configuration of logging ends
    for layer in ("RotaryEmbedding", "Linear"):
        layerwise.logger.warning("%s: Failed to load weights", layer)
    assert [record.getMessage() for record in caplog.records] == ["Linear: Failed to load weights"]


@pytest.mark.parametrize("width", [8, 24, 64, 20])
def test_a_norm_of_strided_heads_equals_the_composition(preferred, width):
    x, weight = heads(width), torch.rand(width)
    expected = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
    provider = ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider

    torch.testing.assert_close(ir.ops.rms_norm(x, weight, 1e-6), expected, rtol=1e-6, atol=1e-6)
    # vLLM's composition handles a width that the kernel does not support.
    assert provider == (cpu_kernels.NAME if width % cpu_kernels.VECTOR == 0 else "native")


def test_a_weight_of_another_precision_is_left_to_the_composition(preferred):
    """The kernel would raise an error."""
    x, weight = torch.randn(5, 64).bfloat16(), torch.rand(64)
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider == "native"
    assert ir.ops.rms_norm.dispatch(x, weight.bfloat16(), 1e-6).provider == cpu_kernels.NAME
    assert ir.ops.fused_add_rms_norm.dispatch(x, x.clone(), weight, 1e-6).provider == "native"


def test_a_norm_after_a_residual_leaves_the_sum(preferred):
    x, residual, weight = torch.randn(6, 64), torch.randn(6, 64), torch.rand(64)
    expected = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    operands = x.clone(), residual.clone(), weight, 1e-6

    assert ir.ops.fused_add_rms_norm.dispatch(*operands).provider == cpu_kernels.NAME
    found = ir.ops.fused_add_rms_norm.maybe_inplace(*operands)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_rotary_kernel_still_misreads_queries_of_several_heads(monkeypatch):
    """Once this fails, `engine_arguments` need not turn it off for latent attention."""
    monkeypatch.setenv("LD_PRELOAD", "")  # which vLLM sets, for all that this process starts
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 1e4}
        rotary = get_rope(64, 256, is_neox_style=False, rope_parameters=parameters)
    positions, query, key = torch.arange(5), torch.randn(5, 3, 64), torch.randn(5, 1, 64)
    expected, _ = rotary.forward_native(positions, query.clone(), key.clone())
    joined, _ = rotary.forward_cpu(positions, query.flatten(1).clone(), key.flatten(1).clone())
    torch.testing.assert_close(joined.view_as(query), expected, rtol=1e-6, atol=1e-6)
    separate, _ = rotary.forward_cpu(positions, query.clone(), key.clone())
    assert (separate - expected).abs().max() > 0.1


@pytest.mark.parametrize(("device", "kept"), [("cpu", False), ("cuda", True)])
def test_a_refit_lets_go_of_the_experts_kernel_on_a_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, kept: bool
) -> None:
    """With a kernel vLLM copies into the weights that CUDA graphs read; its CPU code must repack.

    The kernel that the refit made is dropped for the old one where none was made.
    """
    kernel, seen = object(), []
    experts = torch.nn.Module()
    experts.quant_method = SimpleNamespace(moe_kernel=kernel)  # type: ignore[assignment]
    extension = RefitExtension()
    extension.model_runner = SimpleNamespace(model=torch.nn.Sequential(experts))
    extension.model_config = None
    extension._device = torch.device(device)
    monkeypatch.setattr(layerwise, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(layerwise, "finalize_layerwise_reload", lambda model, config: None)
    monkeypatch.setattr(refit_extension, "place_buffers", lambda model: None)
    with extension._bracket():
        seen.append(experts.quant_method.moe_kernel)
    assert seen == [kernel if kept else None]
    assert experts.quant_method.moe_kernel is kernel
