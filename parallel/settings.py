"""What a person may set about the machine: model, layout, optimizer, engine. Never imports torch.

Settings live with the floor that reads them; `pipeline` imports them from here to validate a
configuration on a login node that may have no torch at all.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from parallel.files import CHARACTERS
from parallel.network import LOOPBACK

# Every integer has an upper bound: a slip of a digit is an error at once, and not a loop without
# end or a full memory. The bounds are far above any model or machine there is.
MOST = 1_000_000
Count = Annotated[int, Field(gt=0, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Experts = Annotated[int, Field(gt=0, le=10_000)]
Tokens = Annotated[int, Field(gt=0, le=100_000_000)]
Mebibytes = Annotated[int, Field(gt=0, le=1 << 20)]
# So many of the sizes that would fit are shown in a message.
SHOWN_SIZES = 20
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Base of every settings block: frozen, and an unknown key is an error.

    `renamed` maps a key that there was to what is written now. A field whose key is a word of
    Python has that key for its alias, which is read and written.
    """

    renamed: ClassVar[dict[str, str]] = {}
    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)


# Of the tokenizer of single characters.
PAD_TOKEN, END_TOKEN, TOKENIZER_SIZE = 0, 1, 80


class InitializationSettings(Settings):
    """Standard deviations of a random start; linear layers use hidden_size ** -0.5."""

    embedding_std: Annotated[float, Field(gt=0)] = Field(
        default=0.5, description="of the embedding's weights"
    )
    router_std: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="of the routers' weights"
    )


class ModelSettings(Settings):
    """A mixture-of-experts decoder of one family, in Hugging Face's terms."""

    family: Literal["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"] = Field(
        default="qwen3_moe",
        description="the architecture; import, export and weight sync know its names",
    )
    tokenizer: str = Field(
        default=CHARACTERS,
        description="characters, or the folder of a Hugging Face tokenizer",
    )
    vocabulary_size: Count = Field(
        description="rows of the embedding; at least the tokenizer's ids"
    )
    hidden_size: Count = Field(description="width of the residual stream")
    layers: Annotated[int, Field(gt=0, le=2000)] = Field(description="number of decoder layers")
    attention_heads: Count = Field(description="query heads")
    key_value_heads: Count = Field(description="key-value heads; they divide attention_heads")
    head_dim: Count = Field(description="width of a head; even")
    experts: Experts = Field(description="experts per routed layer")
    experts_per_token: Experts = Field(description="experts that a token is routed to")
    expert_hidden_size: Count = Field(description="width of an expert's MLP")
    max_positions: Tokens = Field(default=256, description="longest sequence, in tokens")
    rope_base: Annotated[float, Field(gt=0)] = Field(
        default=10000.0, description="base of the rotary embeddings"
    )
    norm_epsilon: Annotated[float, Field(gt=0)] = Field(
        default=1e-6, description="epsilon of the norms"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="of weights and activations; optimizer, gradients and routing stay fp32",
    )
    architecture: dict[str, Any] = Field(
        default_factory=dict,
        description="further keys of the family's config.json, as Hugging Face calls them",
    )
    initialization: InitializationSettings = Field(
        default=InitializationSettings(), description="of a random start"
    )
    initial_weights: Path | None = Field(
        default=None, description="Hugging Face checkpoint to start from; null starts at random"
    )


class LayoutSettings(Settings):
    """How the ranks share the policy, in Megatron's terms. What is left over is data parallel.

    Dense layers are split over tensor x context x pipeline ranks, and experts over expert_tensor x
    expert x pipeline ranks; both must divide `ranks`. Sequence parallelism follows `tensor`, since
    Megatron demands it of mixture-of-experts models.
    """

    ranks: Count = Field(default=1, description="processes of a stage")
    tensor: Count = Field(default=1, description="tensor parallelism (TP)")
    pipeline: Count = Field(default=1, description="pipeline parallelism (PP)")
    virtual_pipeline: Count = Field(
        default=1, description="parts of the model a pipeline rank holds; more shrink the bubble"
    )
    context: Count = Field(
        default=1, description="context parallelism (CP): ranks that share every sequence"
    )
    expert: Count = Field(default=1, description="expert parallelism (EP)")
    expert_tensor: Count = Field(
        default=1, description="tensor parallelism of the experts alone (ETP)"
    )
    distributed_optimizer: bool = Field(
        default=True, description="split Adam's state over the data-parallel ranks"
    )
    recompute: Literal["none", "attention", "full"] = Field(
        default="none", description="which activations are computed again instead of kept"
    )

    @property
    def data(self) -> int:
        """Data-parallel ranks: each trains on its own share of the samples."""
        return self.ranks // (self.tensor * self.pipeline * self.context)


class RoutingLossSettings(Settings):
    """What keeps the routers stable (section 6 of the algorithms); 0 leaves a loss out."""

    load_balance: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="coefficient of the load-balancing loss"
    )
    z_loss: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="coefficient of the routers' z-loss"
    )


