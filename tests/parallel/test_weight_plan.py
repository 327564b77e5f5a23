"""The arithmetic of a refit: which rank holds, needs and sends each slice."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import pytest

from parallel.engine_rules import engine_violations
from parallel.families import FAMILIES
from parallel.hugging_face.config import expected_tensors, hugging_face_config, settings_of
from parallel.machine.device import DTYPES
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights import planner
from parallel.weights.boxes import Box, intersect
from parallel.weights.holdings import Layout, held, owners
from parallel.weights.names import (
    EMBEDDING,
    HEAD,
    bucket_of,
    is_precise,
    loaded_tensors,
    plain_name,
    stored_tensors,
    tensors,
)
from parallel.weights.needs import needed
from parallel.weights.planner import Bucket, EngineSizes, Hosts, OutgoingMessage, Plan
from parallel.weights.stacks import Stack
from tests.layouts.real_models import QWEN3_30B
from tests.tiers import tiered

FURTHER: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [{}],
    "mixtral": [{}],
    "glm4_moe": [{}, {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2}],
    "deepseek_v3": [{"q_lora_rank": 24}, {"q_lora_rank": None}],
    "glm4_moe_lite": [{"q_lora_rank": 24}],
    "gpt_oss": [{}],
    "qwen3_5_moe_text": [{"full_attention_interval": 3}, {"linear_num_value_heads": 8}],
}
VARIANTS = [(family, number) for family in FAMILIES for number in range(len(FURTHER[family]))]
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "v_head_dim": 10}
DELTA_NET = {
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


def model(family: str, variant: int = 0, **changes: Any) -> ModelSettings:
    """Return a tiny model of 5 layers (no pipeline divides them), 1 dense if the family has any."""
    further = dict(FURTHER[family][variant])
    if FAMILIES[family].dense_layers:
        further |= {"first_k_dense_replace": 1, "intermediate_size": 48}
    if FAMILIES[family].latent_attention:
        further |= LATENT
    if family == "qwen3_5_moe_text":
        further = {**DELTA_NET, **further}
    settings = {
        "family": family,
        "vocabulary_size": 80,
        "hidden_size": 12,
        "layers": 5,
        "attention_heads": 8,
        "key_value_heads": 8 if FAMILIES[family].latent_attention or family == "gpt_oss" else 4,
        "head_dim": 4,
        "experts": 8,
        "experts_per_token": 4,
        "expert_hidden_size": 16,
        "architecture": further,
        "norm_epsilon": 1e-5 if family == "gpt_oss" else 1e-6,
    }
    return ModelSettings.model_validate({**settings, **changes})


def layouts(seed: int, family: str = "") -> tuple[LayoutSettings, EngineSizes]:
    """Return a random layout of up to 32 ranks, and engines of up to 8 ranks each.

    No rank has a part of an expert of gpt_oss, whose biases megatron-core does not split.
    """
    draw = random.Random(seed)
    pipeline, replicas = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    tensor, context, expert, expert_tensor = (draw.choice([1, 1, 2, 4]) for _ in range(4))
    if family == "gpt_oss":
        expert_tensor = 1
    dense, experts = tensor * context, expert * expert_tensor
    layout = LayoutSettings(
        ranks=pipeline * max(dense, experts) * replicas,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        virtual_pipeline=draw.choice([1, 2]) if pipeline > 1 else 1,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    if pipeline > 1 and layout.virtual_pipeline == 1 and draw.random() < 0.6:
        # Of the 5 layers of `model`: 1 and 4, or 3 and 1 and 1.
        layout = layout.model_copy(update={"first_stage_layers": 1 if pipeline == 2 else 3})
    sizes = draw.choices([1, 2, 4, 8], k=draw.choice([1, 2, 5]))
    forwarding, whole = draw.random() < 0.8, draw.random() < 0.5
    hosts = None
    if draw.random() < 0.5:  # some engine ranks map what trainer ranks of their host hold
        count = draw.choice([1, 2, 3])
        hosts = Hosts(
            tuple(rank * count // layout.ranks for rank in range(layout.ranks)),
            tuple(draw.randrange(-1, count) for _ in range(sum(sizes))),
        )
    return layout, EngineSizes(tuple(sizes), forwarding, expert_parallel=whole, hosts=hosts)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def numbered(settings: ModelSettings) -> dict[str, np.ndarray]:
    """Return every tensor of the model; all elements differ."""
    found, count = {}, 0
    for name, shape in tensors(settings).items():
        found[name] = np.arange(count, count + prod(shape)).reshape(shape)
        count += prod(shape)
    return found


Parameters = dict[tuple[int, str], np.ndarray]


def parameters(
    settings: ModelSettings, layout: LayoutSettings, rank: int, whole: dict[str, np.ndarray]
) -> Parameters:
    """Return a rank's parameters, assembled from pieces that cover every element."""
    pieces = held(settings, layout, rank)
    shapes: dict[tuple[int, str], tuple[int, ...]] = {}
    for piece in pieces:
        end = tuple(a + b for a, b in zip(piece.parameter_offset, piece.box[1], strict=True))
        where = piece.chunk, piece.parameter
        shapes[where] = tuple(map(max, end, shapes.get(where, end)))
    found = {where: np.full(shape, -1) for where, shape in shapes.items()}
    for piece in pieces:
        target = found[piece.chunk, piece.parameter][at((piece.parameter_offset, piece.box[1]))]
        assert (target == -1).all()
        target[...] = whole[piece.tensor][at(piece.box)]
    assert all((parameter >= 0).all() for parameter in found.values())
    return found


