"""vLLM's LLMEngine: its steps, its weights and its responses, for one thread; and its workers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from parallel.engine.arguments import configuration
from parallel.engine.lockstep import Call, Lockstep, step_or_join
from parallel.engine.wire import (
    EnginePlace,
    Generate,
    Generation,
    Join,
    Prompt,
    RankReport,
    Refit,
    Refitted,
    Sampling,
    Wake,
    effective_top_k,
    keeps_part,
)
from parallel.families import routed_layers
from parallel.settings import EngineJob

SLEEP_TAGS = {"weights", "kv_cache"}  # vLLM's names of what sleeps; `Wake` has one
IDLE_SECONDS = 0.01  # between two agreements of members of which none has requests


class NoWeights(RuntimeError):
    """A request to generate before the first refit, or after one that failed, or while asleep."""


class Core:
    """An LLMEngine whose weights come from a trainer and may change between two steps.

    As a member of a larger engine it steps when any member has requests, and joins, refits, sleeps
    and wakes when all members do: `idle` tells that no member had any at the last step.
    """

    def __init__(self, job: EngineJob) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self.model = job.model
        self.weight_version: int | None = None
        self._asleep: set[str] = set()
        self._first_routed_layer = routed_layers(job.model).start
        self._requests: dict[str, _RunningRequest] = {}
        self._drained: list[tuple[str, Generation]] = []
        self._count = 0
        with configuration(job) as config:
            self._vllm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        group = self._vllm.dp_group
        self._lockstep = None if group is None else Lockstep(group)
        self.idle = False
        # Whether the engine sleeps while the trainer computes.
        self.sleeps: bool = config.model_config.enable_sleep_mode
        self._model_config = config.model_config
        self._masks = config.model_config.return_sampling_mask

    def prepare(self) -> None:
        """Raise RuntimeError when refits do not fit this vLLM or model, or vLLM cannot sample.

        One token is sampled under the initial dummy weights: a missing kernel would otherwise fail
        at the first step, while a trainer waits.
        """
        self._on_every_rank("prepare", self.model.model_dump_json())
        places = self._on_every_rank("place")
        self.places = [msgspec.msgpack.decode(encoded, type=EnginePlace) for encoded in places]
        # What still reads it is a check that would reject requests without a top_k.
        self._model_config.return_sampling_mask = False
        self.weight_version = 0
        self._vllm.set_weight_version("0")
        try:
            self.admit(Generate([Prompt(0, [0], 0)], Sampling(1.0, max_tokens=1, end_tokens=(0,))))
            while self._requests:
                self.step()
            self._meet(Call.START)
        except Exception as error:
            raise RuntimeError(f"vLLM cannot sample from this model here: {error}") from error
        self.weight_version = None
        self._vllm.reset_prefix_cache()

    def lost_a_rank(self) -> bool:
        """Return whether a tensor-parallel process has ended. Thread-safe."""
        return getattr(self._vllm.model_executor, "is_failed", False)

    def join(self, join: Join) -> None:
        """Join a trainer's refits; its ranks join at the same time."""
        self._meet(Call.JOIN)
        self._on_every_rank("join", msgspec.msgpack.encode(join))

    def refit(self, refit: Refit) -> Refitted:
        """Take the new weights and reset the prefix cache.

        Requests in flight are kept: vLLM re-prefills their tokens under the new weights and
        continues. After a failure, also of another member, the engine has no weights until the
        next refit.
        """
        # In this order: tokens of steps in flight belong to the present version, with which vLLM
        # labels them; a failure below must leave no version, since some weights are then new.
        self._meet(Call.REFIT)
        self.drain()
        self.weight_version = None
        reports = self._refit_together(msgspec.msgpack.encode(refit))
        # Cached keys and values are of the old weights. vLLM refuses to drop them while a running
        # request has blocks: it preempts all of them, and prefills their tokens again.
        self._vllm.reset_prefix_cache(reset_running_requests=True)
        self._vllm.set_weight_version(str(refit.version))
        self.weight_version = refit.version
        return Refitted([msgspec.msgpack.decode(report, type=RankReport) for report in reports])

    def sleep(self) -> None:
        """Abort all requests, and free the memory of weights and cache; their values are lost.

        vLLM's level 2: it saves the model's buffers, which no refit brings, and keeps all
        addresses, so that CUDA graphs stay valid. On a CPU vLLM frees nothing.
        """
        self._meet(Call.SLEEP)
        self.abort(list(self._requests))
        self.drain()  # steps that were scheduled before; their tokens have the present weights
        self._drained = []  # nobody waits for what ended
        self.weight_version = None
        if self._asleep == SLEEP_TAGS:
            return
        for tag in self._asleep:  # vLLM does nothing where a part is asleep already
            self._vllm.wake_up([tag])
        self._vllm.sleep(level=2)
        self._asleep = set(SLEEP_TAGS)

    def wake(self, wake: Wake) -> None:
        """Allocate weights or cache again; requests need a refit first, and both."""
        self._meet(Call.WAKE)
        if wake.part in self._asleep:
            self._vllm.wake_up([wake.part])
            self._asleep.remove(wake.part)
            if wake.part == "kv_cache":
                self._on_every_rank("clear_cache")

    def admit(self, request: Generate) -> list[str]:
        """Add a request for every prompt; return the requests' names.

        All of them reach the scheduler between two steps, so that the same call makes the same
        batches. Raises NoWeights before the first refit.
        """
        from vllm.inputs import tokens_input

        if self.weight_version is None:
            raise NoWeights("the engine has no weights yet; refit it first")
        if self._asleep:
            raise NoWeights("the engine sleeps; wake its cache first")
        names: list[str] = []
        try:
            for prompt in request.prompts:
                self._count += 1
                name = str(self._count)
                parameters = self._parameters(request.sampling, prompt.seed)
                tokens = tokens_input(prompt.tokens)
                self._vllm.add_request(name, tokens, parameters, priority=prompt.priority)
                self._requests[name] = _RunningRequest(prompt.number, request.sampling)
                names.append(name)
        except Exception:
            self.abort(names)
            raise
        return names

    def step(self) -> list[tuple[str, Generation]]:
        """Sample one token of each request in flight; return the responses that ended, by name."""
        if self._lockstep is not None:
            self._step_together(self._lockstep, Call.NONE)
        ended, self._drained = self._drained, []
        if self._lockstep is not None or self.weight_version is None or not self._requests:
            return ended  # a refit failed, or a drain ended all requests
        return ended + self._ended(self._vllm.step())

    def _meet(self, call: Call) -> None:
        """Wait until all members of the engine are here, and step with them until then.

        None of them steps before all have left again: each step begins with an agreement of all.
        """
        while self._lockstep is not None and not self._step_together(self._lockstep, call):
            if self.idle:
                time.sleep(IDLE_SECONDS)

    def _step_together(self, lockstep: Lockstep, waiting: Call) -> bool:
        """Step if any member has requests that it can serve, unless all wait; return whether."""
        able = self.weight_version is not None and bool(self._requests)
        agreed = lockstep.agree(able, waiting)
        self.idle = not agreed.working
        if agreed.working and not agreed.waiting:
            self._drained += self._ended(step_or_join(self._vllm))
        return agreed.waiting

    def _refit_together(self, message: bytes) -> list[Any]:
        """Return every rank's report. Raises RuntimeError where the refit of any member fails.

        A member that has its weights would else compute with the experts of one that has not.
        """
        reports: list[Any] | None = None
        try:
            reports = self._on_every_rank("refit", message)
        finally:
            together = self._lockstep is None or self._lockstep.all_succeeded(reports is not None)
        if reports is None or not together:
            raise RuntimeError("the refit of another member of this engine failed")
        return reports

    def drain(self) -> None:
        """Wait for the steps in flight; the next step returns the responses that they ended.

        With asynchronous scheduling vLLM schedules a step while another runs. Their tokens have
        the present weights: a refit, or sleep, must find none half done.
        """
        core = self._vllm.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)  # steps schedule nothing new
        try:
            while core.batch_queue:
                self._drained += self._ended(self._vllm.step())
        finally:
            core.resume_scheduler()

    def _ended(self, outputs: list[Any]) -> list[tuple[str, Generation]]:
        """Return the responses that a step ended, by name."""
        ended = []
        for output in outputs:
            if output.finished and (request := self._requests.pop(output.request_id, None)):
                [completion] = output.outputs
                ended.append((output.request_id, self._generation(request, completion)))
        return ended

    def abort(self, names: Iterable[str]) -> None:
        """Abort those of the requests that are in flight."""
        running = [name for name in names if self._requests.pop(name, None)]
        self._vllm.abort_request(running)

    def shutdown(self) -> None:
        """Stop the tensor-parallel processes."""
        self._vllm.engine_core.shutdown()

    def _on_every_rank(self, method: str, *arguments: Any) -> list[Any]:
        """Return the results of a method of `RefitExtension` on every tensor-parallel rank."""
        return self._vllm.engine_core.collective_rpc(method, args=arguments)

    def _parameters(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if keeps_part(sampling.top_k, sampling.top_p) and not self._masks:
            raise ValueError(
                f"top_k = {sampling.top_k} and top_p = {sampling.top_p} keep a part of the"
                " vocabulary, and this engine was started without sampling_mask; start it with one"
            )
        return SamplingParams(
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=effective_top_k(sampling.top_k, sampling.top_p, self.model.vocabulary_size),
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.end_tokens),
            ignore_eos=True,  # the configuration's end token need not be one of them
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _generation(self, request: _RunningRequest, completion: Any) -> Generation:
        sampling = request.sampling
        tokens = np.asarray(completion.token_ids, np.int32)
        sampled = list(zip(tokens.tolist(), completion.logprobs, strict=True))
        logprobs = np.asarray([entry[token].logprob for token, entry in sampled], np.float32)
        # vLLM has entries for all layers; those of the leading dense layers are empty.
        routes = completion.routed_experts[:, self._first_routed_layer :].astype(np.uint16)
        sets = kept_sets(completion, sampling, self.model.vocabulary_size)
        return Generation(
            number=request.number,
            tokens=tokens.tobytes(),
            logprobs=logprobs.tobytes(),
            routes=routes.tobytes(),
            routes_shape=routes.shape,
            finished=bool(len(tokens)) and int(tokens[-1]) in sampling.end_tokens,
            versions=token_versions(completion).tobytes(),
            kept=b"".join(ids.tobytes() for ids in sets),
            kept_sizes=np.asarray([len(ids) for ids in sets], np.int32).tobytes(),
        )


@dataclass
class _RunningRequest:
    """A request in flight."""

    number: int
    sampling: Sampling


def token_versions(completion: Any) -> np.ndarray:
    """Return the weight version that sampled each token, int32 [tokens].

    `completion` is a CompletionOutput of vLLM's, which has spans of them.
    """
    spans = completion.weight_versions
    versions = [int(span.version) for span in spans]
    return np.repeat(np.asarray(versions, np.int32), [span.end - span.start for span in spans])


def kept_sets(completion: Any, sampling: Sampling, vocabulary: int) -> list[np.ndarray]:
    """Return the set that each token was sampled from; no sets where all ids are kept.

    `completion` is a CompletionOutput of vLLM's, with a mask for each token of an engine that
    returns masks. The mask of a token that keeps all ids is empty (`empty_whole_masks`).
    """
    if not keeps_part(sampling.top_k, sampling.top_p):
        return []
    whole = range(vocabulary)
    return [np.asarray(ids or whole, np.int32) for ids in completion.sampling_mask.token_ids]


class LostWorkers(RuntimeError):
    """The workers of this node have ended, by themselves or with the first node's process."""


def follow(job: EngineJob) -> None:
    """Run this node's workers, without a server, until one ends; for nodes but the first.

    The first node's process schedules, and its messages drive all workers. Any process that ends
    badly ends the engine's Slurm step, and the launcher restarts the whole engine.

    Raises:
        LostWorkers: always in the end; a clean end would leave the step's other tasks running.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with configuration(job) as config:
        # As `vllm serve --headless` does where its node is not the first.
        executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    raise LostWorkers(f"the workers of engine {job.index} on this node have ended")
