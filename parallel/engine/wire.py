"""What an engine and its clients say to each other: typed MessagePack over HTTP, never pickles."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec

from parallel.settings import ModelSettings
from parallel.weights.transport import Meeting, SharedMemory

PROTOCOL = 5  # of this file; both ends must speak the same

LARGEST_MESSAGE = 1 << 30  # bytes, of a request or of one message of a streamed answer
LENGTH_BYTES = 4  # of a streamed answer's frames, each led by its length, big-endian
BEAT = bytes(LENGTH_BYTES)  # an empty frame: no answer yet, but the engine is at work
MOST_KEPT = 4096  # tokens that top_p keeps without a top_k: each is an object in vLLM's answer
TIES = 64  # tokens as likely as the last that top_k keeps


class Address(msgspec.Struct, frozen=True):
    """Where an engine listens, the secret its clients must show, and which process it is.

    `instance` is new at every start: an engine that was restarted has forgotten its weights.
    """

    host: str
    port: int
    token: str
    pid: int
    instance: str


class EngineDescription(msgspec.Struct, frozen=True):
    """What an engine is: the answer to `describe`.

    `model` is the digest of the model's settings. `host` tells machines apart. `weight_version` is
    None until the first refit, and while one is under way.
    """

    protocol: int
    instance: str
    host: str
    model: str
    tensor: int
    max_model_tokens: int
    max_sequences: int
    weight_version: int | None


def keeps_part(top_k: int, top_p: float) -> bool:
    """Return whether sampling leaves some of the vocabulary out."""
    return top_p < 1.0 or top_k > 0


def kept_limits(top_k: int, top_p: float, vocabulary: int) -> tuple[int, int]:
    """Return the top_k to draw with, and how many log-probabilities to ask for of every token, so
    that all which were kept are among them; those that were not are not finite. 0 is all and none.

    vLLM keeps whatever is as likely as the k-th, of which bf16 logits have several.
    """
    if not keeps_part(top_k, top_p):
        return 0, 0
    top_k = top_k or (MOST_KEPT if vocabulary > MOST_KEPT else 0)
    return top_k, min(top_k + TIES, vocabulary) if top_k else vocabulary


class Sampling(msgspec.Struct, frozen=True):
    """The distribution that responses are drawn from, and where they end.

    With `top_p` below 1 or `top_k` above 0 every token comes with the set it was drawn from.
    """

    temperature: float
    max_tokens: int
    end_token: int
    top_p: float = 1.0
    top_k: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """One response that is asked for: its prompt's tokens, and the seed to draw it with.

    `number` names it in the answer. Lower `priority` is scheduled first.
    """

    number: int
    tokens: list[int]
    seed: int
    priority: int = 0


class Generate(msgspec.Struct, frozen=True):
    """Draw one response to each prompt; answered by a stream of one `Generation` each, as they end.

    All prompts reach vLLM's scheduler at once, so that the same call makes the same batches, and so
    the same bits.
    """

    prompts: list[Prompt]
    sampling: Sampling


class Generation(msgspec.Struct, frozen=True, tag=True):
    """One response. Arrays are little-endian bytes, so that nothing is boxed number by number.

    tokens: int32 [response]. logprobs: fp32 [response], of the sampled tokens under the sampling
    distribution. routes: uint16 [prompt + response - 1, layers, experts_per_token]. versions: int32
    [response], of the weights that each token was drawn with. kept: int32, the sets the tokens were
    drawn from one after another, kept_sizes: int32 [response] of them; empty where everything is
    kept.
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
    """Take a place in the refits of one trainer: `parallel.weights` plans from this alone.

    `engine` is this engine's place in `fleet`, the engines' tensor-parallel sizes. All ranks
    meet to send messages; where `meeting` is None the engine maps what each trainer rank shared.
    """

    layout: dict[str, Any]
    fleet: list[int]
    engine: int
    meeting: Meeting | None
    shared: list[SharedMemory]
    timeout_seconds: float


class Refit(msgspec.Struct, frozen=True):
    """Take the trainer's weights as they are now and call them `version`; bytes are counted, and,
    when `check` is set, every tensor is fingerprinted as it lands."""

    version: int
    check: bool


class RankReport(msgspec.Struct, frozen=True):
    """What one tensor-parallel rank did in a refit.

    fingerprints: by bucket, of what landed in it (parallel.weights.checksums), as decimal text,
    since they take 64 bits and a sign.
    """

    received_bytes: int
    messages: int
    staging_bytes: int
    seconds: float
    fingerprints: dict[str, str]


class Refitted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Refit`: one report a tensor-parallel rank."""

    ranks: list[RankReport]


class CallFailure(msgspec.Struct, frozen=True, tag=True):
    """The answer to a call that failed, or the end of a streamed one; unless it was a step that
    failed, the engine itself is still there."""

    error: str


def model_digest(model: ModelSettings) -> str:
    """What two descriptions of the same computation share; where it starts from is left out."""
    described = model.model_dump_json(exclude={"initial_weights", "initialization"})
    return hashlib.sha256(described.encode()).hexdigest()


def frame(message: Any) -> bytes:
    """One message of a streamed answer."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class Readable(Protocol):
    def read(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""


def frames(source: Readable) -> Iterator[Generation | Refitted | CallFailure | None]:
    """The messages of a streamed answer; None for a beat.

    Raises EOFError when the stream ends within one, or one is longer than LARGEST_MESSAGE.
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


def prompts_of(tokens: Iterable[list[int]], samples: int, seed: int) -> list[Prompt]:
    """`samples` responses to every prompt, numbered through, no two of which share a seed."""
    return [
        Prompt(index * samples + sample, ids, seed + index * samples + sample)
        for index, ids in enumerate(tokens)
        for sample in range(samples)
    ]