class Execution:
    """An execution of all ranks, in which every message waits for both of its ends.

    Each rank processes its list in order; a deadlock would end the execution early."""

    def __init__(self, settings: ModelSettings, layout: LayoutSettings, plan: Plan) -> None:
        engine_ranks = range(sum(plan.fleet.engines))
        self.whole = numbered(settings)
        self.held = [parameters(settings, layout, rank, self.whole) for rank in range(layout.ranks)]
        self.plan = plan
        self.sends: list[list[OutgoingMessage]] = []
        self.mapped: dict[tuple[int, int, int], OutgoingMessage] = {}
        for rank in range(layout.ranks):
            self.sends.append([])
            for message in plan.send(rank):
                if plan.fleet.mapped(rank, message.engine_rank):
                    self.mapped[rank, message.engine_rank, message.bucket] = message
                else:
                    self.sends[rank].append(message)
        self.buckets = [plan.receive(rank) for rank in engine_ranks]
        # Of each engine rank: the contents of its boxes.
        self.loaded: list[dict[tuple[str, Box], np.ndarray]] = [{} for _ in engine_ranks]
        self.received = [0 for _ in engine_ranks]
        self.done: list[set[int]] = [set() for _ in engine_ranks]

    def run(self) -> None:
        sent = [0] * len(self.sends)
        position = [(0, 0)] * len(self.buckets)  # bucket and message of it that is waited for
        progress = True
        while progress:
            progress = False
            for rank, (number, message) in enumerate(position):
                if number == len(self.buckets[rank]):
                    continue
                bucket = self.buckets[rank][number]
                if message < len(bucket.messages):
                    peer = bucket.messages[message].trainer_rank
                    if self.plan.fleet.mapped(peer, rank):
                        read = self.mapped.pop((peer, rank, bucket.key))
                        self.deliver(rank, bucket, message, peer, read)
                        position[rank] = number, message + 1
                        progress = True
                        continue
                    queue = self.sends[peer][sent[peer] :]
                    if not queue or queue[0].engine_rank != rank:
                        continue
                    self.deliver(rank, bucket, message, peer, queue[0])
                    sent[peer] += 1
                    position[rank] = number, message + 1
                elif bucket.forwarded_from is None or self.forward(rank, bucket):
                    self.done[rank].add(bucket.key)
                    position[rank] = number + 1, 0
                else:
                    continue
                progress = True
        assert not self.mapped
        assert sent == [len(queue) for queue in self.sends]
        assert [number for number, _ in position] == [len(each) for each in self.buckets]

    def deliver(
        self, rank: int, bucket: Bucket, message: int, peer: int, sent: OutgoingMessage
    ) -> None:
        assert sent.bucket == bucket.key
        boxes = bucket.messages[message].boxes
        assert boxes == [(each.tensor, each.box) for each in sent.slices]
        for each in sent.slices:
            values = self.held[peer][each.chunk, each.parameter][at(each.parameter_box)]
            self.load(rank, bucket, each.tensor, each.box, values)

    def forward(self, rank: int, bucket: Bucket) -> bool:
        source = bucket.forwarded_from
        assert source is not None and not bucket.messages
        if bucket.key not in self.done[source]:
            return False
        theirs = next(each for each in self.buckets[source] if each.key == bucket.key)
        assert rank in theirs.forward_to
        assert theirs.needs == bucket.needs
        for name, box in theirs.needs:
            self.load(rank, bucket, name, box, self.loaded[source][name, box])
        return True

    def load(self, rank: int, bucket: Bucket, name: str, box: Box, values: np.ndarray) -> None:
        boxes = [need for tensor, need in bucket.needs if tensor == name]
        [need] = [each for each in boxes if intersect(each, box) == box]
        target = self.loaded[rank].setdefault((name, need), np.full(need[1], -1))
        inner = tuple(start - first for start, first in zip(box[0], need[0], strict=True))
        assert (target[at((inner, box[1]))] == -1).all(), "sent twice"
        target[at((inner, box[1]))] = values
        self.received[rank] += values.size


