"""The protocol of an engine and its clients: typed MessagePack over HTTP, never pickles.

A client validates every response before it becomes a Sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np

from parallel.families import routed_layers
from parallel.sample import Sample
from parallel.settings import ModelSettings
from parallel.weights.mapping import SharedMemory
from parallel.weights.transport import Meeting

PROTOCOL = 9  # version of this file, the same at both ends

LARGEST_MESSAGE = 1 << 30  # bytes of a request, or of one message of a streamed answer
LENGTH_BYTES = 4  # a frame of a streamed answer begins with its length, big-endian
BEAT = bytes(LENGTH_BYTES)  # an empty frame: a heartbeat
MOST_KEPT = 4096  # ids that top_p keeps without a top_k: each is an object in vLLM's answer
TIES = 64  # ids as likely as the last that top_k keeps
ROUNDING = 1e-3  # how far above 0 a log-probability may lie, in nats
LOWEST = float(np.finfo(np.float32).min)  # of the finite ones


class Address(msgspec.Struct, frozen=True):
    """An engine's address, the token that its clients must send, and its process.

    `instance` is new at every start: a restarted engine has no weights.
    """

    host: str
    port: int
    token: str
    pid: int
    instance: str


class EnginePlace(msgspec.Struct, frozen=True):
    """An engine rank's host, and the UUIDs of the GPUs that it sees, its own first."""

    host: str
    gpus: list[str]


class EngineDescription(msgspec.Struct, frozen=True):
    """The answer to `describe`.

    `model` is the digest of the model's settings, `places` are by rank. `weight_version` is None
    until the first refit, during a refit, and while the engine sleeps.
    """

    protocol: int
    instance: str
    places: list[EnginePlace]
    model: str
    tensor: int
    expert_parallel: bool
    max_model_tokens: int
    max_sequences: int
    weight_version: int | None
    data: int = 1


def keeps_part(top_k: int, top_p: float) -> bool:
    """Return whether sampling excludes some of the vocabulary."""
    return top_p < 1.0 or top_k > 0


def effective_top_k(top_k: int, top_p: float, vocabulary: int) -> int:
    """Return the top_k to sample with; 0 keeps all ids.

    Example: a vocabulary of 150,000 with top_k 20, with top_p alone, and with neither.

        >>> [effective_top_k(top_k, top_p, 150_000) for top_k, top_p in ((20, 1), (0, 0.9), (0, 1))]
        [20, 4096, 0]
    """
    if not keeps_part(top_k, top_p):
        return 0
    return top_k or (MOST_KEPT if vocabulary > MOST_KEPT else 0)


def largest_kept_set(top_k: int, top_p: float, vocabulary: int) -> int:
    """Return the number of ids that a token's kept set may have.

    vLLM keeps every id as likely as the k-th, of which bf16 logits have several.

    Example: a vocabulary of 150,000 with top_k 20, and with top_p alone.

        >>> [largest_kept_set(top_k, top_p, 150_000) for top_k, top_p in ((20, 1.0), (0, 0.9))]
        [84, 4160]
    """
    limit = effective_top_k(top_k, top_p, vocabulary)
    return min(limit + TIES, vocabulary) if limit else vocabulary


class Sampling(msgspec.Struct, frozen=True):
    """The distribution that responses are sampled from, and the tokens that end them.

    With `top_p` below 1 or `top_k` above 0 every token comes with the set it was sampled from.

    Example: at most 16 tokens, from the 20 likeliest ids; token 0 ends the response.

        >>> sampling = Sampling(temperature=1.0, max_tokens=16, end_tokens=(0,), top_k=20)
        >>> keeps_part(sampling.top_k, sampling.top_p)
        True
        >>> msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling
        True
    """

    temperature: float
    max_tokens: int
    end_tokens: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """A request for one response: its number in the answer, its tokens, and its seed.

    Lower `priority` is scheduled first.
    """

    number: int
    tokens: list[int]
    seed: int
    priority: int = 0


