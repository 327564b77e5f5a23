"""The layers for multi-token prediction (MTP) of a Hugging Face checkpoint, kept as they are.

They draft tokens for speculative decoding. No stage trains them: their acceptance falls as the
policy moves away from the checkpoint, and the policy's own tokens do not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from parallel.families import FAMILIES
from parallel.hugging_face.config import TensorSpec
from parallel.hugging_face.files import DTYPES, WeightFiles, WeightsError
from parallel.hugging_face.stored import mtp_errors, mtp_pattern, mtp_tensors
from parallel.machine.device import DTYPES as PRECISIONS
from parallel.settings import ModelSettings


class MultiTokenTensors:
    """The MTP tensors of `model.initial_weights`; none without it, or where it has none."""

    def __init__(self, settings: ModelSettings) -> None:
        """Read the headers of the checkpoint's files.

        Raises:
            WeightsError: a file or an MTP tensor cannot be read, or the directory is gone and its
                family has such tensors.
        """
        self.specs: dict[str, TensorSpec] = {}
        self._pattern = mtp_pattern(settings.layers)
        if settings.initial_weights is None:
            return
        if not settings.initial_weights.is_dir():  # such as removed since the import
            if not FAMILIES[settings.family].drafts:
                return
            wrong = (
                "an export copies the layers for multi-token prediction of a"
                f" {settings.family} model from there; put the checkpoint back, or a link to it"
            )
            raise WeightsError(f"{settings.initial_weights}: no such directory", [wrong])
        self._files = WeightFiles(settings.initial_weights)
        stored = self._files.stored
        problems = mtp_errors(stored, settings.layers, self._files.block_size)
        if errors := [*self._files.errors, *problems]:
            raise WeightsError(f"{settings.initial_weights}: cannot be read", errors)
        for name in mtp_tensors(stored, settings.layers):
            dtype = DTYPES.get(stored[name].dtype, PRECISIONS[settings.precision])
            self.specs[name] = TensorSpec(dtype, stored[name].shape)

    @property
    def modules(self) -> list[str]:
        """The modules that have them, such as model.layers.61, or mtp."""
        matches = (re.match(self._pattern, name) for name in self.specs)
        return list(dict.fromkeys(match[1] for match in matches if match))

    @property
    def layers(self) -> int:
        """The number of MTP layers."""
        return len({match[0] for name in self.specs if (match := re.search(r"layers\.\d+", name))})

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every MTP tensor: the stored bytes, or at the model's precision those in FP8."""
        for name, spec in self.specs.items():
            yield name, self._files.read(name).to(spec.dtype)
