"""The process of a rollout engine: samples responses, and takes new weights between steps.

    python -m parallel.engine.server ENGINE.json

ENGINE.json holds an `EngineJob`. When the engine is ready it writes its `Address` to the file named
by "address"; until its first refit it rejects requests to generate. It serves one stage after
another.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from parallel.engine.arguments import own_gpus
from parallel.engine.core import IDLE_SECONDS, Core, LostWorkers, follow
from parallel.engine.lockstep import OutOfStep
from parallel.engine.nodes import node_rank
from parallel.engine.wire import (
    BEAT,
    LARGEST_MESSAGE,
    PROTOCOL,
    Address,
    CallFailure,
    EngineDescription,
    Generate,
    Generation,
    Join,
    Refit,
    Wake,
    frame,
    model_digest,
)
from parallel.errors import report_error, valid_text
from parallel.estimates.engine_memory import engine_share
from parallel.machine.gpus import built_for_cpu, wait_for_memory
from parallel.machine.network import address_of
from parallel.settings import EngineJob
from parallel.timeline import open_timeline, phase

BEAT_SECONDS = 1.0  # between heartbeats
LIFE_SECONDS = 0.5  # between checks that the processes live
LAUNCHER_SECONDS = 60.0  # the launcher counts a start from the spawn, before the imports
RELEASE_SECONDS = 60.0  # in which the driver frees the memory of a process that ended

Answer = TypeVar("Answer")


class StepFailed(RuntimeError):
    """An error of vLLM in a step, after which the engine must be restarted."""


# An item of a stream: the name and response of a request that ended, or why no more will.
Handed = tuple[str, Generation] | StepFailed


class Engine:
    """vLLM in a separate thread, which steps while requests are in flight.

    That thread makes all calls to vLLM, in the order they were requested: a refit, a new request
    and the next step wait for the current step.
    """

    def __init__(self, job: EngineJob) -> None:
        self.model, self.settings = job.model, job.engine
        self.instance = secrets.token_hex(8)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self.core: Core = self._thread.submit(Core, job).result()
        self._streams: dict[str, asyncio.Queue[Handed]] = {}
        self._drawing: asyncio.Task | None = None
        self.failure: StepFailed | None = None

    async def ask(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call in vLLM's thread, after all earlier calls, and return the result."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, call, *arguments)
        except OutOfStep as error:
            self.failure = self.failure or StepFailed(str(error))
            raise

    async def describe(self) -> EngineDescription:
        """Return this engine's description."""
        return EngineDescription(
            protocol=PROTOCOL,
            instance=self.instance,
            places=self.core.places,
            model=model_digest(self.model),
            tensor=self.settings.tensor,
            data=self.settings.data,
            expert_parallel=self.settings.expert_parallel,
            max_model_tokens=self.settings.max_model_tokens,
            max_sequences=self.settings.max_sequences,
            weight_version=self.core.weight_version,
        )

    async def health(self) -> bool:
        """Raise RuntimeError when a step has failed, or a process of the engine has ended."""
        if self.failure is not None:
            raise self.failure
        if self.core.lost_a_rank():
            raise RuntimeError("a process of vLLM has ended")
        return True

    async def generate(self, request: Generate) -> AsyncIterator[Generation | None]:
        """Return a stream of the responses to all prompts; None is a heartbeat.

        Raises:
            NoWeights: there was no refit yet.
            ValueError: a prompt is empty, too long, or has an unknown token.
        """
        most, vocabulary = self.settings.max_model_tokens, self.model.vocabulary_size
        for prompt in request.prompts:  # before any is admitted
            length, further = len(prompt.tokens), request.sampling.max_tokens
            if length == 0:
                raise ValueError(f"prompt {prompt.number} has no tokens")
            if length + further > most:
                raise ValueError(
                    f"prompt {prompt.number} has {length} tokens, and with {further} more"
                    f" exceeds engine.max_model_tokens = {most}"
                )
            # vLLM does not check: it would read past the embedding table.
            if min(prompt.tokens) < 0 or max(prompt.tokens) >= vocabulary:
                raise ValueError(
                    f"prompt {prompt.number} has a token outside model.vocabulary_size ="
                    f" {vocabulary}"
                )
        names = await self.ask(self.core.admit, request)
        # No await before the names are in `_streams`: a response may end with the next step.
        stream: asyncio.Queue[Handed] = asyncio.Queue()
        self._streams.update(dict.fromkeys(names, stream))
        self.draw()
        return self._responses(set(names), stream)

    def draw(self) -> None:
        """Begin to step, unless this engine does."""
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())

    async def sleep(self) -> None:
        """Abort all requests and free the memory of weights and cache."""
        dropped = StepFailed("the engine was put to sleep")
        for stream in set(self._streams.values()):
            stream.put_nowait(dropped)
        self._streams.clear()
        await self.ask(self.core.sleep)

    async def _draw(self) -> None:
        """Step until no request is in flight; as a member of an engine, for ever."""
        with phase("sample"):
            await self._step()

    async def _step(self) -> None:
        alone = self.settings.data == 1
        try:
            while self._streams or not alone:
                if alone and self.core.weight_version is None:  # a refit failed
                    await asyncio.sleep(LIFE_SECONDS)
                    continue
                for name, generation in await self.ask(self.core.step):
                    if stream := self._streams.pop(name, None):
                        stream.put_nowait((name, generation))
                if self.core.idle:
                    await asyncio.sleep(IDLE_SECONDS)
        except Exception as error:
            traceback.print_exception(error)
            self.failure = StepFailed(f"a step of vLLM failed: {error!r}")
            for stream in set(self._streams.values()):
                stream.put_nowait(self.failure)

    async def _responses(
        self, unanswered: set[str], stream: asyncio.Queue[Handed]
    ) -> AsyncIterator[Generation | None]:
        try:
            while unanswered:
                try:
                    handed = await asyncio.wait_for(stream.get(), BEAT_SECONDS)
                except TimeoutError:
                    await self.ask(self.core.lost_a_rank)  # answered between two steps
                    yield None
                    continue
                if isinstance(handed, StepFailed):
                    unanswered = set()  # there is nothing left to abort
                    raise handed
                unanswered.remove(handed[0])
                yield handed[1]
        finally:
            if unanswered:  # the client went away
                for name in unanswered:
                    self._streams.pop(name, None)
                await self.ask(self.core.abort, unanswered)