@pytest.mark.parametrize("seed", tiered(range(12), range(4)))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_engine_rank_receives_what_it_needs_once(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "GRAIN", 64)  # elements: so that replicas of a tiny model share
    settings = model(family, seed % len(FURTHER[family]))
    layout, fleet = layouts(seed * 1009 + len(family), family)
    execution = Execution(settings, layout, Plan(settings, layout, fleet))
    execution.run()
    rank = 0
    for size in fleet.engines:
        for place in range(size):
            needs = needed(settings, size, place, fleet.expert_parallel)
            assert sorted(execution.loaded[rank]) == sorted(needs)
            for name, box in needs:
                loaded = execution.loaded[rank][name, box]
                assert np.array_equal(loaded, execution.whole[name][at(box)])
            assert execution.received[rank] == sum(prod(box[1]) for _, box in needs)
            listed = [name for each in execution.buckets[rank] for name in each.tensors]
            assert sorted(listed) == sorted(name for name, _, _ in loaded_tensors(settings))
            rank += 1


@pytest.mark.parametrize("seed", tiered(range(6), range(2)))
@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_owners_are_the_ranks_that_hold_a_box(family: str, variant: int, seed: int) -> None:
    settings, (layout, _) = model(family, variant), layouts(seed, family)
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank in range(layout.ranks):
        for piece in held(settings, layout, rank):
            holders.setdefault((piece.tensor, piece.box), []).append(rank)
    found = owners(settings, layout)
    counted = 0
    for name, shape in tensors(settings).items():
        covered = np.zeros(shape, int)
        for box, ranks in found[name]:
            covered[at(box)] += 1
            assert holders[name, box] == list(ranks)
            counted += 1
        assert (covered == 1).all()
    assert counted == len(holders)


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_tensors_equal_those_of_transformers(family: str, variant: int) -> None:
    settings = model(family, variant, precision="bf16")
    expected = expected_tensors(hugging_face_config(settings))
    found = {name: shape for name, shape, _ in stored_tensors(settings)}
    again = settings_of(hugging_face_config(settings))
    assert tensors(again) == tensors(settings)
    assert found == {name: spec.shape for name, spec in expected.items()}
    for name, spec in expected.items():
        assert spec.dtype == DTYPES["fp32" if is_precise(name) else "bf16"], name
    keys = [bucket_of(name) for name in found]
    assert keys == sorted(keys)
    assert set(keys) == {EMBEDDING, *range(5), HEAD}


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_an_engine_needs_all_of_a_model(
    family: str, variant: int, size: int, whole_experts: bool
) -> None:
    """Ranks need equal numbers of elements, except for the vocabulary's padding."""
    settings = model(family, variant)
    assert not engine_violations(settings, size, whole_experts)
    counts = {name: np.zeros(shape, int) for name, shape in tensors(settings).items()}
    for rank in range(size):
        for name, box in needed(settings, size, rank, whole_experts):
            counts[name][at(box)] += 1
    for name, count in counts.items():
        whole = any(part in name for part in ("norm", "gate.", "_a_proj", "router", "o_proj.bias"))
        repeated = "k_proj" in name or "v_proj" in name
        groups = settings.key_value_heads
        assert (count == (size if whole else max(1, size // groups) if repeated else 1)).all(), name


def test_ranks_beyond_the_key_value_heads_share_them_with_their_neighbours() -> None:
    heads = [
        dict(needed(model("mixtral"), 8, rank))["model.layers.0.self_attn.k_proj.weight"][0][0] // 4
        for rank in range(8)
    ]
    assert heads == [0, 0, 1, 1, 2, 2, 3, 3]


def test_padding_of_the_vocabulary_is_not_sent() -> None:
    """80 tokens padded to 128 are 16 for each of 8 ranks; the last 3 ranks have only padding."""
    rows = [
        dict(needed(model("mixtral"), 8, rank)).get("lm_head.weight", ((0,), (0,)))[1][0]
        for rank in range(8)
    ]
    assert rows == [16, 16, 16, 16, 16, 0, 0, 0]


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "3 does not divide model.attention_heads = 8; use one of [1, 2, 4, 8]"),
        (3, {}, "3 does not divide model.vocabulary_size = 80, rounded up to 128; use one"),
        (
            6,
            {"attention_heads": 12, "expert_hidden_size": 12},
            "6 neither divides nor is a multiple of model.key_value_heads = 4; use one of [1, 2, 4",
        ),
        (8, {"expert_hidden_size": 12}, "8 does not divide model.expert_hidden_size = 12; use"),
        (16, {"expert_hidden_size": 12}, "use one of [1, 2, 4]"),
    ],
)
def test_an_engine_size_that_cannot_hold_the_model_lists_sizes_that_can(
    size: int, changes: dict[str, int], message: str
) -> None:
    found = engine_violations(model("qwen3_moe", **changes), size)
    assert any(message in said for _, said in found), found
    assert {key for key, _ in found} == {"engine.tensor"}


