"""One vLLM engine: draws responses, and takes new weights, in between or in flight."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np

from parallel.families import routed_layers
from parallel.memory import CACHE_BLOCK, cache_bytes
from parallel.rollout.wire import (
    PROTOCOL,
    Description,
    Generate,
    Generation,
    Join,
    Prompt,
    RankReport,
    Refit,
    Refitted,
    Sampling,
    model_digest,
)
from parallel.settings import EngineJob
from parallel.weights.transport import host_identity

# How vLLM is run, not what it computes: no compilation, no telemetry, no downloads. With 0 the
# engine's core computes by itself where it has one rank, which spares a process and its messages.
PROCESS_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    # OpenMP's threads spin while they wait for one another; beside another busy process that made
    # tiny layers ten times slower.
    "GOMP_SPINCOUNT": "1000",
}

ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BATCHED_TOKENS = 8192  # that are read together, of prompts
BEAT_SECONDS = 1.0  # between signs of life
LIFE_SECONDS = 0.5  # how often the engine looks whether its processes live


class Engine:
    """vLLM's AsyncLLM, whose weights come from a trainer."""

    def __init__(self, job: EngineJob) -> None:
        os.environ.update(PROCESS_ENVIRONMENT)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from parallel.hugging_face import hugging_face_config

        self.model, self.settings = job.model, job.engine
        self.instance = secrets.token_hex(8)
        self.weight_version: int | None = None
        self.first_routed_layer = routed_layers(job.model).start
        self._requests: dict[str, _Request] = {}
        self._admission = asyncio.Lock()
        self._count = 0
        self._stopping = False
        with tempfile.TemporaryDirectory(prefix="braid-engine-") as directory:
            hugging_face_config(job.model).save_pretrained(directory)
            arguments = AsyncEngineArgs(**_arguments(job, directory))
            config = arguments.create_engine_config()
            _prepare_cpu(config, job)
            self.llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    async def prepare(self) -> None:
        """Raises RuntimeError when a refit would not fit this vLLM or this model."""
        await self.llm.collective_rpc("prepare", args=(self.model.model_dump_json(),))

    async def describe(self) -> Description:
        """What this engine is."""
        return Description(
            protocol=PROTOCOL,
            instance=self.instance,
            host=host_identity(),
            model=model_digest(self.model),
            tensor=self.settings.tensor,
            max_model_tokens=self.settings.max_model_tokens,
            max_sequences=self.settings.max_sequences,
            weight_version=self.weight_version,
        )

    async def health(self) -> bool:
        """Raises when a process of the engine has ended."""
        await self.llm.check_health()
        return True

    async def ended(self) -> None:
        """Return when a process of the engine has ended, or when it was told to stop."""
        while not (self.llm.errored or self._stopping):
            await asyncio.sleep(LIFE_SECONDS)

    async def stop(self) -> None:
        """End soon, once the call is answered."""
        self._stopping = True

    async def join(self, join: Join) -> None:
        """Take a place in a trainer's refits; its ranks join meanwhile."""
        await self.llm.collective_rpc("join", args=(msgspec.msgpack.encode(join),))

    async def refit(self, refit: Refit) -> Refitted:
        """Pause, take the weights, forget what was cached under the old ones, and go on.

        Responses under way are kept: what they have is read again under the new weights, and goes
        on under them. After a failure the engine has no weights until it is refitted.
        """
        async with self._admission:
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            if self._requests:
                [progress, *_] = await self.llm.collective_rpc("progress")
                for name, tokens in progress.items():
                    if request := self._requests.get(name):
                        request.note(tokens, self.weight_version)
            self.weight_version = None
            reports = await self.llm.collective_rpc("refit", args=(msgspec.msgpack.encode(refit),))
            await self.llm.reset_prefix_cache(reset_running_requests=True)
            self.weight_version = refit.version
            await self.llm.resume_generation()
        return Refitted([msgspec.msgpack.decode(report, type=RankReport) for report in reports])

    async def generate(self, asked: Generate) -> AsyncIterator[Generation | None]:
        """Responses to all prompts, as they end; None now and then, while the engine computes.

        Raises RuntimeError before the first refit, and ValueError for a prompt that cannot be read.
        """
        for prompt in asked.prompts:  # before any is admitted
            self._check(prompt, asked.sampling)
        async with self._admission:
            if self.weight_version is None:
                raise RuntimeError("the engine has no weights yet; refit it first")
            if asked.together:
                await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            try:
                requests = [await self._admit(prompt, asked.sampling) for prompt in asked.prompts]
            finally:
                if asked.together:
                    await self.llm.resume_generation()
        return self._responses(requests, asked.sampling)

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        length, most = len(prompt.tokens), self.settings.max_model_tokens
        if length == 0:
            raise ValueError(f"prompt {prompt.number} has no tokens")
        if length + sampling.max_tokens > most:
            raise ValueError(
                f"prompt {prompt.number} of {length} tokens leaves no room for"
                f" {sampling.max_tokens} within engine.max_model_tokens = {most}"
            )
        # vLLM would read past the table of embeddings.
        if min(prompt.tokens) < 0 or max(prompt.tokens) >= self.model.vocabulary_size:
            raise ValueError(
                f"prompt {prompt.number} has tokens that model.vocabulary_size ="
                f" {self.model.vocabulary_size} does not hold"
            )

    async def _admit(self, prompt: Prompt, sampling: Sampling) -> _Request:
        from vllm.inputs import tokens_input

        self._count += 1
        queue = await self.llm.add_request(
            f"{self._count}",
            tokens_input(prompt.tokens),
            _parameters(sampling, prompt.seed, self.model.vocabulary_size),
            priority=prompt.priority,
        )
        request = _Request(prompt.number, queue)
        self._requests[queue.request_id] = request
        return request

    async def _responses(
        self, requests: list[_Request], sampling: Sampling
    ) -> AsyncIterator[Generation | None]:
        waiting = {
            asyncio.ensure_future(self._completion(request)): request for request in requests
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    waiting, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await self.llm.is_paused()  # the core answers between two of its steps
                    yield None
                for future in done:
                    request = waiting.pop(future)
                    yield self._generation(request, future.result(), sampling)
                    self._forget(request)
        finally:
            for future, request in waiting.items():
                future.cancel()
                self._forget(request)
                await self.llm.abort(request.queue.request_id, internal=True)

    async def _completion(self, request: _Request) -> Any:
        """What vLLM has drawn. Its versions are settled here and now: the client may read slowly,
        and ask for a refit before it has read all."""
        [completion] = (await request.queue.get()).outputs
        request.note(len(completion.token_ids), self.weight_version)
        return completion

    def _forget(self, request: _Request) -> None:
        self._requests.pop(request.queue.request_id, None)
        request.queue.close()

    def _generation(self, request: _Request, completion: Any, sampling: Sampling) -> Generation:
        tokens = np.asarray(completion.token_ids, np.int32)
        drawn = list(zip(tokens.tolist(), completion.logprobs, strict=True))
        logprobs = np.asarray([entry[token].logprob for token, entry in drawn], np.float32)
        # vLLM counts all layers, and has nothing to say of the dense ones before.
        routes = completion.routed_experts[:, self.first_routed_layer :].astype(np.uint16)
        kept: list[np.ndarray] = []
        if _keeps(sampling):
            kept = [
                np.asarray([t for t, e in entry.items() if math.isfinite(e.logprob)], np.int32)
                for _, entry in drawn
            ]
        return Generation(
            number=request.number,
            tokens=tokens.tobytes(),
            logprobs=logprobs.tobytes(),
            routes=routes.tobytes(),
            routes_shape=routes.shape,
            finished=bool(len(tokens)) and int(tokens[-1]) == sampling.end_token,
            versions=request.versions(len(tokens)).tobytes(),
            kept=b"".join(each.tobytes() for each in kept),
            kept_sizes=np.asarray([len(each) for each in kept], np.int32).tobytes(),
        )


class _Request:
    """One response under way, and the weights that its tokens were drawn with."""

    def __init__(self, number: int, queue: Any) -> None:
        self.number = number
        self.queue = queue
        self._versions: list[int | None] = []

    def note(self, tokens: int, version: int | None) -> None:
        """So many tokens are drawn, those that are new with these weights."""
        self._versions += [version] * (tokens - len(self._versions))

    def versions(self, tokens: int) -> np.ndarray:
        """Of every token, int32 [tokens]; vLLM may have drawn one more than the response has."""
        return np.asarray(self._versions[:tokens], np.int32)


def _arguments(job: EngineJob, directory: str) -> dict[str, Any]:
    """vLLM's settings; the first refit brings the weights."""
    engine = job.engine
    return {
        "model": directory,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": ENGINE_DTYPES[job.model.precision],
        "enforce_eager": True,
        "tensor_parallel_size": engine.tensor,
        "distributed_executor_backend": "uni" if engine.tensor == 1 else "mp",
        "max_model_len": engine.max_model_tokens,
        "max_num_seqs": engine.max_sequences,
        # vLLM cannot take a seeded request's draw back on a CPU, as it does in half-read prompts.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(engine.max_model_tokens, BATCHED_TOKENS),
        "scheduling_policy": "priority",
        "block_size": CACHE_BLOCK,
        "kv_cache_memory_bytes": cache_bytes(job.model, engine),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "enable_return_routed_experts": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": "parallel.rollout.refit_extension.RefitExtension",
        "seed": job.seed,
    }


def _prepare_cpu(config: Any, job: EngineJob) -> None:
    """On a CPU, fork vLLM's processes, which have then imported everything, and give each rank its
    cores; vLLM would start each anew, in a quarter of a minute."""
    if config.device_config.device_type != "cpu":
        return
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if job.engine.tensor > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = np.array_split(cores, job.engine.tensor)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share if len(share) else cores[:1])) for share in shares
        )


def _keeps(sampling: Sampling) -> bool:
    return sampling.top_p < 1.0 or sampling.top_k > 0


def _parameters(sampling: Sampling, seed: int, vocabulary: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[sampling.end_token],
        ignore_eos=True,  # that of the configuration, which knows no tokenizer
        # Of all tokens that may have been kept; what was not has no finite log-probability.
        logprobs=(sampling.top_k or vocabulary) if _keeps(sampling) else 0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
