"""The settings of model, layout, optimizer and engine; `parallel.layout_rules` has the rules.

This module never imports torch: `pipeline` validates a configuration on login nodes without it.
"""

from __future__ import annotations

from datetime import date
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from parallel.machine.network import LOOPBACK

# Every integer has an upper bound, far above any model or machine: a mistyped digit is an error at
# once, not an endless loop or a full memory.
MOST = 1_000_000
Count = Annotated[int, Field(gt=0, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Experts = Annotated[int, Field(gt=0, le=10_000)]
Tokens = Annotated[int, Field(gt=0, le=100_000_000)]
Mebibytes = Annotated[int, Field(gt=0, le=1 << 20)]
# `model.tokenizer: characters` names no directory but the built-in tokenizer of single characters
# (`stages.data.tokenizer`).
CHARACTERS = "characters"
# On GPUs hundreds of processes import torch and vLLM from one file system, kernels are compiled and
# graphs are captured before an engine is ready.
START_SECONDS, GPU_START_SECONDS = 300, 1800
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


# megatron-core's names of what it can recompute alone. Without core_attn, which is
# `recompute: attention`.
RecomputeModule = Literal["layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class Settings(BaseModel):
    """The base class of settings blocks: frozen, and an unknown key is an error.

    `renamed` maps former keys to their new names. A field whose key is a Python keyword has the key
    as its alias, for reading and writing.
    """

    renamed: ClassVar[dict[str, str]] = {}
    # Keys of earlier versions that the class still reads, which an override may state too.
    former: ClassVar[frozenset[str]] = frozenset()
    # A validator is built when it is first used: of most blocks never, by one command.
    model_config = ConfigDict(
        frozen=True, extra="forbid", serialize_by_alias=True, defer_build=True
    )


# Of the tokenizer `characters`.
PAD_TOKEN, END_TOKEN, TOKENIZER_SIZE = 0, 1, 80


class InitializationSettings(Settings):
    """Standard deviations of random initial weights; linear layers use hidden_size ** -0.5."""

    embedding_std: Positive = Field(0.5, description="of the embedding's weights")
    router_std: Positive = Field(0.02, description="of the routers' weights")


class ModelSettings(Settings):
    """The architecture of a mixture-of-experts decoder, by Braid's names.

    docs/how-to/models.md maps Hugging Face's.
    """

    family: Literal[
        "qwen3_moe",
        "mixtral",
        "deepseek_v3",
        "glm4_moe",
        "glm4_moe_lite",
        "qwen3_5_moe_text",
        "gpt_oss",
    ] = Field(
        "qwen3_moe",
        description="the architecture, with its tensor names in import, export and weight sync",
    )
    tokenizer: str = Field(
        CHARACTERS, description="characters, or the directory of a Hugging Face tokenizer"
    )
    end_tokens: Annotated[tuple[Natural | str, ...], Field(min_length=1)] | None = Field(
        None,
        description="tokens that end a response, as text or ids, the main one first; null: the "
        "tokenizer's eos_token, and eos_token_id of the checkpoint's generation_config.json",
    )
    chat_template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="further variables of the tokenizer's chat template, such as enable_thinking:"
        " false",
    )
    chat_template_date: date | None = Field(
        None,
        description="the day that a chat template with strftime_now sees, YYYY-MM-DD; null: the day"
        " on which the run starts, which its run.yaml records",
    )
    vocabulary_size: Count = Field(description="embedding rows; at least the tokenizer's token ids")
    hidden_size: Count = Field(description="width of the residual stream")
    layers: Annotated[int, Field(gt=0, le=2000)] = Field(description="number of decoder layers")
    attention_heads: Count = Field(description="query heads")
    key_value_heads: Count = Field(description="key-value heads; must divide attention_heads")
    head_dim: Count = Field(description="width of a head; must be even")
    experts: Experts = Field(description="experts per routed layer")
    experts_per_token: Experts = Field(description="experts that a token is routed to")
    expert_hidden_size: Count = Field(description="width of an expert's MLP")
    max_positions: Tokens = Field(256, description="longest sequence, in tokens")
    rope_base: Positive = Field(10000.0, description="base of the rotary embeddings")
    norm_epsilon: Positive = Field(1e-6, description="epsilon of the norms")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="of weights and activations; optimizer, gradients and routing are fp32"
    )
    head_precision: Literal["model", "fp32"] = Field(
        "model",
        description="of the logits in trainer and engine; fp32: the output head's sums are not"
        " rounded to bf16, which lowers the mismatch and doubles the logits' memory",
    )
    architecture: dict[str, Any] = Field(
        default_factory=dict, description="further keys of the family's Hugging Face config.json"
    )
    initialization: InitializationSettings = Field(
        InitializationSettings(), description="of random initial weights"
    )
    initial_weights: Path | None = Field(
        None, description="directory of a Hugging Face checkpoint; null initializes at random"
    )

    @property
    def precise_head(self) -> bool:
        """True where the logits have more digits than the weights."""
        return self.head_precision == "fp32" and self.precision == "bf16"

    @property
    def tokenizer_keys(self) -> dict[str, Any]:
        """The tokenizer and the variables of its chat template, as JSON."""
        keys = {"tokenizer", "chat_template_arguments", "chat_template_date"}
        return self.model_dump(mode="json", include=keys)


class LayoutSettings(Settings):
    """The parallel layout of the policy in Megatron's terms; the remaining factor is data parallel.

    Dense layers are split over tensor x context x pipeline ranks, and experts over expert_tensor x
    expert x pipeline ranks; both must divide `ranks`. Sequence parallelism is on whenever
    tensor > 1: Megatron requires it for mixture-of-experts models.
    """

    ranks: Count = Field(1, description="processes of a stage")
    tensor: Count = Field(1, description="tensor parallelism (TP)")
    pipeline: Count = Field(1, description="pipeline parallelism (PP)")
    virtual_pipeline: Count = Field(
        1, description="model chunks per pipeline rank; more shrink the pipeline bubble"
    )
    first_stage_layers: Count | None = Field(
        None,
        description="layers of the first pipeline stage; null: as many as the stages in between",
    )
    last_stage_layers: Count | None = Field(
        None, description="layers of the last pipeline stage; null: as many as the stages before it"
    )
    context: Count = Field(1, description="context parallelism (CP): ranks sharing each sequence")
    expert: Count = Field(1, description="expert parallelism (EP)")
    expert_tensor: Count = Field(1, description="tensor parallelism of the experts (ETP)")
    dispatcher: Literal["auto", "alltoall", "flex"] = Field(
        "auto",
        description="of tokens to experts; flex: DeepEP's kernels; auto: flex where DeepEP is "
        "installed and experts are spread over nodes",
    )
    distributed_optimizer: bool = Field(
        True, description="split Adam's state over the data-parallel ranks"
    )
    recompute: Literal["none", "attention", "selective", "full"] = Field(
        "none",
        description="activations that are recomputed in the backward pass; selective: of "
        "recompute_modules; attention: of the attention, which a fused one does by itself",
    )
    recompute_modules: tuple[RecomputeModule, ...] = Field(
        (), description="with recompute: selective, megatron-core's names of the modules"
    )

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return self.ranks // (self.tensor * self.pipeline * self.context)


class RoutingLossSettings(Settings):
    """The auxiliary losses of the routers; a coefficient of 0 disables a loss."""

    load_balance: NonNegative = Field(0.0, description="coefficient of the load-balancing loss")
    z_loss: NonNegative = Field(0.0, description="coefficient of the router z-loss")


class OptimizerSettings(Settings):
    """The optimizer: gradient clipping, update rule and learning-rate schedule."""

    algorithm: Literal["adam", "sgd"] = Field("adam", description="the update rule")
    learning_rate: Positive = Field(description="peak learning rate of the schedule")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.95), description="Adam's decay rates of the first and second moments"
    )
    momentum: Fraction = Field(0.9, description="momentum of SGD")
    weight_decay: NonNegative = Field(0.0, description="decoupled weight decay")
    warmup_steps: Natural = Field(0, description="optimizer steps of linear warm-up from 0")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="schedule after the warm-up"
    )
    final_ratio: Fraction = Field(0.0, description="final learning rate as a fraction of the peak")
    clip_norm: Positive = Field(1.0, description="maximum norm of a step's whole gradient")
    precision_aware: bool = Field(
        False,
        description="keep Adam's moments in bf16 and the master weights in fp32: 8 bytes per "
        "parameter instead of 12; needs TransformerEngine, and betas[1] of at most 0.98",
    )
    cpu_offload: Fraction = Field(
        0.0,
        description="share of Adam's moments and fp32 master weights in host memory, where the GPU "
        "updates them over the bus; changes no bit",
    )


class EngineSettings(Settings):
    """The rollout engines: their number, placement, limits, and tolerance to the policy."""

    count: Annotated[int, Field(gt=0, le=10_000)] = Field(
        1, description="engines in parallel, each with a whole model"
    )
    tensor: Count = Field(1, description="tensor-parallel ranks of each engine, or of its members")
    data: Count = Field(
        1,
        description="members of each engine, for attention with data parallelism: each has `tensor`"
        " ranks, requests and a KV cache of its own; all ranks of the engine share the experts",
    )
    placement: Literal["shared", "own"] = Field(
        "shared",
        description="shared: alternate with the trainer on its devices; own: dedicated devices "
        "(CPU: cores)",
    )
    expert_parallel: bool = Field(
        False, description="each engine rank has whole experts, not a slice of every expert"
    )
    weights: Literal["model", "fp8"] = Field(
        "model",
        description="precision of the engine's linear layers and experts; fp8: quantized after "
        "each weight sync (CUDA only)",
    )
    max_model_tokens: Tokens = Field(64, description="maximum of prompt and response together")
    max_sequences: Count = Field(
        256, description="maximum sequences in flight per engine, or per member of one"
    )
    kv_cache_mebibytes: Mebibytes | None = Field(
        None, description="per engine rank; null fits max_sequences of max_model_tokens"
    )
    start_timeout_seconds: Count | None = Field(
        None, description="until an engine must report ready; null is 300 on CPUs, 1800 on GPUs"
    )
    request_timeout_seconds: Count = Field(600, description="of a whole refit")
    hang_timeout_seconds: Annotated[int, Field(ge=5, le=MOST)] = Field(
        120,  # several of an engine's heartbeats
        description="an engine without a heartbeat for this long during a request is restarted",
    )
    max_restarts: Natural = Field(3, description="per engine and attempt; beyond, the stage fails")
    transport: Literal["auto", "shared_memory", "messages"] = Field(
        "auto",
        description="of a refit's bytes; auto maps memory on one host and sends messages between"
        " hosts (gloo on CPU, NCCL on GPU); shared_memory never sends, messages never maps",
    )
    check_refit: bool = Field(
        False,
        description="compare every engine tensor's checksum with the trainer's after each refit",
    )
    max_logprob_difference: Positive | None = Field(
        None,
        description="maximum |log mu - log pi| of a token of the first batch after a refit, in"
        " nats; null: 1e-4 in fp32, only reported in bf16",
    )
    max_mean_logprob_difference: Positive | None = Field(
        None,
        description="maximum of the mean |log mu - log pi| of that batch, in nats; null: 0.05 in"
        " bf16, only reported in fp32",
    )
    max_high_ratio: Fraction | None = Field(
        None,
        description="maximum share of that batch's tokens with |log mu - log pi| above ln 2; null:"
        " 1e-2 in bf16, only reported in fp32",
    )

    @property
    def ranks(self) -> int:
        """The ranks of each engine, and so its GPUs."""
        return self.tensor * self.data

    @property
    def members(self) -> list[str]:
        """The names of all engines' members, each a process; of an engine's one, its own."""
        numbers = product(range(self.count), range(self.data))
        return [
            f"{engine}.{member}" if self.data > 1 else f"{engine}" for engine, member in numbers
        ]

    @property
    def start_seconds(self) -> int:
        """The start timeout; the launcher has replaced null where there are GPUs."""
        return self.start_timeout_seconds or START_SECONDS

    def started_on(self, gpus: bool) -> EngineSettings:
        """Return these settings with the start timeout of the device that engines run on."""
        seconds = self.start_timeout_seconds or (GPU_START_SECONDS if gpus else START_SECONDS)
        return self.model_copy(update={"start_timeout_seconds": seconds})

    def sleeps_on(self, device_type: str) -> bool:
        """Return whether engines and trainer take turns on each device: CUDA's, where shared.

        Then an engine sleeps while the trainer computes, whose model is on the host while engines
        sample. On a CPU both stay in memory.
        """
        return device_type == "cuda" and self.placement == "shared"


class EngineJob(Settings):
    """The job of an engine process, which writes the file `address` when it is ready.

    An engine of several `nodes` is a process on each of them, with the same job. Of an engine with
    `engine.data` members each has a job, and they meet by the file `meeting`.
    """

    model: ModelSettings
    engine: EngineSettings
    index: int
    member: int = 0
    address: Path
    meeting: Path | None = Field(None, description="where the first of several members publishes")
    interface: str = Field(LOOPBACK, description="interface to listen on, see machine/network.py")
    nodes: Count = Field(1, description="over which it spreads; each runs one process of this job")
    seed: int
    gpu_memory_bytes: int | None = Field(None, description="per GPU; null: what is free")
    deterministic: bool = Field(False, description="the run's; batch-invariant kernels on GPUs")
    sampling_mask: bool = Field(
        False, description="whether some sampling of the run keeps a part of the vocabulary"
    )
