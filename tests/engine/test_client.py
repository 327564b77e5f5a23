"""A client reports a server that is no engine, or one of another version."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.server import Engine, EngineServer, StepFailed
from parallel.engine.wire import (
    BEAT,
    LENGTH_BYTES,
    PROTOCOL,
    Address,
    EngineDescription,
    EnginePlace,
    Generate,
    Generation,
    Join,
    Refit,
    Sampling,
    frame,
    frames,
)
from parallel.files import RESTART_REQUEST
from tests.awaiting import PATIENCE_SECONDS
from tests.engine.engine_settings import ENGINE

DESCRIPTION = EngineDescription(
    protocol=PROTOCOL,
    instance="a",
    places=[EnginePlace("here", [])],
    model="digest",
    tensor=1,
    expert_parallel=False,
    max_model_tokens=64,
    max_sequences=4,
    weight_version=None,
)
GENERATION = Generation(0, b"", b"", b"", (0, 1, 2), False, b"")

Impostor = Callable[..., EngineClient]


@pytest.fixture
def impostor(tmp_path: Path) -> Iterator[Impostor]:
    """Return `impostor(answers, status=200)`, a client of a server that answers so or is silent."""
    servers = []

    def start(answers: dict[str, bytes], status: int = 200) -> EngineClient:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.removeprefix("/") not in answers:
                    self.rfile.read(1)  # until the client goes away
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answers[self.path.removeprefix("/")])

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        address = tmp_path / "0" / "address.json"
        address.parent.mkdir()
        address.write_bytes(
            msgspec.json.encode(Address("127.0.0.1", server.server_port, "", 1, "a"))
        )
        return EngineClient(address, ENGINE)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def described(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(DESCRIPTION, **changes))


def test_an_engine_of_another_version_is_refused(impostor: Impostor) -> None:
    client = impostor({"describe": described(protocol=1)})
    with pytest.raises(EngineRefused, match=f"engine 0 has protocol version 1, .* {PROTOCOL}"):
        client.connect()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with timeouts of fractions of a second."""
    monkeypatch.setattr("parallel.engine.client.HEALTH_SECONDS", 0.1)
    monkeypatch.setattr("parallel.engine.client.LAUNCHER_SECONDS", 0.0)


def replaced(client: EngineClient, process: int) -> None:
    """Act as the launcher: remove a restart request and publish another process's address."""
    known = msgspec.json.decode(client.address_file.read_bytes(), type=Address)
    client.address_file.with_name(RESTART_REQUEST).unlink()
    changed = msgspec.structs.replace(known, pid=process, instance=str(process))
    client.address_file.write_bytes(msgspec.json.encode(changed))


@pytest.mark.usefixtures("hurried")
def test_an_engine_that_is_silent_at_first_is_retried(impostor: Impostor) -> None:
    answers: dict[str, bytes] = {}
    client = impostor(answers)
    client.settings = ENGINE.model_copy(update={"start_timeout_seconds": 20})
    threading.Timer(0.5, answers.update, [{"describe": described()}]).start()
    assert client.connect() == DESCRIPTION
    assert not client.address_file.with_name(RESTART_REQUEST).exists()


@pytest.mark.usefixtures("hurried")
def test_an_engine_that_stays_silent_is_replaced(impostor: Impostor) -> None:
    answers: dict[str, bytes] = {}
    client = impostor(answers)
    timeouts = {"start_timeout_seconds": 20, "hang_timeout_seconds": 0.3}
    client.settings = ENGINE.model_copy(update=timeouts)
    asked = client.address_file.with_name(RESTART_REQUEST)
    reasons = []

    def launch() -> None:
        while not asked.exists():
            time.sleep(0.01)
        reasons.append(asked.read_text())
        answers["describe"] = described()
        replaced(client, process=2)

    launcher = threading.Thread(target=launch, daemon=True)
    launcher.start()
    assert client.connect() == DESCRIPTION
    launcher.join(PATIENCE_SECONDS)
    assert client.address is not None and client.address.pid == 2
    [reason] = reasons
    assert reason.startswith("it did not answer for 0.3 s (engine.hang_timeout_seconds); ")
    assert "engine 0 said nothing for 0.1 s after describe" in reason