class Generate(msgspec.Struct, frozen=True):
    """A request for one response to each prompt; the answer streams a `Generation` each as it ends.

    All prompts reach vLLM's scheduler at once, so that the same call makes the same batches and
    the same bits.
    """

    prompts: list[Prompt]
    sampling: Sampling


class Generation(msgspec.Struct, frozen=True, tag=True):
    """One response. Arrays are little-endian bytes, so that no number becomes an object.

    tokens: int32 [response].
    logprobs: fp32 [response], of the sampled tokens under the sampling distribution.
    routes: uint16 [prompt + response - 1, layers, experts_per_token].
    versions: int32 [response], the weight version that each token was sampled with.
    kept, kept_sizes: int32, the concatenated sets that the tokens were sampled from, and int32
        [response] their sizes; empty where all ids are kept.
    """

    number: int
    tokens: bytes
    logprobs: bytes
    routes: bytes
    routes_shape: tuple[int, int, int]
    finished: bool
    versions: bytes
    kept: bytes = b""
    kept_sizes: bytes = b""


class Join(msgspec.Struct, frozen=True):
    """A request to join the refits of one trainer, with all that `parallel.weights` plans from.

    `fleet` has the ranks of each engine, which are those of its `data` members; `first_rank` is the
    number of the called process's first rank among all engines' ranks. With `hosts`, numbers of the
    trainer ranks' and the engine ranks' hosts, equal ones map memory; the ranks of each meeting
    send messages to each other.
    """

    layout: dict[str, Any]
    fleet: list[int]
    expert_parallel: bool
    forwarding: bool
    data: int
    first_rank: int
    hosts: tuple[list[int], list[int]] | None
    meetings: list[Meeting]
    timeout_seconds: float


class Refit(msgspec.Struct, frozen=True):
    """A request to take the trainer's weights as `version`, fingerprinted where `check` is set.

    `shared` is the memory to map, by trainer rank, where it is other than at the refit before; with
    `release` it is unmapped at the end.
    """

    version: int
    check: bool
    shared: dict[int, SharedMemory] = {}
    release: bool = False


class Wake(msgspec.Struct, frozen=True):
    """A request to allocate a part of a sleeping engine again: its weights, then its cache.

    The weights have no values until a refit.
    """

    part: Literal["weights", "kv_cache"]


class RankReport(msgspec.Struct, frozen=True):
    """The report of one tensor-parallel rank about a refit; fingerprints are by bucket, decimal."""

    received_bytes: int
    staging_bytes: int
    fingerprints: dict[str, str]


