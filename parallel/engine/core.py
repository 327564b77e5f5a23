"""vLLM itself: what it is started with, its steps, and its weights. One thread may call it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from parallel.engine.environment import PROCESS_ENVIRONMENT
from parallel.engine.wire import (
    Generate,
    Generation,
    Join,
    Prompt,
    RankReport,
    Refit,
    Refitted,
    Sampling,
    keeps_part,
    kept_limits,
)
from parallel.families import routed_layers
from parallel.memory import CACHE_BLOCK, cache_bytes
from parallel.settings import EngineJob

ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BATCHED_TOKENS = 8192  # that are read together, of prompts


class NoWeights(RuntimeError):
    """The engine was asked to generate before its first refit, or after one that failed."""


class Core:
    """vLLM's LLMEngine, whose weights come from a trainer and may change between two steps."""

    def __init__(self, job: EngineJob) -> None:
        os.environ.update(PROCESS_ENVIRONMENT)  # of an engine that no launcher started
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from parallel.hugging_face.config import hugging_face_config

        self.model = job.model
        self.weight_version: int | None = None
        self._first_routed_layer = routed_layers(job.model).start
        self._requests: dict[str, _Request] = {}
        self._count = 0
        with tempfile.TemporaryDirectory(prefix="braid-engine-") as directory:
            hugging_face_config(job.model).save_pretrained(directory)
            config = EngineArgs(**_arguments(job, directory)).create_engine_config()
            _prepare_cpu(config, job)
            self._vllm = LLMEngine.from_vllm_config(config, disable_log_stats=True)

    def prepare(self) -> None:
        """Raises RuntimeError when a refit would not fit this vLLM or this model, or when vLLM
        cannot draw from it here."""
        self._on_every_rank("prepare", self.model.model_dump_json())
        try:
            self._draw_once()
        except Exception as error:
            raise RuntimeError(f"vLLM cannot draw from this model here: {error}") from error

    def lost_a_rank(self) -> bool:
        """Whether a process of tensor parallelism has ended; any thread may ask."""
        return getattr(self._vllm.model_executor, "is_failed", False)

    def join(self, join: Join) -> None:
        """Take a place in a trainer's refits; its ranks join meanwhile."""
        self._on_every_rank("join", msgspec.msgpack.encode(join))

    def refit(self, refit: Refit) -> Refitted:
        """Take the weights and forget what was cached under the old ones.

        Responses under way are kept: what they have is read again under the new weights, and goes
        on under them. After a failure the engine has no weights until it is refitted.
        """
        if self._requests:
            [progress, *_] = self._on_every_rank("progress")
            for request in self._requests.values():
                request.note(progress.get(request.inside, 0), self.weight_version)
        self.weight_version = None
        reports = self._on_every_rank("refit", msgspec.msgpack.encode(refit))
        self._vllm.reset_prefix_cache(reset_running_requests=True)
        self.weight_version = refit.version
        return Refitted([msgspec.msgpack.decode(report, type=RankReport) for report in reports])

    def admit(self, asked: Generate) -> list[str]:
        """Begin a response to every prompt; returns their names.

        All of them reach the scheduler between two steps, so that the same call makes the same
        batches. Raises NoWeights.
        """
        if self.weight_version is None:
            raise NoWeights("the engine has no weights yet; refit it first")
        names: list[str] = []
        try:
            for prompt in asked.prompts:
                names.append(self._admit(prompt, asked.sampling))
        except Exception:
            self.abort(names)
            raise
        return names

    def step(self) -> list[tuple[str, Generation]]:
        """Draw one more token of what is under way; the responses that ended, by name.

        Without weights, since a refit has failed, nothing is drawn.
        """
        if self.weight_version is None:
            return []
        ended = []
        outputs: list[Any] = self._vllm.step()
        for output in outputs:
            if output.finished and (request := self._requests.pop(output.request_id, None)):
                [completion] = output.outputs
                request.note(len(completion.token_ids), self.weight_version)
                ended.append((output.request_id, self._generation(request, completion)))
        return ended

    def abort(self, names: Iterable[str]) -> None:
        """Give up what of these is still under way."""
        running = [name for name in names if self._requests.pop(name, None)]
        self._vllm.abort_request(running)

    def shutdown(self) -> None:
        """End the processes of tensor parallelism."""
        self._vllm.engine_core.shutdown()

    def _draw_once(self) -> None:
        """Draw a token under the weights that vLLM began with: what it has no kernel for fails
        now, and not when a trainer waits for it."""
        self.weight_version = 0
        self.admit(Generate([Prompt(0, [0], 0)], Sampling(1.0, max_tokens=1, end_token=0)))
        while self._requests:
            self.step()
        self.weight_version = None
        self._vllm.reset_prefix_cache()

    def _on_every_rank(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of `RefitExtension` answers on each rank of tensor parallelism."""
        return self._vllm.engine_core.collective_rpc(method, args=arguments)

    def _admit(self, prompt: Prompt, sampling: Sampling) -> str:
        from vllm.inputs import tokens_input

        self._count += 1
        parameters = _parameters(sampling, prompt.seed, self.model.vocabulary_size)
        name = f"{self._count}"
        tokens = tokens_input(prompt.tokens)
        inside = self._vllm.add_request(name, tokens, parameters, priority=prompt.priority)
        self._requests[name] = _Request(prompt.number, sampling, inside)
        return name

    def _generation(self, request: _Request, completion: Any) -> Generation:
        sampling = request.sampling
        tokens = np.asarray(completion.token_ids, np.int32)
        drawn = list(zip(tokens.tolist(), completion.logprobs, strict=True))
        logprobs = np.asarray([entry[token].logprob for token, entry in drawn], np.float32)
        # vLLM counts all layers, and has nothing to say of the dense ones before.
        routes = completion.routed_experts[:, self._first_routed_layer :].astype(np.uint16)
        kept: list[np.ndarray] = []
        if keeps_part(sampling.top_k, sampling.top_p):
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
    """One response under way, and the weights that its tokens were drawn with.

    `inside` is what vLLM's workers call it.
    """

    def __init__(self, number: int, sampling: Sampling, inside: str) -> None:
        self.number = number
        self.sampling = sampling
        self.inside = inside
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
        "async_scheduling": False,  # a refit falls between two steps: none may be half done
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
        "worker_extension_cls": "parallel.engine.refit_extension.RefitExtension",
        "seed": job.seed,
    }


def _prepare_cpu(config: Any, job: EngineJob) -> None:
    """On a CPU, fork vLLM's processes, which have then imported everything, and give each rank its
    cores; vLLM would start each anew, in a quarter of a minute. Use the norms that are fused."""
    if config.device_config.device_type != "cpu":
        return
    from parallel.cpu import vllm_kernels as cpu_kernels

    cpu_kernels.prefer(config.kernel_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if job.engine.tensor > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = np.array_split(cores, job.engine.tensor)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share if len(share) else cores[:1])) for share in shares
        )


def _parameters(sampling: Sampling, seed: int, vocabulary: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    top_k, logprobs = kept_limits(sampling.top_k, sampling.top_p, vocabulary)
    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[sampling.end_token],
        ignore_eos=True,  # that of the configuration, which knows no tokenizer
        logprobs=logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
