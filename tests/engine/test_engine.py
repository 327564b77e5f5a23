"""An engine samples from exactly the weights that a trainer sent."""

from __future__ import annotations

import http.client
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.wire import Generate, Prompt
from parallel.files import RESTART_REQUEST
from pipeline.launch.placement import ForkServers
from tests.awaiting import PATIENCE_SECONDS
from tests.engine import engine_cases
from tests.engine.drawing import (
    LONG,
    SAMPLES,
    SAMPLING,
    DrawingReference,
    draw,
    long_request,
    request,
)
from tests.engine.engine_process import Running
from tests.engine.engine_settings import ENGINE, MODEL
from tests.ranks import On
from tests.tiers import tiered

Refit = Callable[[int], DrawingReference]


@pytest.fixture
def client(engine: Running) -> EngineClient:
    made = EngineClient(engine.address, ENGINE)
    made.connect()
    return made


@pytest.fixture
def refit(on: On, engine: Running) -> Refit:
    """Return `refit(version)`, which refits the engine with random weights."""

    def run(version: int) -> DrawingReference:
        settings = MODEL.model_dump_json(), ENGINE.model_dump_json()
        [weights] = on(engine_cases.LAYOUT, engine_cases.refit, engine.address, *settings, version)
        return DrawingReference(MODEL, weights)

    return run


def test_an_engine_that_fails_at_its_start_is_reported_at_once(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="No module named"):
        Running(fork_servers, MODEL, tmp_path, program="tests.engine.missing")


def test_a_refit_logs_no_warning_of_weights(engine: Running, refit: Refit) -> None:
    """vLLM would log one of a layer that has buffers alone, as rotary positions."""
    refit(1)
    assert "Failed to load weights" not in (engine.directory / "engine.log").read_text()


def test_an_engine_without_weights_refuses_to_sample(engine: Running) -> None:
    """The refusal was recorded at its start, before any refit."""
    assert engine.before_refit is not None
    assert "no weights yet" in engine.before_refit


def test_log_probabilities_follow_every_refit_cached_prompts_included(
    client: EngineClient, refit: Refit
) -> None:
    for version in (1, 2, 3):
        reference = refit(version)
        for _ in range(2):  # the second time the prompts come from the prefix cache
            drawn = draw(client, seed=version)
            assert reference.largest_difference(drawn) < 1e-4
            assert all((each.versions == version).all() for each in drawn)


def test_log_probabilities_are_those_of_the_sampling_temperature(
    client: EngineClient, refit: Refit
) -> None:
    reference = refit(4)
    drawn = draw(client, replace(SAMPLING, temperature=0.7))
    assert reference.largest_difference(drawn, temperature=0.7) < 1e-4
    assert reference.largest_difference(drawn, temperature=1.0) > 1e-2


def test_samples_depend_on_their_seed_alone(client: EngineClient, refit: Refit) -> None:
    refit(5)
    first, again, other = (draw(client, seed=seed) for seed in (3, 3, 40))
    assert all(
        np.array_equal(a.response, b.response) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(first, again, strict=True)
    )
    assert any(
        not np.array_equal(a.response, b.response) for a, b in zip(first, other, strict=True)
    )
    assert len({each.response.tobytes() for each in first[:SAMPLES]}) > 1


def test_routes_equal_those_of_the_model(client: EngineClient, refit: Refit) -> None:
    reference = refit(6)
    for each in draw(client):
        assert each.routes is not None
        assert each.routes.shape == (each.length, MODEL.layers, MODEL.experts_per_token)
        assert np.array_equal(np.sort(each.routes), reference.read(each)[1])


def test_a_truncated_response_is_not_finished(client: EngineClient, refit: Refit) -> None:
    refit(7)
    drawn = draw(client, replace(SAMPLING, max_tokens=40))
    for each in drawn:
        assert each.finished == (each.response[-1] in SAMPLING.end_tokens)
        assert each.finished or len(each.response) == 40
        assert SAMPLING.end_tokens[0] not in each.response[:-1]
    assert {each.finished for each in drawn} == {True, False}


def test_any_end_token_ends_a_response(client: EngineClient, refit: Refit) -> None:
    refit(9)
    ends = tuple(range(0, MODEL.vocabulary_size, 3))  # random weights soon draw one
    drawn = draw(client, replace(SAMPLING, max_tokens=40, end_tokens=ends))
    for each in drawn:
        assert each.finished == (each.response[-1] in ends)
        assert not np.isin(each.response[:-1], ends).any()
    assert len({int(each.response[-1]) for each in drawn if each.finished}) > 1


@pytest.mark.parametrize(
    ("top_k", "top_p"), tiered([(5, 1.0), (0, 0.8), (6, 0.7)], {(6, 0.7), (5, 1.0)})
)
def test_tokens_are_sampled_from_their_kept_sets(
    client: EngineClient, refit: Refit, top_k: int, top_p: float
) -> None:
    """Top-k applies first, then the fewest ids that reach top-p; mu is over the kept ids."""
    reference = refit(8)
    sampling = replace(SAMPLING, temperature=0.9, top_k=top_k, top_p=top_p)
    sizes = set()
    for each in draw(client, sampling):
        assert each.kept is not None and each.logprobs is not None
        logits = reference.read(each)[0] / sampling.temperature
        for row, token, logprob, kept in zip(
            logits, each.response, each.logprobs, each.kept, strict=True
        ):
            ordered = row.sort(descending=True)
            chances = ordered.values[: top_k or None].softmax(-1)
            count = int((chances.cumsum(-1) - chances < top_p).sum())
            assert set(kept) == set(ordered.indices[:count].tolist())
            assert token in kept
            expected = row[int(token)] - row[torch.tensor(kept)].logsumexp(-1)
            assert abs(float(expected) - logprob) < 1e-4
            sizes.add(len(kept))
    assert sizes == {5} if top_p == 1.0 else len(sizes) > 1