class Refitted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Refit`: one report per tensor-parallel rank."""

    ranks: list[RankReport]


class CallFailure(msgspec.Struct, frozen=True, tag=True):
    """The answer to a call that failed, or the end of a streamed one; the engine may still work."""

    error: str


def model_digest(model: ModelSettings) -> str:
    """Return a digest of the settings that decide the computation of a token.

    Not of the initial weights, nor of the end tokens and the rendered prompt, which every request
    states.
    """
    stated = {"end_tokens", "chat_template_arguments", "chat_template_date"}
    described = model.model_dump_json(exclude={"initial_weights", "initialization", *stated})
    return hashlib.sha256(described.encode()).hexdigest()


def frame(message: Any) -> bytes:
    """Return the frame of one message of a streamed answer."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def frames(source: BinaryIO) -> Iterator[Generation | Refitted | CallFailure | None]:
    """Yield the messages of a streamed answer, and None for a heartbeat.

    Raises:
        EOFError: the stream ends within a message, or one is longer than LARGEST_MESSAGE.
    """
    while header := source.read(LENGTH_BYTES):
        if header == BEAT:
            yield None
            continue
        size = int.from_bytes(header, "big")
        if size > LARGEST_MESSAGE:
            raise EOFError(f"a message of {size} bytes; at most {LARGEST_MESSAGE} are read")
        data = source.read(size)
        if len(header) < LENGTH_BYTES or len(data) < size:
            raise EOFError("the stream ended within a message")
        yield msgspec.msgpack.decode(data, type=Generation | Refitted | CallFailure)


class InvalidResponse(ValueError):
    """A response that violates the protocol; the message says how."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one response: its prompt, domain, seed and sampling parameters.

    A resumed stage takes the response to an equal request from its log (`RolloutLog.take`).

    Example: a group of two responses to one prompt differs in the seeds alone.

        >>> sampling = Sampling(temperature=1.0, max_tokens=16, end_tokens=(0,))
        >>> group = [GenerationRequest("math", [5, 9, 2], seed, sampling) for seed in (70, 71)]
        >>> group[0] == group[1]
        False
    """

    domain: str
    prompt: list[int]
    seed: int
    sampling: Sampling


def sample_of(request: GenerationRequest, answer: Generation, model: ModelSettings) -> Sample:
    """Return the engine's response to a request as a Sample.

    Example: a prompt of 3 tokens and an answer of 2, of a model with 4 routed layers and 8 experts
    a token, has 2 log-probabilities and routes [4, 4, 8]: 3 + 2 - 1 tokens were read.

    Raises:
        InvalidResponse: lengths do not match, or a value is out of range.
    """
    tokens, versions, kept_ids, sizes = (
        _array(getattr(answer, name), np.dtype("<i4"), name)
        for name in ("tokens", "versions", "kept", "kept_sizes")
    )
    logprobs = _array(answer.logprobs, np.dtype("<f4"), "logprobs")
    routes = _array(answer.routes, np.dtype("<u2"), "routes")
    length = len(request.prompt) + len(tokens) - 1
    shape = length, len(routed_layers(model)), model.experts_per_token
    ends = np.isin(tokens, request.sampling.end_tokens)
    _check(len(tokens) == len(logprobs) == len(versions), "arrays of different lengths")
    _check(tuple(answer.routes_shape) == shape, f"routes {answer.routes_shape} instead of {shape}")
    _check(len(routes) == np.prod(shape), f"{len(routes)} routes for {shape}")
    _check(_within(routes, 0, model.experts - 1), "an expert that the model does not have")
    _check(_within(tokens, 0, model.vocabulary_size - 1), "a token outside the vocabulary")
    valid = _within(logprobs, LOWEST, ROUNDING)
    _check(valid, "a log-probability that is above 0, infinite or NaN")
    _check(bool((versions[1:] >= versions[:-1]).all()), "weight versions that decrease")
    most = request.sampling.max_tokens
    _check(0 < len(tokens) <= most, f"{len(tokens)} tokens")
    _check(not ends[:-1].any(), "tokens after an end token")
    _check(bool(ends[-1]) == answer.finished, "an end token that contradicts `finished`")
    _check(answer.finished or len(tokens) == most, "a response truncated before the limit")
    if len(sizes):
        _check(len(sizes) == len(tokens) and bool((sizes > 0).all()), "a token without a kept set")
        _check(int(sizes.sum()) == len(kept_ids), "kept sets that contradict their sizes")
        _check(
            _within(kept_ids, 0, model.vocabulary_size - 1), "a kept token outside the vocabulary"
        )
    return Sample(
        domain=request.domain,
        prompt=np.asarray(request.prompt, np.int32),
        response=tokens,
        logprobs=logprobs,
        routes=routes.reshape(shape),
        versions=versions,
        kept=np.split(kept_ids, np.cumsum(sizes)[:-1]) if len(sizes) else None,
        finished=answer.finished,
    )


def _within(values: np.ndarray, lowest: float, highest: float) -> bool:
    """Return whether every value is in [lowest, highest]; NaN is in no range."""
    return not len(values) or bool(lowest <= values.min() and values.max() <= highest)


def _array(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    _check(len(data) % dtype.itemsize == 0, f"{name} that end within a number")
    return np.frombuffer(data, dtype)


def _check(valid: bool, message: str) -> None:
    if not valid:
        raise InvalidResponse(message)
