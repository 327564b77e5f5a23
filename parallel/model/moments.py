"""The second moments of the inputs of a model's linear layers, under its tensors' names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from parallel.device import device
from parallel.distributed import layout_sizes
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings
from parallel.weights.holdings import held
from parallel.weights.names import plain_name, tensors

# Of a module: a linear layer's weight, or each expert's where TransformerEngine groups them.
WEIGHT = re.compile(r"weight\d*")

Key = tuple[int, str]  # a chunk and the plain name of a parameter in it


class InputMoments:
    """The sums over tokens of squared inputs, of every matrix of this rank, while it computes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sums: dict[Key, Tensor] = {}  # float64 [inputs]
        self._tokens: dict[Key, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add the inputs of every forward pass within the context."""
        hooks = [
            module.register_forward_pre_hook(self._hook(number, name, module))
            for number, chunk in enumerate(self._policy.chunks)
            for name, module in chunk.named_modules()
            if _weights(module)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def by_tensor(self) -> dict[str, Tensor]:
        """Return the mean square of each input of every matrix, fp32 [inputs], on every rank.

        Padding of a row counts as tokens. Where no token came, as for an expert that none was
        routed to, all inputs count alike. Collective.
        """
        settings = self._policy.settings
        layout = LayoutSettings(**layout_sizes(self._policy.bridge.config))
        ours: dict[str, dict[int, tuple[Key, int, int]]] = {}
        for piece in held(settings, layout, dist.get_rank()):
            if len(piece.box[0]) == 2:
                (_, first), (_, size) = piece.box
                at = (piece.chunk, piece.parameter), piece.parameter_offset[1], size
                ours.setdefault(piece.tensor, {})[first] = at
        found = {}
        for name, shape in tensors(settings).items():
            if len(shape) != 2:
                continue
            total = torch.zeros(2, shape[1], dtype=torch.float64, device=device())
            for first, (key, offset, size) in ours.get(name, {}).items():
                if key in self._sums:
                    total[0, first : first + size] = self._sums[key][offset : offset + size]
                    total[1, first : first + size] = self._tokens[key]
            dist.all_reduce(total)
            mean = total[0] / total[1].clamp(min=1)
            found[name] = mean.masked_fill(total[1] == 0, 1.0).float()
        return found

    def _hook(self, number: int, name: str, module: torch.nn.Module) -> Any:
        latent = self._policy.bridge.config.multi_latent_attention
        keys = [(number, plain_name(f"{name}.{each}", latent)) for each in _weights(module)]

        def add(module: Any, arguments: tuple[Any, ...]) -> None:
            inputs = arguments[0].detach().flatten(0, -2).float()
            if (scale := getattr(module, "layer_norm_weight", None)) is not None:
                # TransformerEngine's layer includes the norm before it.
                inputs = functional.rms_norm(inputs, scale.shape, scale.float(), module.eps)
            parts = inputs.split(list(arguments[1])) if len(keys) > 1 else (inputs,)
            for key, part in zip(keys, parts, strict=True):
                sums = part.square().sum(0, dtype=torch.float64)
                self._sums[key] = self._sums[key] + sums if key in self._sums else sums
                self._tokens[key] = self._tokens.get(key, 0) + len(part)

        return add


def _weights(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own matrices, in order."""
    return [
        name
        for name, parameter in module.named_parameters(recurse=False)
        if WEIGHT.fullmatch(name) and parameter.dim() == 2
    ]
