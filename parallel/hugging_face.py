"""Weights under their Hugging Face names: load, stream, and save, through mbridge.

mbridge knows a family's names and fusions, but it describes TransformerEngine's modules; the view
below shows it our local modules under the names it expects, over the very same parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Qwen3MoeConfig

from parallel.settings import END_TOKEN, PAD_TOKEN, ModelSettings


def hugging_face_config(settings: ModelSettings) -> PretrainedConfig:
    """The model's Hugging Face configuration."""
    return FAMILIES[settings.family](settings)


def _qwen3_moe(settings: ModelSettings) -> PretrainedConfig:
    family: Any = Qwen3MoeConfig  # its fields are declared at run time
    config: PretrainedConfig = family(
        vocab_size=settings.vocabulary_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.expert_hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.attention_heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_dim,
        num_experts=settings.experts,
        num_experts_per_tok=settings.experts_per_token,
        moe_intermediate_size=settings.expert_hidden_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rms_norm_eps=settings.norm_epsilon,
        rope_theta=settings.rope_base,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.0,
        pad_token_id=PAD_TOKEN,
        eos_token_id=END_TOKEN,
        bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
        dtype=DTYPES[settings.precision],
    )
    # transformers 5 keeps the base inside rope_parameters, where mbridge does not look.
    config.rope_theta = settings.rope_base
    return config


FAMILIES = {"qwen3_moe": _qwen3_moe}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _NamedAsTransformerEngine(torch.nn.Module):
    """A model's parameters under the names TransformerEngine's modules would give them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        model = object.__getattribute__(self, "_model")
        for name, parameter in model.named_parameters():
            yield _transformer_engine_name(name), parameter

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return dict(self.named_parameters())

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)


def _transformer_engine_name(name: str) -> str:
    name = re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name
    )
    return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


@torch.no_grad()
def stream_weights(
    bridge: Any, chunks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor of the model, whole, on every rank; a collective over all ranks."""
    for name, tensor in bridge.export_weights(list(map(_NamedAsTransformerEngine, chunks))):
        yield name, tensor.detach().contiguous()


@torch.no_grad()
def load_weights(bridge: Any, chunks: Sequence[torch.nn.Module], directory: Path) -> None:
    """Fill this rank's shard from a Hugging Face checkpoint; a collective over all ranks."""
    bridge.load_weights(list(map(_NamedAsTransformerEngine, chunks)), str(directory))
