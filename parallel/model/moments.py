"""The second moments of the inputs of a model's linear layers, under its tensors' names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from parallel.distributed import layout_sizes
from parallel.machine.device import device
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings
from parallel.weights.holdings import held
from parallel.weights.names import plain_name
from parallel.weights.quantizable import VllmMatrix

# Of a module: a linear layer's weight, or each expert's where TransformerEngine groups them.
WEIGHT = re.compile(r"weight\d*")

Key = tuple[int, str]  # a chunk and the plain name of a parameter in it


class InputMoments:
    """The sums over tokens of squared inputs, of every matrix of this rank, while it computes."""

    def __init__(self, policy: Policy, matrices: Iterable[VllmMatrix]) -> None:
        self._policy = policy
        self._shapes = dict(
            name_and_shape for matrix in matrices for name_and_shape in matrix.tensors
        )
        self._sums: dict[Key, Tensor] = {}  # float64 [inputs]
        self._tokens: dict[Key, int] = {}
        layout = LayoutSettings(**layout_sizes(policy.bridge.config))
        # Of each tensor here: the first of its columns, and where they are.
        self._pieces: dict[str, dict[int, tuple[Key, int, int]]] = {}
        for piece in held(policy.settings, layout, dist.get_rank()):
            if piece.tensor in self._shapes:
                (_, start), (_, size) = piece.box
                at = (piece.chunk, piece.parameter), piece.parameter_offset[1], size
                self._pieces.setdefault(piece.tensor, {})[start] = at

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add the inputs of every forward pass within the context."""
        here = {key for of in self._pieces.values() for key, _, _ in of.values()}
        hooks = [
            module.register_forward_pre_hook(self._hook(keys))
            for number, chunk in enumerate(self._policy.chunks)
            for name, module in chunk.named_modules()
            if (keys := self._keys(number, name, module)) and here.issuperset(keys)
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
        means = {}
        for name, shape in self._shapes.items():
            total = torch.zeros(2, shape[1], dtype=torch.float64, device=device())
            for start, (key, offset, size) in self._pieces.get(name, {}).items():
                if key in self._sums:
                    total[0, start : start + size] = self._sums[key][offset : offset + size]
                    total[1, start : start + size] = self._tokens[key]
            dist.all_reduce(total)
            mean = total[0] / total[1].clamp(min=1)
            means[name] = mean.masked_fill(total[1] == 0, 1.0).float()
        return means

    def _keys(self, number: int, name: str, module: torch.nn.Module) -> list[Key]:
        """Return the matrices of a module itself, in order."""
        latent = self._policy.bridge.config.multi_latent_attention
        parameters = (parameter for parameter, _ in module.named_parameters(recurse=False))
        return [
            (number, plain_name(f"{name}.{parameter}", latent))
            for parameter in parameters
            if WEIGHT.fullmatch(parameter)
        ]

    def _hook(self, keys: list[Key]) -> Any:
        def add(module: Any, arguments: tuple[Any, ...]) -> None:
            inputs = arguments[0].detach().flatten(0, -2).float()
            if (scale := getattr(module, "layer_norm_weight", None)) is not None:
                # TransformerEngine's layer includes the norm before it.
                inputs = functional.rms_norm(inputs, scale.shape, scale.float(), module.eps)
            by_expert = inputs.split(list(arguments[1])) if len(keys) > 1 else (inputs,)
            for key, expert_inputs in zip(keys, by_expert, strict=True):
                sums = expert_inputs.square().sum(0, dtype=torch.float64)
                self._sums[key] = self._sums[key] + sums if key in self._sums else sums
                self._tokens[key] = self._tokens.get(key, 0) + len(expert_inputs)

        return add
