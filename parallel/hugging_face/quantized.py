"""Quantized weights in the format of compressed-tensors, which vLLM loads.

Scales are calibrated by nvidia-modelopt: of each group of weights that share one, the largest
magnitude that is still represented is the one with the least error of the layer's outputs, as far
as the second moments of its inputs tell. Only the stage `quantize` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from parallel.hugging_face.config import TensorSpec
from parallel.hugging_face.files import WeightFiles
from parallel.weights.boxes import Box, within
from parallel.weights.quantizable import VllmMatrix, module_name

Format = Literal["fp8", "nvfp4", "int8", "int4"]
Stored = dict[str, Tensor]  # by the last part of the names: weight_packed, weight_scale ...

E4M3, LARGEST_E4M3, LEAST_E4M3 = torch.float8_e4m3fn, 448.0, 2.0**-9
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BITS = {"int8": 8, "int4": 4}
FORMATS = {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}  # else pack-quantized
# Clipping below half of the largest weight was never the best of a group of 16 or more.
LEAST_SHARE, STEP = 0.5, 0.05  # of the largest magnitude of a group, which a scale represents


@dataclass(frozen=True)
class Scheme:
    """A format of quantized weights, of a model of `dtype`.

    `group` consecutive weights of a row have one scale, or all of it where that is None. A weight
    is [outputs, inputs]. What `dequantize` returns is what vLLM multiplies by: fp8's activations
    it also rounds, token by token, and those of the other formats it leaves alone.
    """

    format: Format
    group: int | None
    dtype: torch.dtype

    def specs(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of what `quantize` stores for a weight of this shape."""
        rows, columns = shape
        scales = (rows, columns // (self.group or columns))
        if self.format == "fp8":
            return {
                "weight": TensorSpec(E4M3, (rows, columns)),
                "weight_scale": TensorSpec(torch.float32, scales),
            }
        if self.format == "nvfp4":
            return {
                "weight_packed": TensorSpec(torch.uint8, (rows, columns // 2)),
                "weight_scale": TensorSpec(E4M3, scales),
                "weight_global_scale": TensorSpec(torch.float32, (1,)),
            }
        packed = -(-columns * BITS[self.format] // 32)
        return {
            "weight_packed": TensorSpec(torch.int32, (rows, packed)),
            "weight_scale": TensorSpec(self.dtype, scales),
            "weight_shape": TensorSpec(torch.int64, (2,)),
        }

    def quantize(self, weight: Tensor, moments: Tensor, largest: Tensor) -> Stored:
        """Return what is stored for a weight.

        `moments` are the second moments of its inputs, [inputs], and `largest` is the largest
        magnitude of all weights that vLLM fuses with this one.
        """
        wide = weight.float()
        blocks = wide.view(-1, self.group or wide.shape[1])
        importance = moments.to(wide).expand_as(wide).reshape(blocks.shape)
        whole = 6.0 * LARGEST_E4M3 / largest.float().masked_fill(largest == 0, 1.0)

        def rounded(weights: Tensor, amax: Tensor) -> Tensor:
            scale = self._scale(amax, whole)
            return self._values(self._codes(weights, scale, whole), scale, whole)

        def error(weights: Tensor, restored: Tensor) -> Tensor:
            return (weights - restored).square() * importance

        scale = self._scale(_calibrated(blocks, rounded, error), whole)
        codes = self._codes(blocks, scale, whole).view(wide.shape)
        scales = scale.view(wide.shape[0], -1)
        if self.format == "fp8":
            return {"weight": codes, "weight_scale": scales}
        if self.format == "nvfp4":
            packed = codes[:, 0::2] | codes[:, 1::2] << 4
            return {
                "weight_packed": packed,
                "weight_scale": scales,
                "weight_global_scale": whole.view(1),
            }
        return {
            "weight_packed": pack_to_int32(codes, BITS[self.format]),
            "weight_scale": scales,
            "weight_shape": torch.tensor(wide.shape),
        }

    def dequantize(self, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the weight that stored tensors stand for, in the model's dtype."""
        scale, whole = stored["weight_scale"], stored.get("weight_global_scale", torch.ones(1))
        if self.format == "fp8":
            codes = stored["weight"]
        elif self.format == "nvfp4":
            packed = stored["weight_packed"]
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(shape)
        else:
            bits = BITS[self.format]
            codes = unpack_from_int32(stored["weight_packed"], bits, torch.Size(shape))
        blocks = codes.reshape(-1, self.group or shape[1])
        return self._values(blocks, scale.view(-1, 1), whole).view(shape).to(self.dtype)

    def configuration(self, ignored: list[str]) -> dict[str, Any]:
        """Return `quantization_config` of config.json; `ignored` are modules that it leaves."""
        weights: dict[str, Any] = {
            "num_bits": BITS.get(self.format, 4 if self.format == "nvfp4" else 8),
            "type": "int" if self.format in BITS else "float",
            "symmetric": True,
            "dynamic": False,
            "strategy": "tensor_group" if self.format == "nvfp4" else "group",
            "group_size": self.group,
        }
        activations = None
        if self.format == "fp8":
            # vLLM has no kernel of fp8 experts that leaves their inputs alone.
            weights["strategy"] = "channel"
            activations = {**weights, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": FORMATS.get(self.format, "pack-quantized"),
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }

    def _scale(self, amax: Tensor, whole: Tensor) -> Tensor:
        """Return the scales, as stored, with which groups represent magnitudes up to `amax`."""
        amax = amax.masked_fill(amax == 0, 1.0)
        if self.format == "fp8":
            return amax / LARGEST_E4M3
        if self.format == "nvfp4":
            return (amax / 6.0 * whole).clamp(LEAST_E4M3, LARGEST_E4M3).to(E4M3)
        return (amax / (2 ** (BITS[self.format] - 1) - 1)).to(self.dtype)

    def _codes(self, blocks: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
        """Return the codes of groups of weights: E4M3, indices of E2M1 with a sign, or int8."""
        if self.format == "fp8":
            return (blocks / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
        if self.format == "nvfp4":
            scaled = blocks / (scale.float() / whole)
            values = scaled.new_tensor(E2M1)
            middles = (values[1:] + values[:-1]) / 2
            below, above = (torch.bucketize(scaled.abs(), middles, right=r) for r in (False, True))
            nearest = torch.where(below % 2 == 0, below, above)  # of a tie, the even code
            return (nearest + 8 * (scaled < 0)).to(torch.uint8)
        bound = 2 ** (BITS[self.format] - 1)
        return (blocks / scale.float()).round().clamp(-bound, bound - 1).to(torch.int8)

    def _values(self, codes: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
        """Return the fp32 weights that codes stand for."""
        if self.format == "nvfp4":
            table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
            return table[codes.long()] * (scale.float() / whole.to(scale.device))
        return codes.float() * scale.float()


def quantized(
    stream: Iterable[tuple[str, Tensor]],
    matrices: Iterable[VllmMatrix],
    scheme: Scheme,
    moments: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, those of `matrices` as they are stored.

    Of the model's tensors only those of the matrices in progress are held.
    """
    of = {name: matrix for matrix in matrices for name, _ in matrix.tensors}
    in_progress: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stream:
        if (matrix := of.get(name)) is None:
            yield name, tensor
            continue
        matrix_weights = in_progress.setdefault(matrix.name, {})
        matrix_weights[name] = tensor
        if len(matrix_weights) < len(matrix.tensors):
            continue
        largest = torch.stack([weight.abs().max() for weight in matrix_weights.values()]).max()
        for tensor_name, weight in in_progress.pop(matrix.name).items():
            for key, stored in scheme.quantize(weight, moments[tensor_name], largest).items():
                yield f"{module_name(tensor_name)}.{key}", stored


class QuantizedFiles(WeightFiles):
    """The files of a quantized checkpoint, whose weights are read as what they stand for."""

    def __init__(self, directory: Path, scheme: Scheme, matrices: Iterable[VllmMatrix]) -> None:
        super().__init__(directory)
        self._scheme = scheme
        self._shapes = dict(
            name_and_shape for matrix in matrices for name_and_shape in matrix.tensors
        )
        self._whole = lru_cache(4)(self._dequantized)  # fused tensors are read in turns

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name not in self._shapes:
            return super().read(name, box)
        return self._whole(name) if box is None else self._whole(name)[within(box)]

    def _dequantized(self, name: str) -> Tensor:
        shape = self._shapes[name]
        stored = {
            key: super(QuantizedFiles, self).read(f"{module_name(name)}.{key}")
            for key in self._scheme.specs(shape)
        }
        return self._scheme.dequantize(stored, shape)


def _calibrated(
    blocks: Tensor,
    rounded: Callable[[Tensor, Tensor], Tensor],
    error: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the magnitude of each block that its scale represents, [blocks, 1]."""
    # Where vLLM is installed it imports that too: 8 seconds, which every other stage would pay.
    from modelopt.torch.quantization.calib import MseCalibrator

    search = MseCalibrator(
        blocks.abs().amax(-1, keepdim=True),
        axis=0,
        step_size=STEP,
        start_multiplier=LEAST_SHARE,
        stop_multiplier=1.0,
        quant_func=rounded,
        error_func=error,
    )
    search.collect(blocks)
    amax: Tensor = search.compute_amax()
    return amax
