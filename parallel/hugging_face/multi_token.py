"""The layers for multi-token prediction (MTP) of a Hugging Face checkpoint, kept as they are.

They draft tokens for speculative decoding. No stage trains them: their acceptance falls as the
policy moves away from the checkpoint, and the policy's own tokens do not depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from parallel.device import DTYPES as PRECISIONS
from parallel.hugging_face.config import TensorSpec, mtp_pattern
from parallel.hugging_face.files import DTYPES, WeightFiles, WeightsError
from parallel.hugging_face.stored import SUFFIX
from parallel.settings import ModelSettings


class MultiTokenTensors:
    """The MTP tensors of `model.initial_weights`; none without it, or where it has none."""

    def __init__(self, settings: ModelSettings) -> None:
        """Read the headers of the checkpoint's files.

        Raises:
            WeightsError: a file cannot be read, or an MTP tensor has an unknown dtype.
        """
        self.specs: dict[str, TensorSpec] = {}
        self._pattern = mtp_pattern(settings.layers)
        if settings.initial_weights is None:
            return
        self._files = WeightFiles(settings.initial_weights)
        errors = list(self._files.errors)
        for name, (file, dtype, shape, _) in self._files.stored.items():
            if not re.match(self._pattern, name) or name.endswith(SUFFIX):
                continue
            if dtype in DTYPES:
                self.specs[name] = TensorSpec(DTYPES[dtype], shape)
            elif self._files.blocks_of(name) is not None:
                self.specs[name] = TensorSpec(PRECISIONS[settings.precision], shape)
            else:
                errors.append(f"{file.name}: {name} is {dtype}; give MTP tensors in BF16")
        if errors:
            raise WeightsError(f"{settings.initial_weights}: cannot be read", errors)

    @property
    def modules(self) -> list[str]:
        """The modules that have them, such as model.layers.61, or mtp."""
        known = (re.match(self._pattern, name) for name in self.specs)
        return list(dict.fromkeys(found[1] for found in known if found))

    @property
    def layers(self) -> int:
        """The number of MTP layers."""
        return len({found[0] for name in self.specs if (found := re.search(r"layers\.\d+", name))})

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every MTP tensor: the stored bytes, or at the model's precision those in FP8."""
        for name, spec in self.specs.items():
            yield name, self._files.read(name).to(spec.dtype)