class EngineServer:
    """The HTTP side of an engine, which answers `client.EngineClient`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.token = secrets.token_urlsafe(32)

    def application(self) -> web.Application:
        """Return an application with one route per call, each behind the token."""
        engine = self.engine
        calls = {
            "describe": _answering(None, engine.describe),
            "health": _answering(None, engine.health),
            "join": _answering(Join, lambda join: engine.ask(engine.core.join, join)),
            "refit": self._refit,
            "sleep": _answering(None, engine.sleep),
            "wake": _answering(Wake, lambda wake: engine.ask(engine.core.wake, wake)),
            "generate": self._generate,
        }
        application = web.Application(middlewares=[self._guard], client_max_size=LARGEST_MESSAGE)
        application.add_routes([web.post(f"/{name}", call) for name, call in calls.items()])
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode(errors="replace")
        status, problem = 403, "wrong token"
        if hmac.compare_digest(shown, f"Bearer {self.token}".encode()):
            try:
                return await handler(request)
            except web.HTTPException as error:
                status, problem = error.status, f"{request.path}: {error.reason}"
            except Exception as error:  # the client decides what it means
                status, problem = 500, valid_text(f"{type(error).__name__}: {error}")
        return web.Response(status=status, body=msgspec.msgpack.encode(CallFailure(problem)))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Stream responses; the requests of a client that disconnects are aborted."""
        message = msgspec.msgpack.decode(await request.read(), type=Generate)
        responses = await self.engine.generate(message)
        stream = web.StreamResponse()
        await stream.prepare(request)
        try:
            async for ended in responses:
                await stream.write(frame(ended) if ended else BEAT)
        except StepFailed as error:
            await stream.write(frame(CallFailure(str(error))))
        await stream.write_eof()
        return stream

    async def _refit(self, request: web.Request) -> web.StreamResponse:
        """Send the answer, and heartbeats until then: the trainer's ranks may take long."""
        message = msgspec.msgpack.decode(await request.read(), type=Refit)
        stream = web.StreamResponse()
        await stream.prepare(request)
        refit = asyncio.ensure_future(self.engine.ask(self.engine.core.refit, message))
        refit.add_done_callback(_print_error)  # also when the client has disconnected
        with phase("weight sync", waits_for="the trainer"):
            while not (await asyncio.wait({refit}, timeout=BEAT_SECONDS))[0]:
                await stream.write(BEAT)
        if error := refit.exception():
            await stream.write(frame(CallFailure(f"{type(error).__name__}: {error}")))
        else:
            await stream.write(frame(refit.result()))
        await stream.write_eof()
        return stream


