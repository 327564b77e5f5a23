"""The formats of quantized weights against compressed-tensors' decoders and modelopt's encoders."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from torch import Tensor

from parallel.hugging_face.quantized import Format, Scheme, quantized
from parallel.weights.quantizable import VllmMatrix, module_name
from tests.runs import REPOSITORY

ROWS, COLUMNS = 48, 128
SCHEMES = [("fp8", None), ("nvfp4", 16), ("int8", 32), ("int4", 32), ("int4", 128)]
FORMATS = pytest.mark.parametrize(("name", "group"), SCHEMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a weight with outliers and a row of zeros, and the moments of its inputs."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=random) ** 3
    weight[5] = 0.0
    moments = torch.rand(COLUMNS, generator=random) ** 4 * 100
    return weight.to(dtype), moments


def both(scheme: Scheme, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a weight, and what its stored form stands for."""
    weight, drawn_moments = drawn(scheme.dtype)
    importance = drawn_moments if moments is None else moments
    stored = scheme.quantize(weight, importance, weight.abs().max())
    return weight, scheme.dequantize(stored, (ROWS, COLUMNS))


@FORMATS
@DTYPES
def test_vllm_s_library_reads_what_is_meant(
    name: Format, group: int | None, dtype: torch.dtype
) -> None:
    scheme = Scheme(name, group, dtype)
    weight, _ = drawn(dtype)
    stored = scheme.quantize(weight, torch.ones(COLUMNS), weight.abs().max())
    assert {key: (each.dtype, tuple(each.shape)) for key, each in stored.items()} == {
        key: tuple(spec) for key, spec in scheme.specs((ROWS, COLUMNS)).items()
    }
    configuration = scheme.configuration([])
    of = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**configuration["config_groups"]["group_0"]["weights"]),
    )
    reader = BaseCompressor.get_value_from_registry(configuration["format"])
    given = {key: each.clone() for key, each in stored.items()}
    theirs = reader.decompress(given, of)["weight"]
    ours = scheme.dequantize(stored, (ROWS, COLUMNS))
    # Its decoder of nvfp4 computes in bf16 whatever the model's dtype.
    exact = name != "nvfp4"
    bounds = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2**-7, "atol": 0.0}
    torch.testing.assert_close(theirs.to(dtype), ours, **bounds)


def test_nvfp4_is_modelopt_s() -> None:
    scheme = Scheme("nvfp4", 16, torch.float32)
    weight, _ = drawn()
    stored = scheme.quantize(weight, torch.ones(COLUMNS), weight.abs().max())
    scales, whole = stored["weight_scale"], 1 / stored["weight_global_scale"]
    theirs, *_ = NVFP4QTensor.quantize(weight.clone(), 16, scales, whole)
    ours = scheme.dequantize(stored, (ROWS, COLUMNS))
    decoded = theirs.dequantize(scale=scales, double_scale=whole, block_sizes={-1: 16})
    torch.testing.assert_close(decoded, ours, rtol=1e-6, atol=0)


@pytest.mark.parametrize("place", range(3))
def test_fused_parts_share_the_scale_of_their_largest_weight(place: int) -> None:
    """Wherever the largest stands: vLLM multiplies the whole matrix by one global scale."""
    scheme = Scheme("nvfp4", 16, torch.float32)
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    matrix = VllmMatrix("qkv", "qkv", tuple((name, (ROWS, COLUMNS)) for name in names))
    weights = {name: drawn()[0] / drawn()[0].abs().max() for name in names}
    weights[names[place]] *= -4.0
    alone = torch.ones(2, 2)
    stream = [(names[0], weights[names[0]]), ("model.norm.weight", alone), *[*weights.items()][1:]]
    moments = dict.fromkeys(names, torch.ones(COLUMNS))
    found = dict(quantized(stream, [matrix], scheme, moments))
    scales = [found[f"{module_name(name)}.weight_global_scale"] for name in names]
    assert [scale.item() for scale in scales] == pytest.approx([6.0 * 448.0 / 4.0] * 3)
    assert torch.equal(found["model.norm.weight"], alone)


@FORMATS
def test_weights_go_to_the_nearest_code(name: Format, group: int | None) -> None:
    """Quantizing what is already quantized, with the same scales, changes nothing."""
    scheme = Scheme(name, group, torch.float32)
    weight, found = both(scheme)
    assert (found[5] == 0).all() and found.isfinite().all()
    blocks, again = (each.view(-1, group or COLUMNS) for each in (weight, found))
    least, most = (f(again, 1) for f in (torch.amin, torch.amax))
    inside = (blocks >= least[:, None]) & (blocks <= most[:, None])
    # Of the values that any weight of the group got, none is nearer than its own.
    nearest = (blocks[:, :, None] - again[:, None, :]).abs().amin(-1)
    assert torch.equal((blocks - again).abs()[inside], nearest[inside])


@FORMATS
def test_calibration_lowers_the_error_of_the_outputs(name: Format, group: int | None) -> None:
    scheme = Scheme(name, group, torch.float32)
    _, moments = drawn()
    weight, calibrated = both(scheme)
    _, flat = both(scheme, torch.ones(COLUMNS))

    def error(found: Tensor, importance: Tensor) -> Tensor:
        return ((weight - found).square() * importance).sum()

    assert error(calibrated, moments) <= error(flat, moments)
    assert error(flat, torch.ones(COLUMNS)) <= error(calibrated, torch.ones(COLUMNS))
    if group is not None:
        assert error(calibrated, moments) < 0.99 * error(flat, moments)


def test_a_stage_imports_no_quantizer_before_it_quantizes() -> None:
    program = "import sys, stages.kinds.export.work, parallel.hugging_face.quantized\n"
    program += "print(*{'vllm', 'modelopt'} & sys.modules.keys())"
    command = [sys.executable, "-W", "ignore", "-c", program]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == []
