"""The weights of every family: their names, how they are fused, and how they are split.

Import, export, refits and their checks are derived from this one description of megatron-core's
parameters and the Hugging Face tensors in them. Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel.families import (
    Qwen35MoeArchitecture,
    architecture,
    is_linear,
    routed_layers,
    traits,
)
from parallel.settings import ModelSettings
from parallel.weights.stacks import Member, Stack

# Keys of buckets, the units of loading. A layer's key is its number.
EMBEDDING, HEAD = -1, 1 << 30
VOCABULARY_MULTIPLE = 64  # vLLM rounds the vocabulary up to it before splitting
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Units:
    """The indivisible units of a dimension, with the name of the setting that counts them.

    An engine rounds their count up to a `multiple`; with `repeated`, an engine with more ranks than
    units replicates them.
    """

    name: str
    count: int
    multiple: int = 1
    repeated: bool = False


def padded(units: Units) -> int:
    """Return the number of units once it is rounded up to their multiple."""
    return -(-units.count // units.multiple) * units.multiple


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A Hugging Face tensor of a weight, named in its bucket; `units` count its split dimension.

    Or its rows from `first_row`, where a tensor joins what megatron-core's parameter mixes.
    """

    tensor: str
    shape: tuple[int, ...]
    units: Units | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of megatron-core, named within its bucket, and the tensors fused into it.

    Tensor parallelism splits `dimension`; None replicates the weight on every rank. Along it the
    tensors alternate in `groups`; None means one group per rank. With `experts` there is a weight
    per expert, with {expert} in the names; parameters count experts from 0 on every rank. Those
    that go `with_experts` are whole on every rank of an engine whose ranks share the tokens of a
    layer. A weight that an engine adds `once` to what its ranks sum is only on the first of them.
    A checkpoint may `stack` the tensors of all experts.

    Example: one of each kind of fusion, with hidden size 32, 4 query and 2 key-value heads of 8.

        linear_qkv.weight [64, 32], groups 2: rows 0-15 q_proj's heads 0 and 1, 16-23 k_proj's head
            0, 24-31 v_proj's head 0; 32-63 the same of query heads 2 and 3
        an expert's linear_fc1.weight [32, 32], groups None: on one rank gate_proj, then up_proj; on
            each of two, 8 rows of gate_proj, then 8 of up_proj
        a delta net's in_proj.weight, one group a key head: its rows of in_proj_qkv's queries, keys
            and values (three `FusedTensor` of one tensor), then in_proj_z, _b and _a
        gpt-oss' experts, `stack`: gate_up_proj [4, 32, 32] holds gate_proj and up_proj of 4 experts
        word_embeddings.weight, dimension 0, alone; input_layernorm.weight, dimension None, whole
    """

    parameter: str
    tensors: tuple[FusedTensor, ...]
    dimension: int | None = None
    groups: int | None = None
    experts: int = 0
    with_experts: bool = False
    once: bool = False
    stack: str | None = None


class ModelWeights:
    """Every weight of a model, by bucket.

    Example: queries, keys and values are one parameter, in a group for each key-value head.

        >>> model = ModelSettings(
        ...     vocabulary_size=64, hidden_size=32, layers=2, attention_heads=4, key_value_heads=2,
        ...     head_dim=8, experts=4, experts_per_token=2, expert_hidden_size=16,
        ... )
        >>> description = ModelWeights(model)
        >>> description.buckets == [EMBEDDING, 0, 1, HEAD], description.kind(0)
        (True, 'routed')
        >>> qkv = next(w for w in description.weights["routed"] if "qkv" in w.parameter)
        >>> [fused.shape for fused in qkv.tensors], qkv.groups
        ([(32, 32), (16, 32), (16, 32)], 2)
    """

    def __init__(self, model: ModelSettings) -> None:
        rows = Units("model.vocabulary_size", model.vocabulary_size, multiple=VOCABULARY_MULTIPLE)
        table = (model.vocabulary_size, model.hidden_size)
        names = "embedding.word_embeddings.weight", "model.embed_tokens.weight"
        hidden = model.hidden_size
        norms = (
            _whole("input_layernorm.weight", "input_layernorm.weight", hidden),
            _whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        )
        attention = [*norms, *_attention(model)]
        further = architecture(model)
        dense: Iterator[Weight] = iter(())
        if width := getattr(further, "intermediate_size", None):
            units = Units("model.architecture.intermediate_size", width)
            dense = _perceptron(model, "mlp.", "mlp.", units)
        self.buckets = [EMBEDDING, *range(model.layers), HEAD]
        self._routed = routed_layers(model)
        self._linear = [is_linear(further, layer) for layer in range(model.layers)]
        linear: list[Weight] = []
        if any(self._linear):
            linear = [*norms, *_delta_net(model, further), *_experts(model)]
        # The weights of a bucket of each kind, named within the bucket.
        self.weights: dict[str, tuple[Weight, ...]] = {
            "embedding": (_split(*names, table, 0, rows),),
            "dense": (*attention, *dense),
            "routed": (*attention, *_experts(model)),
            "linear": tuple(linear),
            "head": (
                _whole("decoder.final_layernorm.weight", "model.norm.weight", hidden),
                _split("output_layer.weight", "lm_head.weight", table, 0, rows),
            ),
        }

    def kind(self, key: int) -> str:
        """Return the kind of a bucket; buckets of one kind differ only in their number."""
        if key in (EMBEDDING, HEAD):
            return "embedding" if key == EMBEDDING else "head"
        if self._linear[key]:
            return "linear"
        return "routed" if key in self._routed else "dense"

    def tensors(self, key: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the full names and shapes of a bucket's Hugging Face tensors."""
        prefix, shapes = tensor_prefix(key), dict[str, tuple[int, ...]]()
        for weight in self.weights[self.kind(key)]:
            for expert in range(max(1, weight.experts)):
                for fused in weight.tensors:
                    name, (rows, *columns) = fused.tensor.format(expert=expert), fused.shape
                    # Of several ranges of rows the last ends the tensor.
                    shapes[prefix + name] = (fused.first_row + rows, *columns)
        yield from shapes.items()

    def stored(self, key: int) -> Iterator[tuple[str, tuple[int, ...], Stack | None]]:
        """Yield the names and shapes of a bucket's tensors in a checkpoint, and what they stack."""
        prefix, stacks = tensor_prefix(key), dict[str, Stack]()
        for weight in self.weights[self.kind(key)]:
            if weight.stack is not None:
                names = tuple(prefix + fused.tensor for fused in weight.tensors)
                shape = weight.tensors[0].shape
                stack = Stack(prefix + weight.stack, weight.experts, names, shape)
                every = (name for expert in range(stack.experts) for name in stack.names(expert))
                stacks |= dict.fromkeys(every, stack)
        for name, shape in self.tensors(key):
            if (stacked := stacks.get(name)) is None:
                yield name, shape, None
            elif name == stacked.names(0)[0]:  # in place of all that it stacks
                yield stacked.tensor, stacked.stacked_shape, stacked

    def loaded(self, key: int) -> Iterator[tuple[str, tuple[int, ...], Member | None]]:
        """Yield the names and shapes of what vLLM's loaders take: of stacks, their slices."""
        for name, shape, stack in self.stored(key):
            if stack is None:
                yield name, shape, None
                continue
            for expert in range(stack.experts):
                member = Member(stack, expert)
                yield member.name, stack.member_shape, member


