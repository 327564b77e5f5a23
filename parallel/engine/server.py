"""The HTTP server of a rollout engine, a process that serves one stage after another.

    python -m parallel.engine.server ENGINE.json

ENGINE.json holds an `EngineJob`. When the engine is ready it writes its `Address` to the file named
by "address"; until its first refit it rejects requests to generate.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from parallel.engine.engine import BEAT_SECONDS, Engine, StepFailed
from parallel.engine.wire import (
    BEAT,
    LARGEST_MESSAGE,
    Address,
    CallFailure,
    Generate,
    Join,
    Refit,
    frame,
)
from parallel.network import address_of
from parallel.settings import EngineJob
from parallel.status_pipe import report_error


class EngineServer:
    """The HTTP side of an engine, which answers `client.EngineClient`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.token = secrets.token_urlsafe(32)

    def application(self) -> web.Application:
        """Return an application with one route per call, each behind the token."""
        application = web.Application(middlewares=[self._guard], client_max_size=LARGEST_MESSAGE)
        engine = self.engine
        application.add_routes(
            [
                web.post("/describe", _answering(None, engine.describe)),
                web.post("/health", _answering(None, engine.health)),
                web.post("/join", _answering(Join, engine.join)),
                web.post("/refit", self._refit),
                web.post("/stop", _answering(None, engine.stop)),
                web.post("/generate", self._generate),
            ]
        )
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(shown, f"Bearer {self.token}".encode()):
            return _failure(403, "wrong token")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _failure(error.status, f"{request.path}: {error.reason}")
        except Exception as error:  # the client decides what it means
            return _failure(500, f"{type(error).__name__}: {error}")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Stream responses; the requests of a client that disconnects are aborted."""
        asked = msgspec.msgpack.decode(await request.read(), type=Generate)
        responses = await self.engine.generate(asked)
        stream = web.StreamResponse()
        await stream.prepare(request)
        try:
            async for ended in responses:
                await stream.write(b"".join(map(frame, ended)) or BEAT)
        except StepFailed as error:
            await stream.write(frame(CallFailure(str(error))))
        await stream.write_eof()
        return stream

    async def _refit(self, request: web.Request) -> web.StreamResponse:
        """Send the answer, and heartbeats until then: the trainer's ranks may take long."""
        asked = msgspec.msgpack.decode(await request.read(), type=Refit)
        stream = web.StreamResponse()
        await stream.prepare(request)
        refit = asyncio.ensure_future(self.engine.refit(asked))
        refit.add_done_callback(_log)  # also when the client has disconnected
        while not (await asyncio.wait({refit}, timeout=BEAT_SECONDS))[0]:
            await stream.write(BEAT)
        if (error := refit.exception()) is None:
            await stream.write(frame(refit.result()))
        else:
            await stream.write(frame(CallFailure(f"{type(error).__name__}: {error}")))
        await stream.write_eof()
        return stream


def _log(call: asyncio.Future[Any]) -> None:
    if not call.cancelled() and (error := call.exception()) is not None:
        traceback.print_exception(error)


def _answering(kind: Any, call: Callable[..., Awaitable[Any]]) -> Any:
    async def handler(request: web.Request) -> web.Response:
        body = await request.read()
        arguments = [msgspec.msgpack.decode(body, type=kind)] if kind else []
        return web.Response(body=msgspec.msgpack.encode(await call(*arguments)))

    return handler


def _failure(status: int, error: str) -> web.Response:
    return web.Response(status=status, body=msgspec.msgpack.encode(CallFailure(error)))


def main() -> None:
    """Start the engine named by the file in argv[1] and serve until killed."""
    job = EngineJob.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        engine = Engine(job)
    except Exception as error:
        report_error(f"the engine did not start with engine: {job.engine!r}: {error!r}")
        raise
    asyncio.run(_serve(engine, job.address, job.interface))


async def _serve(engine: Engine, address: Path, interface: str) -> None:
    try:
        await engine.prepare()
    except Exception as error:
        report_error(f"the engine cannot serve this run: {error}")
        raise
    # `EngineServer._guard` answers the handlers' errors. aiohttp would log requests that are not
    # HTTP, each with a traceback: whoever reaches the port could fill the disk.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    server = EngineServer(engine)
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, address_of(interface), 0)
    await site.start()
    assert runner.addresses
    host, port = runner.addresses[0][:2]
    _publish(address, Address(host, port, server.token, os.getpid(), engine.instance))
    failure = await engine.ended()  # vLLM cannot restart a process that ended
    engine.shutdown()
    if failure is not None:
        report_error(str(failure))
        sys.exit(1)


def _publish(path: Path, address: Address) -> None:
    """Write the address atomically, readable by this user only: it holds the token."""
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
