"""The roofline: published steps, and what must grow or shrink with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel.estimates.roofline.hardware import GPUS, REACHED
from parallel.estimates.roofline.rollout import Decoder
from parallel.estimates.roofline.training import training_seconds
from parallel.estimates.roofline.weight_sync import sync_seconds, synced_bytes
from parallel.estimates.roofline.work import StepWorkload
from parallel.estimates.tensor_sizes import parameter_count
from parallel.settings import EngineSettings, LayoutSettings
from tests.layouts.real_models import QWEN3_30B, real_model
from tests.parallel.published_steps import H100

WORK = StepWorkload(64, mean_tokens=4096, most_tokens=4096, row_tokens=4096)

WITHIN = 0.25
NAMED = ("30B on 32", "235B on 128", "671B on 256")  # whose throughputs are Braid's aim


@pytest.mark.parametrize("name", H100)
def test_a_published_step_takes_as_long(name: str) -> None:
    published = H100[name]
    assert published.simulated(REACHED).total == pytest.approx(published.seconds, rel=WITHIN)


@pytest.mark.parametrize("name", NAMED)
def test_a_published_throughput_is_reached(name: str) -> None:
    """Not of all: the tokens a second of asynchronous 671B are not its tokens over its seconds."""
    published = H100[name]
    seconds = published.simulated(REACHED).total
    tokens = published.sequences * published.mean_tokens / seconds / published.gpus
    assert tokens == pytest.approx(published.tokens_per_second, rel=WITHIN)


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_pipeline_is_filled_before_all_ranks_work(virtual: int) -> None:
    """1F1B idles for (p - 1) / v micro-batches (arXiv 2104.04473)."""
    layout = LayoutSettings(ranks=4, pipeline=4, virtual_pipeline=virtual)
    *_, bubble = training_seconds(QWEN3_30B, layout, WORK, GPUS["h100"], REACHED)
    assert bubble == pytest.approx(3 / virtual / (64 + 3 / virtual))


def test_experts_on_several_nodes_wait_for_the_network() -> None:
    near, far = (
        training_seconds(
            QWEN3_30B, LayoutSettings(ranks=16, expert=expert), WORK, GPUS["h100"], REACHED
        )[1]
        for expert in (8, 16)
    )
    assert far > 1.05 * near


def test_tensor_parallel_ranks_wait_for_their_links() -> None:
    """Four times in a layer, forward and backward: attention and experts gather and scatter."""
    layout = LayoutSettings(ranks=4, tensor=4)
    reached = replace(REACHED, layer=0.0)  # below which no pass counts
    slow, fast = 45e9, 450e9
    seconds = [
        training_seconds(
            QWEN3_30B, layout, WORK, replace(GPUS["h100"], link_bandwidth=each), reached
        )[1]
        for each in (slow, fast)
    ]
    sent = 64 * 48 * 2 * 4 * (4096 * 2048 * 2) * 3 / 4  # of bf16, to the other three ranks
    expected = sent / REACHED.link * (1 / slow - 1 / fast)
    assert seconds[0] - seconds[1] == pytest.approx(expected)


def test_weights_in_fp8_are_read_in_half_the_time() -> None:
    """A sequence alone waits for memory."""
    reached = replace(REACHED, decode_layer=0.0)
    bf16, fp8 = (
        Decoder(QWEN3_30B, EngineSettings(weights=each), GPUS["h100"], reached).seconds(1, 0)
        for each in ("model", "fp8")
    )
    assert fp8 == pytest.approx(bf16 / 2, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "near"),
    [({}, True), ({"transport": "messages"}, False), ({"placement": "own"}, False)],
)
def test_only_engines_beside_the_ranks_map_their_memory(
    changes: dict[str, str], near: bool
) -> None:
    layout, gpu = LayoutSettings(ranks=8, expert=8), GPUS["h100"]
    engine = EngineSettings(count=4, tensor=2).model_copy(update=changes)
    found = synced_bytes(QWEN3_30B, layout, engine, per_node=8)
    assert found.near == near
    assert found.received == pytest.approx(parameter_count(QWEN3_30B)[0], rel=0.01)  # half in bf16
    assert (found.sent == 0) == near
    way = gpu.link_bandwidth * REACHED.link if near else gpu.network_bandwidth * REACHED.network
    most = max(found.received, found.sent) / way
    at_once = replace(REACHED, load=0.0)
    assert sync_seconds(found, gpu, at_once) == pytest.approx(most)
    assert sync_seconds(found, gpu, replace(REACHED, load=1.0)) == found.tensors


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "glm-4.5-air", "deepseek-v3"])
def test_a_full_engine_reads_every_weight_once(name: str) -> None:
    """All but the embedding, whose rows are few; dense first layers have no routed experts."""
    model = real_model(name)
    gpu, reached = replace(GPUS["h100"], flops=1e30), replace(REACHED, decode_layer=0.0)
    seconds = Decoder(model, EngineSettings(), gpu, reached).seconds(1e6, 0)
    read = 2 * (parameter_count(model)[0] - model.vocabulary_size * model.hidden_size)
    assert seconds * gpu.memory_bandwidth * reached.memory == pytest.approx(read, rel=1e-3)
