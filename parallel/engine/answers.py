"""The validation of an engine's responses, which turns them into Samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel.engine.wire import Generation, Sampling
from parallel.families import routed_layers
from parallel.sample import Sample
from parallel.settings import ModelSettings

ROUNDING = 1e-3  # how far above 0 a log-probability may lie, in nats
LOWEST = float(np.finfo(np.float32).min)  # of the finite ones


class InvalidResponse(ValueError):
    """A response that violates the protocol; the message says how."""


@dataclass(frozen=True)
class Question:
    """A request for one response: its prompt, domain, seed and sampling parameters."""

    domain: str
    prompt: list[int]
    seed: int
    sampling: Sampling


def sample_of(question: Question, answer: Generation, model: ModelSettings) -> Sample:
    """Return the engine's answer to a question as a Sample.

    Raises:
        InvalidResponse: lengths do not match, or a value is out of range.
    """
    tokens, versions, kept, kept_sizes = (
        _array(getattr(answer, name), np.dtype("<i4"), name)
        for name in ("tokens", "versions", "kept", "kept_sizes")
    )
    logprobs = _array(answer.logprobs, np.dtype("<f4"), "logprobs")
    routes = _array(answer.routes, np.dtype("<u2"), "routes")
    shape = (
        len(question.prompt) + len(tokens) - 1,
        len(routed_layers(model)),
        model.experts_per_token,
    )
    _check(len(tokens) == len(logprobs) == len(versions), "arrays of different lengths")
    _check(tuple(answer.routes_shape) == shape, f"routes {answer.routes_shape} instead of {shape}")
    _check(len(routes) == np.prod(shape), f"{len(routes)} routes for {shape}")
    _check(_within(routes, 0, model.experts - 1), "an expert that the model does not have")
    _check(_within(tokens, 0, model.vocabulary_size - 1), "a token outside the vocabulary")
    _check(
        _within(logprobs, LOWEST, ROUNDING), "a log-probability that is above 0, infinite or NaN"
    )
    _check(bool((versions[1:] >= versions[:-1]).all()), "weight versions that decrease")
    _check_end(tokens, answer.finished, question.sampling)
    return Sample(
        domain=question.domain,
        prompt=np.asarray(question.prompt, np.int32),
        response=tokens,
        logprobs=logprobs,
        routes=routes.reshape(shape),
        versions=versions,
        kept=_kept_sets(tokens, kept, kept_sizes, model) if len(kept_sizes) else None,
        finished=answer.finished,
    )


def _check_end(tokens: np.ndarray, finished: bool, sampling: Sampling) -> None:
    """Check that the only end token is the last, or that the response is truncated."""
    ends = tokens == sampling.end_token
    _check(0 < len(tokens) <= sampling.max_tokens, f"{len(tokens)} tokens")
    _check(not ends[:-1].any(), "tokens after the end token")
    _check(bool(ends[-1]) == finished, "an end token that contradicts `finished`")
    _check(finished or len(tokens) == sampling.max_tokens, "a response truncated before the limit")


def _kept_sets(
    tokens: np.ndarray, kept: np.ndarray, sizes: np.ndarray, model: ModelSettings
) -> list[np.ndarray]:
    _check(len(sizes) == len(tokens) and bool((sizes > 0).all()), "a token without a kept set")
    _check(int(sizes.sum()) == len(kept), "kept sets that contradict their sizes")
    _check(_within(kept, 0, model.vocabulary_size - 1), "a kept token outside the vocabulary")
    return np.split(kept, np.cumsum(sizes)[:-1])


def _within(values: np.ndarray, lowest: float, highest: float) -> bool:
    """Return whether every value is in [lowest, highest]; NaN is in no range."""
    return not len(values) or bool(lowest <= values.min() and values.max() <= highest)


def _array(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    _check(len(data) % dtype.itemsize == 0, f"{name} that end within a number")
    return np.frombuffer(data, dtype)


def _check(valid: bool, message: str) -> None:
    if not valid:
        raise InvalidResponse(message)