def tensors(model: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Return the shape of every Hugging Face tensor, bucket by bucket."""
    description = ModelWeights(model)
    return dict(item for key in description.buckets for item in description.tensors(key))


def stored_tensors(model: ModelSettings) -> Iterator[tuple[str, tuple[int, ...], Stack | None]]:
    """Yield the name and shape of every tensor of a checkpoint, and what a stacked one stacks."""
    description = ModelWeights(model)
    for key in description.buckets:
        yield from description.stored(key)


def loaded_tensors(model: ModelSettings) -> Iterator[tuple[str, tuple[int, ...], Member | None]]:
    """Yield the name and shape of every tensor that vLLM's loaders take, and of which stack."""
    description = ModelWeights(model)
    for key in description.buckets:
        yield from description.loaded(key)


def bucket_of(tensor: str) -> int:
    """Return the bucket of a Hugging Face tensor; keys are in the model's order."""
    if layer := LAYER.match(tensor):
        return int(layer[1])
    return EMBEDDING if "embed_tokens" in tensor else HEAD


def is_precise(tensor: str) -> bool:
    """Return true if a tensor is fp32 at any precision, as in transformers."""
    return tensor.endswith("e_score_correction_bias")


def is_router(tensor: str) -> bool:
    """Return true if a tensor is a router's weight or its experts' bias."""
    return (
        is_precise(tensor)
        or re.search(r"(mlp|block_sparse_moe)\.gate\.weight$", tensor) is not None
        or ".mlp.router." in tensor
    )


def tensor_prefix(key: int) -> str:
    """Return the prefix of a bucket's Hugging Face tensors."""
    return "" if key in (EMBEDDING, HEAD) else f"model.layers.{key}."


def plain_name(parameter: str, latent: bool) -> str:
    """Return a parameter's name in a model without TransformerEngine.

    TransformerEngine fuses norms into the linear layers after them and all experts into one module.
    The norm before `latent` attention stays separate; the norms inside it are fused instead.
    """
    parameter = re.sub(
        r"experts\.(linear_fc[12])\.(weight|bias)(\d+)",
        r"experts.local_experts.\3.\1.\2",
        parameter,
    )
    # Only of dense layers: the norm before experts stays separate.
    parameter = parameter.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    if latent:
        return re.sub(
            r"linear_(q|kv)_up_proj\.layer_norm_weight", r"\1_layernorm.weight", parameter
        )
    return parameter.replace(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
    )


def _whole(parameter: str, tensor: str, *shape: int) -> Weight:
    return Weight(parameter, (FusedTensor(tensor, shape),))


def _split(
    parameter: str, tensor: str, shape: tuple[int, ...], dimension: int, units: Units
) -> Weight:
    return Weight(parameter, (FusedTensor(tensor, shape, units),), dimension)


def _attention(model: ModelSettings) -> Iterator[Weight]:
    family = traits(model)
    if family.latent_attention:
        yield from _latent_attention(model)
        return
    queries = Units("model.attention_heads", model.attention_heads)
    # vLLM's gpt-oss has no rank without a key-value head of its own.
    groups = Units("model.key_value_heads", model.key_value_heads, repeated=not family.sinks)
    gated = isinstance(architecture(model), Qwen35MoeArchitecture)  # a head's query, then its gate
    widths = {"q": model.head_dim * (2 if gated else 1), "k": model.head_dim, "v": model.head_dim}
    kinds: dict[str, tuple[int, ...]] = {"weight": (model.hidden_size,)}
    if family.sinks or getattr(architecture(model), "attention_bias", False):
        kinds["bias"] = ()
    for kind, row in kinds.items():
        fused = tuple(
            FusedTensor(f"self_attn.{name}_proj.{kind}", (units.count * widths[name], *row), units)
            for name, units in (("q", queries), ("k", groups), ("v", groups))
        )
        yield Weight(f"self_attention.linear_qkv.{kind}", fused, 0, groups=groups.count)
    if family.qk_norm or getattr(architecture(model), "use_qk_norm", False):
        for name in "qk":
            names = f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight"
            yield _whole(*names, model.head_dim)
    yield _projection(model, queries, model.head_dim)
    if family.sinks:
        names = "self_attention.linear_proj.bias", "self_attn.o_proj.bias"
        yield _whole(*names, model.hidden_size)
        names = "self_attention.core_attention.softmax_offset", "self_attn.sinks"
        yield _split(*names, (model.attention_heads,), 0, queries)


def _latent_attention(model: ModelSettings) -> Iterator[Weight]:
    further = architecture(model)
    heads = Units("model.attention_heads", model.attention_heads)
    ours, theirs = "self_attention.linear_", "self_attn."
    rank, read = further.q_lora_rank, (further.qk_nope_head_dim + model.head_dim) * heads.count
    if rank is None:
        shape = (read, model.hidden_size)
        yield _split(f"{ours}q_proj.weight", f"{theirs}q_proj.weight", shape, 0, heads)
    else:
        names = f"{ours}q_down_proj.weight", f"{theirs}q_a_proj.weight"
        yield _whole(*names, rank, model.hidden_size)
        yield _whole("self_attention.q_layernorm.weight", f"{theirs}q_a_layernorm.weight", rank)
        yield _split(f"{ours}q_up_proj.weight", f"{theirs}q_b_proj.weight", (read, rank), 0, heads)
    rank = further.kv_lora_rank
    names = f"{ours}kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight"
    yield _whole(*names, rank + model.head_dim, model.hidden_size)
    yield _whole("self_attention.kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight", rank)
    shape = ((further.qk_nope_head_dim + further.v_head_dim) * heads.count, rank)
    yield _split(f"{ours}kv_up_proj.weight", f"{theirs}kv_b_proj.weight", shape, 0, heads)
    yield _projection(model, heads, further.v_head_dim)


def _delta_net(model: ModelSettings, further: Qwen35MoeArchitecture) -> Iterator[Weight]:
    """Yield a gated delta net's weights; rows go by key head, so that ranks take whole ones."""
    keys = Units("model.architecture.linear_num_key_heads", further.linear_num_key_heads)
    values = Units("model.architecture.linear_num_value_heads", further.linear_num_value_heads)
    ours, theirs = "self_attention.", "linear_attn."
    wide = values.count * further.linear_value_head_dim
    sections = [
        (keys, keys.count * further.linear_key_head_dim),
        (keys, keys.count * further.linear_key_head_dim),
        (values, wide),
    ]

    def joined(tensor: str, *columns: int) -> Iterator[FusedTensor]:
        first_row = 0
        for units, rows in sections:
            yield FusedTensor(theirs + tensor, (rows, *columns), units, first_row)
            first_row += rows

    inputs = [*joined("in_proj_qkv.weight", model.hidden_size)]
    for name, rows in (("z", wide), ("b", values.count), ("a", values.count)):
        inputs.append(
            FusedTensor(f"{theirs}in_proj_{name}.weight", (rows, model.hidden_size), values)
        )
    yield Weight(f"{ours}in_proj.weight", tuple(inputs), 0, groups=keys.count)
    filters = tuple(joined("conv1d.weight", 1, further.linear_conv_kernel_dim))
    yield Weight(f"{ours}conv_weight", filters, 0, groups=keys.count)
    for name in ("A_log", "dt_bias"):
        yield _split(ours + name, theirs + name, (values.count,), 0, values)
    yield _whole(f"{ours}out_norm.weight", f"{theirs}norm.weight", further.linear_value_head_dim)
    shape = (model.hidden_size, wide)
    yield _split(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", shape, 1, values)


def _projection(model: ModelSettings, heads: Units, head_dim: int) -> Weight:
    names = "self_attention.linear_proj.weight", "self_attn.o_proj.weight"
    return _split(*names, (model.hidden_size, heads.count * head_dim), 1, heads)


def _experts(model: ModelSettings) -> Iterator[Weight]:
    if traits(model).biased_experts:
        yield from _biased_experts(model)
        return
    further, mixtral = architecture(model), model.family == "mixtral"
    theirs = "block_sparse_moe." if mixtral else "mlp."
    names = f"{theirs}gate.weight", model.experts, model.hidden_size
    yield _whole("mlp.router.weight", *names)
    if traits(model).correction_bias:
        bias = "mlp.gate.e_score_correction_bias"
        yield _whole("mlp.router.expert_bias", bias, model.experts)
        width = further.n_shared_experts * model.expert_hidden_size
        units = Units("model.architecture.n_shared_experts x model.expert_hidden_size", width)
        # In vLLM 0.32 DeepSeek-V3's take their rank's part of the tokens, as the experts do, and
        # GLM-4's a slice of all tokens.
        together = model.family == "deepseek_v3"
        for weight in _perceptron(model, "mlp.shared_experts.", "mlp.shared_experts.", units):
            yield replace(weight, with_experts=together)
    if isinstance(further, Qwen35MoeArchitecture):
        width = further.shared_expert_intermediate_size
        units = Units("model.architecture.shared_expert_intermediate_size", width)
        for weight in _perceptron(model, "mlp.shared_experts.", "mlp.shared_expert.", units):
            yield replace(weight, with_experts=True)
        gate = "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"
        yield _whole(*gate, 1, model.hidden_size)
    units = Units("model.expert_hidden_size", model.expert_hidden_size)
    projections = ("w1", "w3", "w2") if mixtral else PROJECTIONS
    here, there = "mlp.experts.local_experts.{expert}.", f"{theirs}experts.{{expert}}."
    yield from _perceptron(model, here, there, units, projections, model.experts)


def _biased_experts(model: ModelSettings) -> Iterator[Weight]:
    """Yield gpt-oss' router and its experts, which a checkpoint stacks."""
    yield _whole("mlp.router.weight", "mlp.router.weight", model.experts, model.hidden_size)
    yield _whole("mlp.router.bias", "mlp.router.bias", model.experts)
    units = Units("model.expert_hidden_size", model.expert_hidden_size)
    ours, theirs = "mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}."
    joint, last = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    gate_up, down = _perceptron(model, ours, theirs, units, experts=model.experts)
    yield replace(gate_up, stack=joint)
    biases = tuple(
        FusedTensor(f"{theirs}{name}.bias", (units.count,), units)
        for name in ("gate_proj", "up_proj")
    )
    fused = Weight(f"{ours}linear_fc1.bias", biases, 0, experts=model.experts)
    yield replace(fused, stack=f"{joint}_bias")
    yield replace(down, stack=last)
    whole = _whole(f"{ours}linear_fc2.bias", f"{theirs}down_proj.bias", model.hidden_size)
    yield replace(whole, experts=model.experts, once=True, stack=f"{last}_bias")


def _perceptron(
    model: ModelSettings,
    ours: str,
    theirs: str,
    units: Units,
    names: tuple[str, str, str] = PROJECTIONS,
    experts: int = 0,
) -> Iterator[Weight]:
    """Yield the fused gate and up projection, and the down projection."""
    wide, narrow = (units.count, model.hidden_size), (model.hidden_size, units.count)
    *fused, down = (f"{theirs}{name}.weight" for name in names)
    gate_up = tuple(FusedTensor(tensor, wide, units) for tensor in fused)
    yield Weight(f"{ours}linear_fc1.weight", gate_up, 0, experts=experts)
    yield Weight(
        f"{ours}linear_fc2.weight", (FusedTensor(down, narrow, units),), 1, experts=experts
    )
