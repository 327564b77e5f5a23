"""The rollout engine: samples responses, and takes new weights between steps."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from parallel.engine.core import Core
from parallel.engine.wire import (
    PROTOCOL,
    EngineDescription,
    Generate,
    Generation,
    Join,
    Prompt,
    Refit,
    Refitted,
    Sampling,
    model_digest,
)
from parallel.settings import EngineJob
from parallel.weights.transport import host_identity

BEAT_SECONDS = 1.0  # between heartbeats
LIFE_SECONDS = 0.5  # between checks that the processes live

Answer = TypeVar("Answer")


class StepFailed(RuntimeError):
    """An error of vLLM in a step, after which the engine must be restarted."""


# An item of a stream: the responses that ended in a step, by name, or why no more will.
Handed = dict[str, Generation] | StepFailed


class Engine:
    """vLLM in a separate thread, which steps while requests are in flight.

    That thread makes all calls to vLLM, in the order they were requested: a refit, a new request
    and the next step wait for the current step.
    """

    def __init__(self, job: EngineJob) -> None:
        self.model, self.settings = job.model, job.engine
        self.instance = secrets.token_hex(8)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._core: Core = self._thread.submit(Core, job).result()
        self._streams: dict[str, asyncio.Queue[Handed]] = {}
        self._drawing: asyncio.Task | None = None
        self._failure: StepFailed | None = None
        self._stopping = False

    async def prepare(self) -> None:
        """Raise RuntimeError when refits do not fit this vLLM or model, or vLLM cannot sample."""
        await self._ask(self._core.prepare)

    async def describe(self) -> EngineDescription:
        """Return this engine's description."""
        return EngineDescription(
            protocol=PROTOCOL,
            instance=self.instance,
            host=host_identity(),
            model=model_digest(self.model),
            tensor=self.settings.tensor,
            max_model_tokens=self.settings.max_model_tokens,
            max_sequences=self.settings.max_sequences,
            weight_version=self._core.weight_version,
        )

    async def health(self) -> bool:
        """Raise RuntimeError when a step has failed, or a process of the engine has ended."""
        if self._failure is not None:
            raise self._failure
        if self._core.lost_a_rank():
            raise RuntimeError("a process of vLLM has ended")
        return True

    async def ended(self) -> StepFailed | None:
        """Wait until vLLM fails or `stop` is called; return the failed step's error, if any."""
        while not (self._failure or self._core.lost_a_rank() or self._stopping):
            await asyncio.sleep(LIFE_SECONDS)
        return self._failure

    async def stop(self) -> None:
        """Stop soon, once this call is answered."""
        self._stopping = True

    def shutdown(self) -> None:
        """Stop the processes that vLLM has started."""
        self._core.shutdown()

    async def join(self, join: Join) -> None:
        """Join a trainer's refits; its ranks join at the same time."""
        await self._ask(self._core.join, join)

    async def refit(self, refit: Refit) -> Refitted:
        """Take new weights between two steps; requests in flight continue with them."""
        return await self._ask(self._core.refit, refit)

    async def generate(self, asked: Generate) -> AsyncIterator[list[Generation]]:
        """Return a stream of the responses to all prompts; an empty list is a heartbeat.

        Raises:
            NoWeights: there was no refit yet.
            ValueError: a prompt is empty, too long, or has an unknown token.
        """
        for prompt in asked.prompts:  # before any is admitted
            self._check(prompt, asked.sampling)
        names = await self._ask(self._core.admit, asked)
        stream: asyncio.Queue[Handed] = asyncio.Queue()
        self._streams.update(dict.fromkeys(names, stream))
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())
        return self._responses(set(names), stream)

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        length, most = len(prompt.tokens), self.settings.max_model_tokens
        if length == 0:
            raise ValueError(f"prompt {prompt.number} has no tokens")
        if length + sampling.max_tokens > most:
            raise ValueError(
                f"prompt {prompt.number} has {length} tokens, and with {sampling.max_tokens} more"
                f" exceeds engine.max_model_tokens = {most}"
            )
        # vLLM does not check: it would read past the embedding table.
        if min(prompt.tokens) < 0 or max(prompt.tokens) >= self.model.vocabulary_size:
            raise ValueError(
                f"prompt {prompt.number} has a token outside model.vocabulary_size ="
                f" {self.model.vocabulary_size}"
            )

    async def _ask(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call in vLLM's thread, after all earlier calls, and return the result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def _draw(self) -> None:
        """Step until no request is in flight."""
        try:
            while self._streams:
                if self._core.weight_version is None:  # a refit failed; another may follow
                    await asyncio.sleep(LIFE_SECONDS)
                    continue
                ended: dict[asyncio.Queue[Handed], dict[str, Generation]] = {}
                for name, generation in await self._ask(self._core.step):
                    if stream := self._streams.pop(name, None):
                        ended.setdefault(stream, {})[name] = generation
                for stream, generations in ended.items():
                    stream.put_nowait(generations)
        except Exception as error:
            traceback.print_exception(error)
            self._failure = StepFailed(f"a step of vLLM failed: {error!r}")
            for stream in set(self._streams.values()):
                stream.put_nowait(self._failure)

    async def _responses(
        self, owed: set[str], stream: asyncio.Queue[Handed]
    ) -> AsyncIterator[list[Generation]]:
        try:
            while owed:
                try:
                    handed = await asyncio.wait_for(stream.get(), BEAT_SECONDS)
                except TimeoutError:
                    await self._ask(self._core.lost_a_rank)  # answered between two steps
                    handed = {}
                if isinstance(handed, StepFailed):
                    owed = set()  # there is nothing left to abort
                    raise handed
                owed -= handed.keys()
                yield list(handed.values())
        finally:
            if owed:  # the client went away
                for name in owed:
                    self._streams.pop(name, None)
                await self._ask(self._core.abort, owed)
