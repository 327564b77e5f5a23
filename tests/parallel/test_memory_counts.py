"""The bytes of a rank equal numbers counted by hand for the smallest model."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from parallel.estimates import engine_memory, memory
from parallel.estimates.memory import RankMemory
from parallel.estimates.tensor_sizes import parameter_count
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings, OptimizerSettings
from parallel.weights.names import tensors
from tests.pipeline.checkpoint_headers import SMALL

ONE = EngineSettings()
ADAM = OptimizerSettings(learning_rate=1e-3)
SGD = OptimizerSettings(algorithm="sgd", learning_rate=1e-3)
# (4 + 2 * 2) heads * 32 * 96; 4 * 32 * 96; 8 * 96; two norms of 96; two of 32
DENSE_LAYER = 24_576 + 12_288 + 768 + 192 + 64
VOCABULARY = 80 * 96
EXPERT = 3 * 96 * 96
DENSE = 4 * DENSE_LAYER + 2 * VOCABULARY + 96


def training(model: ModelSettings = SMALL, **layout: Any) -> list[RankMemory]:
    settings = LayoutSettings(**{"distributed_optimizer": False, **layout})
    return memory.training_memory(model, settings, ADAM, row_tokens=1000)


def test_one_rank_holds_everything() -> None:
    whole = DENSE + 4 * 8 * EXPERT
    assert parameter_count(SMALL) == (whole, whole - 4 * 6 * EXPERT) == (1_051_744, 388_192)
    [rank] = training()
    assert (rank.parameters, rank.gradients) == (4 * whole, 4 * whole)
    assert rank.optimizer == 8 * whole
    [read] = memory.reading_memory(SMALL, LayoutSettings())
    assert read == RankMemory(parameters=4 * whole)


def test_bf16_halves_weights_and_keeps_a_copy_of_them_in_fp32() -> None:
    model = SMALL.model_copy(update={"precision": "bf16"})
    [exact], [half] = training(), training(model)
    assert 2 * half.parameters == exact.parameters
    assert half.gradients == exact.gradients
    assert 2 * half.optimizer == 3 * exact.optimizer
    assert 2 * engine_memory.engine_weights(model, ONE) == engine_memory.engine_weights(SMALL, ONE)


def test_sgd_keeps_a_momentum() -> None:
    layout = LayoutSettings(distributed_optimizer=False)
    [rank] = memory.training_memory(SMALL, layout, SGD, 1000)
    assert rank.optimizer == rank.parameters


def test_mixtral_normalises_no_queries_and_keys() -> None:
    mixtral = SMALL.model_copy(update={"family": "mixtral"})
    assert parameter_count(mixtral)[0] == parameter_count(SMALL)[0] - 4 * 2 * 32


def test_gpt_oss_has_biases_and_sinks() -> None:
    biased = SMALL.model_copy(update={"family": "gpt_oss"})
    attention = (4 + 2 * 2) * 32 + 96 + 4 - 64  # without norms of queries and keys
    experts, router = 8 * (2 * 96 + 96), 8
    more = 4 * (attention + experts + router)
    assert parameter_count(biased)[0] == parameter_count(SMALL)[0] + more
    assert parameter_count(biased)[0] == sum(prod(shape) for shape in tensors(biased).values())


def test_experts_are_shared_out_and_dense_layers_are_not() -> None:
    [rank] = training(ranks=2, expert=2)
    assert rank.parameters == 4 * (DENSE + 4 * 4 * EXPERT)
    [rank] = training(ranks=4, expert=2, expert_tensor=2)
    assert rank.parameters == 4 * (DENSE + 4 * 4 * EXPERT // 2)


def test_tensor_ranks_each_hold_the_router_and_the_norms() -> None:
    [rank] = training(ranks=2, tensor=2)
    split = 4 * (24_576 + 12_288) + 2 * VOCABULARY
    assert rank.parameters == 4 * (split // 2 + 4 * (768 + 192 + 64) + 96 + 4 * 8 * EXPERT)


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_first_pipeline_rank_embeds_and_the_last_predicts(virtual: int) -> None:
    first, last = training(ranks=2, pipeline=2, virtual_pipeline=virtual)
    layers = 2 * (DENSE_LAYER + 8 * EXPERT)
    assert first.parameters == 4 * (layers + VOCABULARY)
    assert last.parameters == 4 * (layers + VOCABULARY + 96)


def test_the_distributed_optimizer_splits_its_state_and_pads_its_buffers() -> None:
    layout = {"ranks": 8, "tensor": 2, "expert": 2, "pipeline": 2, "distributed_optimizer": True}
    first, last = training(**layout)
    # In each layer 96 becomes 128, and 32 becomes 64; the sum is a multiple of 128 already.
    dense = 2 * (12_288 + 6_144 + 768 + 2 * 128 + 2 * 64) + VOCABULARY // 2
    experts = 2 * 4 * EXPERT
    assert first.parameters == first.gradients == 4 * (dense + experts)
    assert first.optimizer == 8 * (dense + experts) // 2
    assert last.gradients == 4 * (dense + 128 + experts)


def test_a_buffer_is_padded_until_its_ranks_can_share_it() -> None:
    [alone] = training(distributed_optimizer=True)
    [three] = training(ranks=3, distributed_optimizer=True)
    dense = 4 * (24_576 + 12_288 + 768 + 2 * 128 + 2 * 64) + 2 * VOCABULARY + 128
    assert alone.gradients == 4 * (dense + 4 * 8 * EXPERT)
    assert dense % 384 == 128  # three ranks share multiples of lcm(3, 128)
    assert three.gradients == alone.gradients + 4 * 256
    assert three.optimizer * 3 == 2 * three.gradients


def test_experts_are_copied_over_other_ranks_than_dense_layers() -> None:
    [rank] = training(ranks=4, tensor=2, expert=4, distributed_optimizer=True)
    dense = 4 * (12_288 + 6_144 + 768 + 2 * 128 + 2 * 64) + VOCABULARY + 128
    assert rank.optimizer == 8 * (dense // 2 + 4 * 2 * EXPERT)  # every expert stands once


def test_frozen_models_are_weights_alone() -> None:
    layout = LayoutSettings(ranks=2, pipeline=2)
    for rank, read in zip(
        memory.training_memory(SMALL, layout, ADAM, 1000, frozen_models=3),
        memory.reading_memory(SMALL, layout),
        strict=True,
    ):
        assert rank.frozen == 3 * read.parameters
        assert rank.total == (
            rank.parameters + rank.gradients + rank.optimizer + rank.frozen + rank.activations
        )


def test_an_average_is_kept_in_fp32() -> None:
    low = SMALL.model_copy(update={"precision": "bf16"})
    [read] = memory.reading_memory(low, LayoutSettings())
    [rank] = memory.training_memory(low, LayoutSettings(), ADAM, 1000, 1, averages=1)
    assert rank.frozen == (1 + 2) * read.parameters


def test_a_critic_has_one_value_in_place_of_the_vocabulary() -> None:
    layout = LayoutSettings(ranks=4, tensor=2, pipeline=2, distributed_optimizer=False)
    first, last = memory.training_memory(SMALL, layout, ADAM, 1000)
    alike, critic = memory.training_memory(SMALL, layout, SGD, 1000, values=True)
    assert (alike.parameters, alike.gradients) == (first.parameters, first.gradients)
    assert critic.parameters == last.parameters - 4 * (VOCABULARY // 2 - 96)
    assert critic.activations == last.activations - 1000 * LOGITS // 2
    both = last.beside(critic)
    assert both.optimizer == 2 * last.parameters + critic.parameters
    assert both.activations == last.activations


# 6 * 96 hidden, 5 * 128 queries, 4 * 64 keys, and for each of 2 experts 96 + 6 * 96, in fp32;
# the router's 8 weights and marks; 4 heads' normalisers
LAYER = 4 * (576 + 640 + 256 + 2 * 672) + 8 * 5 + 16
LOGITS = 80 * (2 * 4 + 3 * 4)  # logits, their gradient, and three chunks of the loss


def kept(**layout: Any) -> list[int]:
    return [rank.activations for rank in training(**layout)]


def test_activations_of_a_micro_batch() -> None:
    assert kept() == [1000 * (4 * LAYER + LOGITS)]
    assert kept(recompute="attention") == [1000 * (4 * (LAYER - 16) + LOGITS)]
    assert kept(recompute="full") == [1000 * (4 * 4 * 96 + LAYER + LOGITS)]


def test_an_fp32_head_doubles_the_logits_of_a_bf16_model() -> None:
    low = SMALL.model_copy(update={"precision": "bf16"})
    precise = low.model_copy(update={"head_precision": "fp32"})
    found = [
        memory.training_memory(model, LayoutSettings(), ADAM, 1000)[0].activations
        for model in (low, precise)
    ]
    assert found[1] - found[0] == 1000 * 80 * 2 * 2  # logits and their gradient
    exact = SMALL.model_copy(update={"head_precision": "fp32"})
    assert memory.training_memory(exact, LayoutSettings(), ADAM, 1000)[0].activations == kept()[0]


@pytest.mark.parametrize(
    ("modules", "again"),
    [
        (["moe"], 4 * 2 * 672 + 8 * 5),
        (["moe_act"], 4 * 2 * 4 * 96),
        (["shared_experts", "layernorm"], 0),  # there are none, and norms are not counted
    ],
)
def test_of_recomputed_modules_one_layer_s_activations_are_kept(
    modules: list[str], again: int
) -> None:
    found = kept(recompute="selective", recompute_modules=modules)
    assert found == [1000 * (4 * (LAYER - again) + again + LOGITS)]


def test_tensor_and_context_ranks_share_the_activations() -> None:
    [whole] = kept()
    assert kept(ranks=2, tensor=2) == kept(ranks=2, context=2) == [whole // 2]
    assert kept(ranks=4, tensor=2, context=2) == [whole // 4]


def test_early_pipeline_ranks_keep_more_micro_batches() -> None:
    assert kept(ranks=4, pipeline=4) == [
        1000 * (behind * LAYER + (LOGITS if behind == 1 else 0)) for behind in (4, 3, 2, 1)
    ]
    # 2 * (ranks behind) + (parts - 1) * ranks warm-up passes of one layer each, and the current one
    assert kept(ranks=2, pipeline=2, virtual_pipeline=2) == [
        1000 * 5 * LAYER,
        1000 * (3 * LAYER + LOGITS),
    ]


def test_tokens_in_the_cache() -> None:
    assert (
        engine_memory.cached_tokens(SMALL, EngineSettings(kv_cache_mebibytes=1)) == 512
    )  # of 2 KiB each
    # Two key-value heads: half of them on each of two ranks, and one of them on each of four.
    for tensor in (2, 4):
        engine = EngineSettings(kv_cache_mebibytes=1, tensor=tensor)
        assert engine_memory.cached_tokens(SMALL, engine) == 1024


def test_a_cache_for_all_sequences_at_their_longest() -> None:
    # In blocks of 32 tokens of 2 KiB, one of which vLLM keeps to itself.
    engine = EngineSettings(max_model_tokens=130, max_sequences=3)
    assert engine_memory.cache_bytes(SMALL, engine) == (3 * 5 + 1) * 32 * 2048
