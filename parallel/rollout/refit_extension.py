"""Inside vLLM's worker: take new weights in place, through vLLM's own loaders.

`model.load_weights` fails on a loaded engine, whose weights are already repacked, and vLLM's
`reload_weights` silently gives wrong experts on a CPU. This brackets the whole refit once instead.
"""

from __future__ import annotations

from typing import Any

import torch


class RefitExtension:
    """Methods vLLM adds to its worker; called through `collective_rpc` in the order they stand."""

    model_runner: Any
    model_config: Any

    def begin_refit(self) -> None:
        """Turn every layer back to the form its loaders expect, after closing a failed refit."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        if getattr(self, "_open", False):
            self.finish_refit()
        self._open = True
        # Between the brackets the model's parameters stand on the meta device.
        self._device = next(self.model_runner.model.parameters()).device
        self._kernels: list[tuple[Any, Any]] = []
        for module in self.model_runner.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                # vLLM repacks experts only when no kernel exists yet; with the old kernel kept, the
                # CPU engine would read new experts in the old packing.
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None
        with torch.no_grad():
            initialize_layerwise_reload(self.model_runner.model)

    def load_chunk(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load Hugging Face tensors; a chunk holds whole fused modules."""
        with torch.no_grad(), torch.device(self._device):
            self.model_runner.model.load_weights(iter(tensors))

    def finish_refit(self) -> None:
        """Repack every layer for its kernels."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        with torch.no_grad(), torch.device(self._device):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._open = False