def test_without_top_p_or_top_k_every_id_is_kept(client: EngineClient, refit: Refit) -> None:
    refit(9)
    assert all(each.kept is None for each in draw(client))


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (LONG * 10, r"380 tokens, and with 12 more exceeds engine\.max_model_tokens = 256"),
        ([], "prompt 1 has no tokens"),
        ([5, MODEL.vocabulary_size], r"prompt 1 has a token outside model\.vocabulary_size = 80"),
    ],
)
def test_an_invalid_prompt_is_refused_without_effect_on_others(
    client: EngineClient, refit: Refit, tokens: list[int], complaint: str
) -> None:
    reference = refit(10)
    good, bad = Prompt(0, [5, 6, 7], seed=0), Prompt(1, tokens, seed=1)
    with pytest.raises(EngineRefused, match=complaint):
        list(client.generate(Generate([good, bad], SAMPLING)))
    assert client.healthy()
    assert reference.largest_difference(draw(client)) < 1e-4


def test_a_client_gives_up_an_engine_that_hangs(engine: Running, refit: Refit) -> None:
    reference = refit(11)
    impatient = EngineClient(engine.address, ENGINE.model_copy(update={"hang_timeout_seconds": 10}))
    impatient.connect()
    stream = impatient.generate(long_request())
    next(stream)
    engine.process.send(signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match="broke off its answer to generate: TimeoutError"):
            list(stream)
        impatient.settings = ENGINE.model_copy(update={"hang_timeout_seconds": 1})
        with pytest.raises(EngineError, match="said nothing for 1 s after generate"):
            list(impatient.generate(request()))
    finally:
        engine.process.send(signal.SIGCONT)
    impatient.settings = ENGINE
    assert reference.largest_difference(draw(impatient)) < 1e-4


def test_an_engine_stopped_while_a_client_connects_is_retried(
    engine: Running, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens at a stage's start if the machine was suspended or the engine swapped out."""
    monkeypatch.setattr("parallel.engine.client.HEALTH_SECONDS", 1.0)
    monkeypatch.setattr("parallel.engine.client.LAUNCHER_SECONDS", 0.0)
    late = EngineClient(engine.address, ENGINE.model_copy(update={"start_timeout_seconds": 30}))
    engine.process.send(signal.SIGSTOP)
    wake = threading.Timer(3, engine.process.send, [signal.SIGCONT])
    wake.start()
    try:
        assert late.connect() == client.describe()
    finally:
        wake.join()
    assert not engine.address.with_name(RESTART_REQUEST).exists()


def test_the_signal_of_scancel_leaves_an_engine_sampling(
    client: EngineClient, engine: Running, refit: Refit
) -> None:
    """The ranks of a cancelled job finish a step, for which they need it, and save."""
    refit(1)
    engine.process.send(signal.SIGTERM)
    assert draw(client)
    assert engine.process.status() is None


def test_strangers_are_refused(client: EngineClient, engine: Running) -> None:
    assert client.address is not None
    connection = http.client.HTTPConnection(
        client.address.host, client.address.port, timeout=PATIENCE_SECONDS
    )
    for name in ("describe", "generate", "health", "join", "refit"):
        connection.request("POST", f"/{name}", b"", {"Authorization": "Bearer guess"})
        response = connection.getresponse()
        assert response.status == 403
        assert client.address.token.encode() not in response.read()
    assert stat.S_IMODE(engine.address.stat().st_mode) == 0o600
    assert client.healthy()


def test_a_malformed_request_leaves_nothing_in_the_log(
    client: EngineClient, engine: Running
) -> None:
    """Strangers who reach the port get an HTTP error and cannot fill the disk."""
    assert client.address is not None
    log = engine.directory / "engine.log"
    before = log.stat().st_size
    for junk in (
        b"no request\r\n\r\n",
        b"POST /join HTTP/1.1\r\nX: " + bytes(range(256)) + b"\r\n\r\n",
        b"POST /join HTTP/1.1\r\nX: " + b"y" * (1 << 16) + b"\r\n\r\n",
        b"POST http://[join/ HTTP/1.1\r\n\r\n",
        b"POST /join HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n",
    ):
        with socket.create_connection((client.address.host, client.address.port), 10) as stranger:
            stranger.sendall(junk)
            assert stranger.recv(1 << 16).startswith(b"HTTP/1.")
    assert client.healthy()
    assert log.read_bytes()[before:] == b""


def test_an_engine_that_never_starts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel.engine.client.LAUNCHER_SECONDS", 0.0)
    hurried = ENGINE.model_copy(update={"start_timeout_seconds": 1})
    address = tmp_path / "3" / "address.json"
    with pytest.raises(EngineError, match=r"engine 3 was not.*engine\.start_timeout_seconds"):
        EngineClient(address, hurried).connect()
