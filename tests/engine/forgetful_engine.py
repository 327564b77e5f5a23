"""An engine on a CPU that forgets, when it sleeps, what an engine on a GPU forgets.

vLLM's level-2 sleep discards all memory of the model and of the cache but the model's buffers.
Here every parameter, every other tensor of a module and the cache become NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallel.engine import server
from parallel.engine.core import Core

# Attributes of modules: containers of buffers and modules, and vLLM's copies on the host.
STAYS = ("_buffers", "_modules", "_k_scale_cpu", "_v_scale_cpu")


def tensors(found: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value: itself, or what a list, tuple or mapping holds."""
    if torch.is_tensor(found):
        yield found
    elif isinstance(found, dict):
        for each in found.values():
            yield from tensors(each)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from tensors(each)


def forget(worker: Any) -> int:
    """Overwrite what sleep discards; return the number of tensors."""
    runner = worker.model_runner
    kept = {id(buffer) for buffer in runner.model.buffers()}
    lost = list(tensors(runner.kv_caches))
    for module in runner.model.modules():
        found = {name: each for name, each in vars(module).items() if name not in STAYS}
        lost += [each for each in tensors(found) if id(each) not in kept]
    bits = [each for each in lost if each.dtype is torch.int8]  # a delta net's states, as bytes
    floating = [each for each in lost if each.is_floating_point()]
    with torch.no_grad():
        for each in floating:
            each.fill_(torch.nan)
        for each in bits:
            each.fill_(-1)  # a NaN in every floating type
    return len(floating)


class ForgetfulCore(Core):
    """A core whose engine loses its weights when it sleeps."""

    def sleep(self) -> None:
        super().sleep()
        assert min(self._vllm.engine_core.collective_rpc(forget)) > 10


def main() -> None:
    """Serve an engine with such a core."""
    server.Core = ForgetfulCore  # type: ignore[misc]
    server.main()


if __name__ == "__main__":
    main()