class OptimizerSettings(Settings):
    """One optimizer step: gradient clipping, update rule, learning-rate schedule."""

    algorithm: Literal["adam", "sgd"] = Field(default="adam", description="the update rule")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        description="highest learning rate of the schedule"
    )
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="Adam's decay rates of the first and second moment"
    )
    momentum: Fraction = Field(default=0.9, description="SGD's")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="decoupled weight decay"
    )
    warmup_steps: Natural = Field(default=0, description="steps of linear warm-up from 0")
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="schedule after the warm-up"
    )
    final_ratio: Fraction = Field(
        default=0.0, description="learning rate of the last step, as a share of the highest"
    )
    clip_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="largest norm of a step's whole gradient"
    )


class EngineSettings(Settings):
    """The rollout engines: how many, where, their limits, and how closely they match the policy."""

    count: Annotated[int, Field(gt=0, le=10_000)] = Field(
        default=1, description="engines side by side, each with a whole model"
    )
    tensor: Count = Field(default=1, description="tensor-parallel ranks of each engine")
    placement: Literal["shared", "own"] = Field(
        default="shared",
        description="shared: on the trainer's devices, in turn; own: on devices (CPU: cores) of "
        "their own",
    )
    max_model_tokens: Tokens = Field(default=64, description="prompt and response together")
    max_sequences: Count = Field(default=256, description="of each engine at once")
    kv_cache_mebibytes: Mebibytes | None = Field(
        default=None,
        description="of each engine rank; null is enough for max_sequences of max_model_tokens",
    )
    start_timeout_seconds: Count = Field(
        default=300, description="for an engine to report that it is ready"
    )
    request_timeout_seconds: Count = Field(default=600, description="of a refit as a whole")
    hang_timeout_seconds: Annotated[int, Field(ge=5, le=MOST)] = Field(
        default=120,  # several beats of an engine
        description="an engine that was asked for something and is silent so long is restarted",
    )
    max_restarts: Natural = Field(
        default=3, description="of each engine within one attempt at a stage, which then fails"
    )
    transport: Literal["auto", "shared_memory", "messages"] = Field(
        default="auto",
        description="how the bytes of a refit travel; messages: gloo on CPU, NCCL on GPU",
    )
    check_refit: bool = Field(
        default=False,
        description="compare every engine tensor with the trainer's, by checksum, after each refit",
    )
    max_logprob_difference: Annotated[float, Field(gt=0)] = Field(
        default=1e-4,
        description="largest |log mu - log pi| at the first batch after a refit, in nats",
    )


class EngineJob(Settings):
    """What an engine's process reads; it writes the file `address` when it is ready."""

    model: ModelSettings
    engine: EngineSettings
    index: int
    address: Path
    interface: str = Field(default=LOOPBACK, description="where it listens: parallel.network")
    seed: int


def divisors(count: int) -> list[int]:
    """Return the divisors of a positive number in ascending order, in O(sqrt(count))."""
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return small + [count // size for size in reversed(small) if size * size != count]


def one_of(sizes: list[int]) -> str:
    """Return the end of a message that lists the sizes to choose from, the smallest of many."""
    more = len(sizes) - SHOWN_SIZES
    larger = f" or of {more} larger ones" if more > 0 else ""
    return f"use one of {sizes[:SHOWN_SIZES]}{larger}"


def layout_violations(model: ModelSettings, layout: LayoutSettings) -> list[tuple[str, str]]:
    """Every reason the layout cannot hold the model: (dotted key, message with the mend)."""
    found = []

    def divides(key: str, size: int, whole: str, count: int) -> None:
        if count % size:
            use = one_of(divisors(count))
            found.append((key, f"{size} does not divide {whole} = {count}; {use}"))

    divides("layout.expert", layout.expert, "model.experts", model.experts)
    divides("layout.tensor", layout.tensor, "model.key_value_heads", model.key_value_heads)
    divides("layout.tensor", layout.tensor, "model.vocabulary_size", model.vocabulary_size)
    divides(
        "layout.expert_tensor",
        layout.expert_tensor,
        "model.expert_hidden_size",
        model.expert_hidden_size,
    )
    divides(
        "model.key_value_heads",
        model.key_value_heads,
        "model.attention_heads",
        model.attention_heads,
    )
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        found.append(("layout.virtual_pipeline", "needs layout.pipeline of 2 or more"))
    else:
        parts = layout.pipeline * layout.virtual_pipeline
        if layout.virtual_pipeline == 1:
            divides("layout.pipeline", parts, "model.layers", model.layers)
        elif model.layers % parts:
            found.append(
                (
                    "layout.virtual_pipeline",
                    f"pipeline {layout.pipeline} x virtual_pipeline {layout.virtual_pipeline} does"
                    f" not divide model.layers = {model.layers}",
                )
            )
    for names in (("tensor", "pipeline", "context"), ("expert_tensor", "expert", "pipeline")):
        sizes = [getattr(layout, name) for name in names]
        product = sizes[0] * sizes[1] * sizes[2]
        if layout.ranks % product:
            asked = [(n, size) for n, size in zip(names, sizes, strict=True) if size > 1]
            shown = " x ".join(f"{name} {size}" for name, size in asked)
            found.append(
                (f"layout.{asked[-1][0]}", f"{shown} does not divide layout.ranks = {layout.ranks}")
            )
    if model.head_dim % 2:
        found.append(("model.head_dim", f"{model.head_dim} is odd; rotary positions turn pairs"))
    if model.experts_per_token > model.experts:
        found.append(
            (
                "model.experts_per_token",
                f"{model.experts_per_token} is more than model.experts = {model.experts}",
            )
        )
    return found