@pytest.mark.usefixtures("hurried")
def test_a_silent_engine_that_is_not_replaced_is_reported_as_silent(impostor: Impostor) -> None:
    client = impostor({})
    timeouts = {"start_timeout_seconds": 1, "hang_timeout_seconds": 0.3}
    client.settings = ENGINE.model_copy(update=timeouts)
    with pytest.raises(EngineError) as caught:
        client.connect()
    assert str(caught.value).startswith(
        "engine 0 was not replaced within 1 s; it did not answer for 0.3 s"
    )
    assert client.address_file.with_name(RESTART_REQUEST).exists()


@pytest.mark.parametrize(
    "garbage",
    [
        frame(GENERATION)[:-3],
        b"\x00\x00",
        b"<html>",
        frame("no response"),
        frame({"number": "one"}),
    ],
)
def test_an_invalid_stream_raises_an_error_that_names_the_engine(
    impostor: Impostor, garbage: bytes
) -> None:
    client = impostor({"describe": described(), "generate": frame(GENERATION) + garbage})
    client.connect()
    stream = client.generate(Generate([], Sampling(1.0, 4, (1,))))
    assert next(stream) == GENERATION
    with pytest.raises(EngineError, match="engine 0 broke off its answer to generate"):
        next(stream)


def test_a_failed_step_is_reported_after_the_ended_responses(impostor: Impostor) -> None:
    engine = Mock(spec=Engine)
    engine.generate.return_value = _failing()
    server = EngineServer(engine)

    async def answer() -> bytes:
        async with TestClient(TestServer(server.application())) as web:
            asked = msgspec.msgpack.encode(Generate([], Sampling(1.0, 4, (1,))))
            bearer = {"Authorization": f"Bearer {server.token}"}
            return await (await web.post("/generate", data=asked, headers=bearer)).read()

    client = impostor({"describe": described(), "generate": asyncio.run(answer())})
    client.connect()
    stream = client.generate(Generate([], Sampling(1.0, 4, (1,))))
    assert next(stream) == GENERATION
    with pytest.raises(EngineError, match=r"^engine 0 failed while it generated: no kernel$"):
        next(stream)


async def _failing() -> AsyncIterator[Generation]:
    yield GENERATION
    raise StepFailed("no kernel")


def test_a_silent_refit_times_out(impostor: Impostor) -> None:
    client = impostor({"describe": described()})
    client.connect()
    client.settings = ENGINE.model_copy(update={"hang_timeout_seconds": 0.2})
    with pytest.raises(EngineError, match=r"^engine 0 said nothing for 0\.2 s after refit$"):
        client.refit(Refit(1, check=False))


def test_an_endless_refit_times_out(impostor: Impostor) -> None:
    client = impostor({"describe": described(), "refit": 3 * BEAT})
    client.connect()
    with pytest.raises(EngineError, match=r"^engine 0 did not answer refit$"):
        client.refit(Refit(1, check=False))
    client.settings = ENGINE.model_copy(update={"request_timeout_seconds": 1e-9})
    with pytest.raises(EngineError, match="engine 0 did not finish a refit within 1e-09 s"):
        client.refit(Refit(1, check=False))


def test_an_invalid_answer_is_an_error(impostor: Impostor) -> None:
    client = impostor({"describe": described(), "join": b"\xc1", "health": b"\xc1"})
    client.connect()
    with pytest.raises(EngineError, match="engine 0 broke off its answer to join"):
        client.join(Join({}, [1], False, True, 1, 0, None, [], timeout_seconds=1.0))
    assert not client.healthy()


@pytest.mark.parametrize("status", [200, 500])
def test_an_oversized_answer_is_not_read(impostor: Impostor, status: int) -> None:
    client = impostor({"describe": described(model="h" * (2 << 20))}, status)
    client.address = msgspec.json.decode(client.address_file.read_bytes(), type=Address)
    with pytest.raises(EngineError, match=r"engine 0 .* describe: .*more than 1048576 bytes"):
        client.describe()


def test_an_oversized_message_is_not_read() -> None:
    asked = []

    class Endless:
        def read(self, size: int) -> bytes:
            asked.append(size)
            return b"\xff" * LENGTH_BYTES

    with pytest.raises(EOFError, match="a message of 4294967295 bytes"):
        next(frames(Endless()))
    assert asked == [LENGTH_BYTES]


def test_a_file_that_holds_no_address_is_named(tmp_path: Path) -> None:
    path = tmp_path / "address.json"
    path.write_text("{}")
    with pytest.raises(EngineError, match=rf"{path} holds no engine's address"):
        EngineClient(path, ENGINE).connect()