def _print_error(call: asyncio.Future[Any]) -> None:
    if not call.cancelled() and (error := call.exception()):
        traceback.print_exception(error)


def _answering(kind: Any, call: Callable[..., Awaitable[Any]]) -> Any:
    async def handler(request: web.Request) -> web.Response:
        body = await request.read()
        arguments = [msgspec.msgpack.decode(body, type=kind)] if kind else []
        return web.Response(body=msgspec.msgpack.encode(await call(*arguments)))

    return handler


def main() -> None:
    """Start the engine named by the file in argv[1] and serve until killed.

    Of an engine over several nodes only the first node's process serves.
    """
    # `scancel` signals every process of a job: without engines the ranks could not finish the step
    # that they save. The launcher kills engines.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = EngineJob.model_validate_json(Path(sys.argv[1]).read_text())
    open_timeline(job.address.with_name("timeline.jsonl"))
    with phase("wait", waits_for="memory of its GPUs"):
        wait_for_room(job)
    try:
        if node_rank(job) > 0:
            follow(job)
        with phase("load"):
            engine = Engine(job)
    except LostWorkers as error:
        report_error(str(error))
        sys.exit(1)
    except Exception as error:
        report_error(f"the engine did not start with engine: {job.engine!r}: {error!r}")
        raise
    asyncio.run(_serve(engine, job))


def wait_for_room(job: EngineJob) -> None:
    """Wait until the engine's GPUs have the least memory that it starts in.

    An engine that restarts while the trainer computes finds its GPUs full, until the trainer's turn
    ends. Exits where that takes longer than a start may, and before the launcher ends the start. On
    GPUs of its own only an earlier process of it is in the way, and it ends soon.
    """
    needed, shared = engine_share(job.model, job.engine).least, job.engine.placement == "shared"
    if job.gpu_memory_bytes is not None:
        needed = min(needed, job.gpu_memory_bytes)
    elif shared or built_for_cpu():
        return

    def free() -> list[int]:
        return [gpu.free_bytes for gpu in own_gpus(job)]

    most = job.engine.start_seconds
    seconds = max(most - LAUNCHER_SECONDS, most / 10) if shared else min(RELEASE_SECONDS, most / 10)
    if not wait_for_memory(free, needed, seconds) and shared:
        report_error(
            f"the engine needs {needed >> 20} MiB of each GPU, and {min(free()) >> 20} MiB were"
            f" free for {seconds:g} s of {most} (engine.start_timeout_seconds); the trainer's turn"
            " is longer: raise it, or set engine.placement: own"
        )
        sys.exit(1)


async def _serve(engine: Engine, job: EngineJob) -> None:
    try:
        await engine.ask(engine.core.prepare)
        if engine.core.sleeps:  # before a trainer finds its address, and needs the memory
            await engine.ask(engine.core.sleep)
    except Exception as error:
        report_error(f"the engine cannot serve this run: {error}")
        raise
    # `EngineServer._guard` answers the handlers' errors. aiohttp would log requests that are not
    # HTTP, each with a traceback: whoever reaches the port could fill the disk.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    server = EngineServer(engine)
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address_of(job.interface), 0).start()
    host, port = runner.addresses[0][:2]
    address = Address(host, port, server.token, os.getpid(), engine.instance)
    unfinished = job.address.with_suffix(".tmp")  # readable by this user only: it holds the token
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    unfinished.rename(job.address)
    if job.engine.data > 1:
        engine.draw()
    while not (engine.failure or engine.core.lost_a_rank()):
        await asyncio.sleep(LIFE_SECONDS)
    engine.core.shutdown()  # vLLM cannot restart a process that ended
    if engine.failure is not None:
        report_error(str(engine.failure))
        sys.exit(1)
    if job.nodes > 1:
        sys.exit(1)  # so that Slurm ends the tasks on the other nodes


if __name__ == "__main__":
    main()