@pytest.mark.parametrize("engines", [(4,), (8,) * 2, (1,) * 5])
@pytest.mark.parametrize("context", tiered([1, 2], {2}))
def test_the_ranks_of_a_stage_send_alike(engines: tuple[int, ...], context: int) -> None:
    """Ranks send within 10 % of their mean where 2 or more replicas hold every weight."""
    layout = LayoutSettings(ranks=32, tensor=2, context=context, pipeline=2, expert=4)
    plan = Plan(QWEN3_30B, layout, EngineSizes(engines))
    sent = [
        sum(prod(each.box[1]) for message in plan.send(rank) for each in message.slices)
        for rank in range(layout.ranks)
    ]
    for stage in (sent[:16], sent[16:]):
        assert max(stage) < 1.1 * sum(stage) / len(stage)


def test_trainers_feed_engine_ranks_up_to_their_own_number() -> None:
    layout = LayoutSettings(ranks=8, pipeline=4, expert=2)
    plan_model = model("qwen3_moe", layers=7)
    plan = Plan(plan_model, layout, EngineSizes((2,) * 11))
    fed = {message.engine_rank for rank in range(layout.ranks) for message in plan.send(rank)}
    assert fed == set(range(8))
    received = [plan.receive(rank) for rank in range(22)]
    for rank, buckets in enumerate(received):
        for each in buckets:
            assert each.forwarded_from == (None if rank < 8 else rank - 8)
            assert each.forward_to == ((rank + 8,) if rank + 8 < 22 else ())
    for at_once in list(zip(*received[:8:2], strict=True))[:8]:  # 2 buckets a stage
        assert {Layout(plan_model, layout).place(each.key).stage for each in at_once} == set(
            range(4)
        )


@pytest.mark.parametrize(
    ("theirs", "latent", "ours"),
    [
        ("mlp.experts.linear_fc1.weight3", False, "mlp.experts.local_experts.3.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.bias3", False, "mlp.experts.local_experts.3.linear_fc2.bias"),
        ("self_attention.linear_qkv.layer_norm_weight", False, "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", False, "pre_mlp_layernorm.weight"),
        (
            "self_attention.linear_q_up_proj.layer_norm_weight",
            True,
            "self_attention.q_layernorm.weight",
        ),
        # Of a dense layer, whatever its attention.
        ("mlp.linear_fc1.layer_norm_weight", True, "pre_mlp_layernorm.weight"),
        ("mlp.shared_experts.linear_fc1.weight", True, "mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_names_of_transformer_engine_are_translated(theirs: str, latent: bool, ours: str) -> None:
    prefix = "decoder.layers.0."
    assert plain_name(prefix + theirs, latent) == prefix + ours


@pytest.mark.parametrize("box", [((0, 0), (3, 3)), ((0, 1), (3, 2)), ((0, 1), (3, 3))])
def test_a_box_of_a_stack_that_splits_its_parts_is_refused(box: Box) -> None:
    stack = Stack("mlp.experts.gate_up_proj", 2, ("{expert}.gate", "{expert}.up"), (4, 3))
    with pytest.raises(ValueError, match="splits the outputs of its 2 parts"):
        stack.covered(box)


@pytest.mark.parametrize("family", ["gpt_oss"])
def test_stacked_tensors_have_every_part_once(family: str) -> None:
    settings = model(family)
    whole, shapes = numbered(settings), tensors(settings)
    seen: set[str] = set()
    for _, shape, stack in stored_tensors(settings):
        if stack is None:
            continue
        stored = np.full(shape, -1)
        for expert in range(stack.experts):
            for number, name in enumerate(stack.names(expert)):
                stack.part(stored[expert], number)[...] = whole[name]
                seen.add(name)
                assert bucket_of(name) == bucket_of(stack.tensor)
        assert (stored >= 0).all()
        box = (1, *(0,) * (len(stack.shape) - 1)), (2, *stack.shape[1:])
        cover = stack.covering(box)
        assert stack.covered(cover) == box
        for number, name in enumerate(stack.names(2)):
            part = stack.part(stored[2][at(cover)], number)
            assert np.array_equal(part, whole[name][at(box)])
    assert seen == {name for name in shapes if ".experts." in name}
