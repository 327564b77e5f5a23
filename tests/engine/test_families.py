"""Families besides the one that test_engine.py knows: the engine samples from their weights too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import running_engine
from engine_settings import ENGINE, MODEL
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from parallel.families import routed_layers
from parallel.hugging_face import hugging_face_config
from parallel.rollout.client import EngineClient, prompts_of
from parallel.rollout.wire import Generate
from parallel.settings import ModelSettings

# DeepSeek-V3 is not among them: vLLM 0.30's latent attention has no fp32 kernel for a CPU.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "glm4_moe": {"n_group": 2, "routed_scaling_factor": 1.5, "attention_bias": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_routes_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    settings = MODEL.model_copy(update={"family": family, "architecture": FAMILIES[family]})
    source, chosen = model(settings)
    weights = revert_weight_conversion(source, source.state_dict())
    with running_engine(settings, tmp_path) as address:
        client = EngineClient(address, ENGINE)
        client.refit([(name, weights[name].clone()) for name in sorted(weights)], 1)
        request = Generate(prompts_of([list(range(2, 40)), [5, 6, 7]], 4, 0), 1.0, 12, 1)
        drawn = client.generate("a", request)
    for each in drawn:
        chosen.clear()
        tokens = torch.tensor(np.concatenate([each.prompt, each.response]))[None]
        with torch.no_grad():
            expected = source(tokens).logits[0, len(each.prompt) - 1 : -1].log_softmax(-1)
        picked = expected.gather(-1, tokens[0, len(each.prompt) :, None])[:, 0]
        assert each.logprobs is not None and each.routes is not None
        assert (picked - torch.tensor(each.logprobs)).abs().max() < 1e-4
        assert each.routes.shape[1] == len(routed_layers(settings)) == len(chosen)
        routes = torch.stack([layer[:-1].sort(-1).values for layer in chosen], 1)
        assert np.array_equal(np.sort(each.routes), routes.numpy())


def model(settings: ModelSettings) -> tuple[Any, list[torch.Tensor]]:
    """A random model, and where it leaves the experts that each of its layers chose."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(hugging_face_config(settings)).float().eval()
    chosen: list[torch.Tensor] = []
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if tensor.dim() > 1 or "bias" in name:
                tensor.normal_(0, 0.3)
    for name, module in made.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _m, _g, found: chosen.append(found[2]))
    return made, chosen
