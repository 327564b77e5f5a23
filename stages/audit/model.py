"""transformers' Qwen3-MoE in float64, one sample at a time, with given routes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.audit import recorded
from stages.audit.recorded import NotAuditable, RecordedRun, RecordedSample

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Read:
    """A forward pass over one sample: logits of its response tokens, router logits and experts.

    `logits` [response, vocabulary] before temperature; of all tokens that were read, the routers'
    logits [layers, tokens, experts] and the experts used [layers, tokens, experts_per_token].
    """

    sample: RecordedSample
    logits: torch.Tensor
    router_logits: torch.Tensor
    experts: torch.Tensor

    def logprobs(self, temperature: float) -> torch.Tensor:
        """Return log pi [learned] of the tokens under the distribution they were sampled from."""
        ids = self.sample.response[self.sample.learned]
        return self.sampled_from(temperature).gather(-1, ids[:, None]).squeeze(-1)

    def sampled_from(self, temperature: float) -> torch.Tensor:
        """Return log pi [learned, vocabulary], -inf for ids that top_p and top_k cut away."""
        scaled = self.logits / temperature
        if self.sample.kept_ids is not None:
            rows = [
                _only(row, kept_ids)
                for row, kept_ids in zip(scaled, self.sample.kept_ids, strict=True)
            ]
            scaled = torch.stack(rows)
        return scaled.log_softmax(-1)[self.sample.learned]

    def distribution(self, temperature: float) -> torch.Tensor:
        """Return log p [learned, vocabulary] over the whole vocabulary."""
        return (self.logits / temperature).log_softmax(-1)[self.sample.learned]


def _only(row: torch.Tensor, kept_ids: torch.Tensor) -> torch.Tensor:
    """Return logits [vocabulary] with -inf for all but the kept tokens; an empty set keeps all."""
    if not len(kept_ids):
        return row
    return torch.full_like(row, -torch.inf).index_copy(0, kept_ids, row[kept_ids])


class PlainRouter(nn.Module):
    """A layer's router: its own choice or `routes`; gates are the softmax over those experts."""

    def __init__(self, weight: nn.Parameter, experts_per_token: int) -> None:
        super().__init__()
        self.weight = weight
        self.count = experts_per_token
        self.routes: torch.Tensor | None = None
        self.logits = torch.empty(0)
        self.experts = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.logits = hidden.flatten(0, -2) @ self.weight.T
        top_experts = self.logits.topk(self.count, dim=-1).indices
        self.experts = top_experts if self.routes is None else self.routes
        gates = self.logits.gather(-1, self.experts).softmax(-1)
        return self.logits, gates, self.experts


class Model:
    """A model of the run's shape with given weights, in float64."""

    def __init__(self, settings: dict[str, Any], weights: Weights) -> None:
        if settings["family"] != "qwen3_moe":
            raise NotAuditable(f"model.family: {settings['family']} is not audited; qwen3_moe is")
        if settings["precision"] != "fp32":
            raise NotAuditable("model.precision: the audit compares to 1e-5, and bf16 rounds more")
        self.module = Qwen3MoeForCausalLM(_config(settings)).double()
        self.routers = []
        for layer in self.module.model.layers:
            layer.mlp.gate = PlainRouter(layer.mlp.gate.weight, settings["experts_per_token"])
            self.routers.append(layer.mlp.gate)
        self.module.load_state_dict(weights, strict=True)
        self.parameters = dict(self.module.named_parameters())

    def read(self, sample: RecordedSample, replay: bool) -> Read:
        """Run a forward pass over a sample; with `replay`, by the experts that the engine used."""
        if replay and sample.routes is None:
            raise NotAuditable(
                "routing.replay is r3 and the routes were not written: set logging.auditable=true"
            )
        for number, router in enumerate(self.routers):
            routes = sample.routes[:, number] if replay and sample.routes is not None else None
            router.routes = routes
        logits = self.module(input_ids=sample.tokens[None], use_cache=False).logits[0]
        return Read(
            sample,
            logits[sample.first :],
            torch.stack([router.logits for router in self.routers]),
            torch.stack([router.experts for router in self.routers]),
        )

    def weights(self) -> Weights:
        """Return copies of the weights."""
        return {name: weight.detach().clone() for name, weight in self.parameters.items()}


def parent_model(run: RecordedRun, stage: str, of: str) -> Model:
    """Return the model of the stage `of` that `stage` was initialised from.

    Raises:
        NotAuditable: it started from another stage, or the checkpoint is gone.
    """
    shape = run.settings["model"]
    return Model(shape, from_megatron(recorded.tensors(run.parent(stage, of)), shape))


def norm(weights: Weights) -> float:
    """Return the 2-norm of all tensors together."""
    return math.sqrt(sum(float(weight.square().sum()) for weight in weights.values()))


def from_megatron(tensors: Weights, settings: dict[str, Any], prefix: str = "") -> Weights:
    """Return megatron-core's tensors, stacked over layers, under transformers' names and shapes.

    `prefix` selects others of a checkpoint with weights' names; without any the result is empty.
    """
    if not any(name.startswith(prefix) for name in tensors):
        return {}
    weights = {
        "model.embed_tokens.weight": tensors[f"{prefix}embedding.word_embeddings.weight"],
        "model.norm.weight": tensors[f"{prefix}decoder.final_layernorm.weight"],
        "lm_head.weight": tensors[f"{prefix}output_layer.weight"],
    }
    layers, groups = f"{prefix}decoder.layers.", settings["key_value_heads"]
    queries = settings["attention_heads"] // groups
    for layer in range(settings["layers"]):
        for transformers_name, megatron_name in _LAYER.items():
            weights[f"model.layers.{layer}.{transformers_name}"] = tensors[layers + megatron_name][
                layer
            ]
        # Megatron fuses, for every query group, its queries, its key and its value.
        packed = tensors[f"{layers}self_attention.linear_qkv.weight"][layer]
        rows = packed.unflatten(0, (groups, queries + 2, settings["head_dim"]))
        for name, projection in zip("qkv", rows.split([queries, 1, 1], dim=1), strict=True):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = projection.flatten(0, 2)
    return weights


_LAYER = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.experts.linear_fc2.weight",
}


def _config(settings: dict[str, Any]) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=settings["vocabulary_size"],
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["attention_heads"],
        num_key_value_heads=settings["key_value_heads"],
        head_dim=settings["head_dim"],
        num_experts=settings["experts"],
        num_experts_per_tok=settings["experts_per_token"],
        moe_intermediate_size=settings["expert_hidden_size"],
        max_position_embeddings=settings["max_positions"],
        rope_theta=settings["rope_base"],
        rms_norm_eps=settings["norm_epsilon"],
        norm_topk_prob=True,
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",  # the other implementations lack float64
    )
