"""What the engine and its clients say to each other: typed MessagePack, never pickles."""

from __future__ import annotations

import msgspec


class Address(msgspec.Struct, frozen=True):
    """Where an engine listens, and the secret that its clients must show.

    `instance` is drawn anew at every start, so that a restarted engine is never taken for the one
    before it.
    """

    host: str
    port: int
    token: str
    pid: int
    instance: str


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's tokens, how many samples of it to draw, and the seed they are drawn with."""

    tokens: list[int]
    samples: int
    seed: int


class Generate(msgspec.Struct, frozen=True):
    """Draw samples of every prompt; answered with one `Generation` a sample, in order."""

    prompts: list[Prompt]
    temperature: float
    max_tokens: int
    end_token: int


class Generation(msgspec.Struct, frozen=True):
    """One response. Arrays are little-endian bytes, so that nothing is boxed number by number.

    tokens: int32 [response]. logprobs: fp32 [response], of the sampled tokens under the sampling
    distribution. routes: uint16 [prompt + response - 1, layers, experts_per_token].
    """

    prompt: int
    tokens: bytes
    logprobs: bytes
    routes: bytes
    routes_shape: tuple[int, int, int]
    finished: bool


class Generated(msgspec.Struct, frozen=True):
    """The answer to `Generate`: all samples, and the version of the weights that drew them."""

    generations: list[Generation]
    weight_version: int


class Failure(msgspec.Struct, frozen=True):
    """The answer to a call that failed; the engine itself is still there."""

    error: str
