"""The engine takes new weights in place, and then samples from exactly those."""

from __future__ import annotations

import http.client
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_settings import ENGINE, MODEL
from transformers import Qwen3MoeForCausalLM

from parallel.rollout.client import EngineClient, EngineError, prompts_of
from parallel.rollout.wire import Generate
from parallel.sample import Sample

LONG = list(range(2, 40))  # longer than a cache block, so that its prefix is cached
PROMPTS = [LONG, [*LONG, 50], [5, 6, 7]]


@pytest.fixture(scope="session")
def client(engine_address: Path) -> EngineClient:
    return EngineClient(engine_address, ENGINE)


def model(seed: int) -> Qwen3MoeForCausalLM:
    from parallel.hugging_face import hugging_face_config

    torch.manual_seed(seed)
    made = Qwen3MoeForCausalLM(hugging_face_config(MODEL)).float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return made


def refit(client: EngineClient, source: Qwen3MoeForCausalLM, version: int) -> None:
    names = sorted(unfused(source), key=lambda item: item[0])
    client.refit(names, version)


def unfused(source: Qwen3MoeForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """The tensors as a checkpoint names them: transformers 5 stacks the experts in memory."""
    found = []
    for name, tensor in source.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                found.append((f"{stem}{expert}.gate_proj.weight", gate.contiguous()))
                found.append((f"{stem}{expert}.up_proj.weight", up.contiguous()))
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            found += [(f"{stem}{i}.down_proj.weight", part) for i, part in enumerate(tensor)]
        else:
            found.append((name, tensor))
    return [(name, tensor.clone()) for name, tensor in found]


def sample(client: EngineClient, temperature: float = 1.0, seed: int = 0) -> list[Sample]:
    request = Generate(prompts_of(PROMPTS, 4, seed), temperature, max_tokens=12, end_token=1)
    return client.generate("a", request)


def mismatch(source: Qwen3MoeForCausalLM, drawn: list[Sample], temperature: float = 1.0) -> float:
    largest = 0.0
    for each in drawn:
        tokens = torch.tensor(np.concatenate([each.prompt, each.response]))[None]
        with torch.no_grad():
            logits = source(tokens).logits[0, len(each.prompt) - 1 : -1] / temperature
        chosen = logits.log_softmax(-1).gather(-1, tokens[0, len(each.prompt) :, None])[:, 0]
        assert each.logprobs is not None
        largest = max(largest, (chosen - torch.tensor(each.logprobs)).abs().max().item())
    return largest


def test_an_engine_without_weights_refuses_to_sample(client: EngineClient) -> None:
    with pytest.raises(EngineError, match="no weights yet"):
        sample(client)


def test_log_probabilities_follow_every_refit_cached_prompts_included(
    client: EngineClient,
) -> None:
    for version in range(1, 8):
        source = model(version % 3)
        refit(client, source, version)
        for _ in range(2):  # the second time the prompts come from the prefix cache
            drawn = sample(client, seed=version)
            assert mismatch(source, drawn) < 1e-4
            assert {each.weight_version for each in drawn} == {version}


def test_log_probabilities_are_those_of_the_sampling_temperature(client: EngineClient) -> None:
    source = model(1)
    refit(client, source, 20)
    drawn = sample(client, temperature=0.7)
    assert mismatch(source, drawn, temperature=0.7) < 1e-4
    assert mismatch(source, drawn, temperature=1.0) > 1e-2


def test_samples_depend_on_their_seed_alone(client: EngineClient) -> None:
    refit(client, model(1), 21)
    first, again, other = (sample(client, seed=seed) for seed in (3, 3, 4))
    assert all(
        np.array_equal(a.response, b.response) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(first, again, strict=True)
    )
    assert any(
        not np.array_equal(a.response, b.response) for a, b in zip(first, other, strict=True)
    )
    assert len({each.response.tobytes() for each in first[:4]}) > 1


def test_routes_are_those_of_the_model(client: EngineClient) -> None:
    source = model(2)
    refit(client, source, 22)
    for each in sample(client):
        tokens = torch.tensor(np.concatenate([each.prompt, each.response]))[None]
        with torch.no_grad():
            logits = source(tokens, output_router_logits=True).router_logits
        assert each.routes is not None
        assert each.routes.shape == (each.length, MODEL.layers, MODEL.experts_per_token)
        for layer, scores in enumerate(logits):
            expected = scores.reshape(-1, MODEL.experts).topk(2).indices[:-1].sort().values
            assert np.array_equal(np.sort(each.routes[:, layer]), expected.numpy())


def test_what_is_cut_off_is_not_finished(client: EngineClient) -> None:
    refit(client, model(1), 23)
    for each in sample(client):
        assert each.finished == (each.response[-1] == 1)
        assert each.finished or len(each.response) == 12


def test_a_failed_refit_leaves_an_engine_that_says_so_and_can_be_refitted(
    client: EngineClient,
) -> None:
    with pytest.raises(EngineError, match="load_chunk"):
        client.refit([("no.such.weight", torch.zeros(2))], 24)
    with pytest.raises(EngineError, match="no weights yet"):
        sample(client)
    torn = [item for item in unfused(model(0)) if "experts.1" not in item[0]]
    with pytest.raises(EngineError, match="load_chunk"):
        client.refit([*torn, ("no.such.weight", torch.zeros(2))], 25)
    source = model(1)
    refit(client, source, 26)
    assert mismatch(source, sample(client)) < 1e-4


def test_strangers_are_refused(client: EngineClient, engine_address: Path) -> None:
    connection = http.client.HTTPConnection(client.address.host, client.address.port, timeout=10)
    connection.request("POST", "/generate", b"", {"Authorization": "Bearer guess"})
    assert connection.getresponse().status == 403
    assert stat.S_IMODE(engine_address.stat().st_mode) == 0o600


def test_an_engine_that_never_comes_is_named(tmp_path: Path) -> None:
    impatient = ENGINE.model_copy(update={"start_timeout_seconds": 0})
    with pytest.raises(EngineError, match=r"engine\.start_timeout_seconds"):
        EngineClient(tmp_path / "address.json", impatient)
