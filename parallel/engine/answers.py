"""What an engine answered becomes a Sample, or is called what it is: garbage."""

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
    """An answer that no engine in its right mind gives; the message says what is wrong with it."""


@dataclass(frozen=True)
class Question:
    """One response to be drawn: to which prompt of which domain, and from what."""

    domain: str
    prompt: list[int]
    seed: int
    sampling: Sampling


def sample_of(question: Question, answer: Generation, model: ModelSettings) -> Sample:
    """The answer to a question as a Sample.

    Raises InvalidResponse where lengths do not fit together, or a value is out of its range.
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
    _hold(len(tokens) == len(logprobs) == len(versions), "arrays of several lengths")
    _hold(tuple(answer.routes_shape) == shape, f"routes {answer.routes_shape} and not {shape}")
    _hold(len(routes) == np.prod(shape), f"{len(routes)} routes for {shape}")
    _hold(_within(routes, 0, model.experts - 1), "an expert that the model does not have")
    _hold(_within(tokens, 0, model.vocabulary_size - 1), "a token outside the vocabulary")
    _hold(
        _within(logprobs, LOWEST, ROUNDING),
        "a log-probability that is above 0, infinite, or no number",
    )
    _hold(bool((versions[1:] >= versions[:-1]).all()), "weights that grew older token by token")
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
    """A response has one end token, its last, unless it was cut off at its full length."""
    ends = tokens == sampling.end_token
    _hold(0 < len(tokens) <= sampling.max_tokens, f"{len(tokens)} tokens")
    _hold(not ends[:-1].any(), "tokens after the end token")
    _hold(bool(ends[-1]) == finished, "an end token and `finished` that contradict each other")
    _hold(finished or len(tokens) == sampling.max_tokens, "a response cut off before its time")


def _kept_sets(
    tokens: np.ndarray, kept: np.ndarray, sizes: np.ndarray, model: ModelSettings
) -> list[np.ndarray]:
    _hold(len(sizes) == len(tokens) and bool((sizes > 0).all()), "a token from no set")
    _hold(int(sizes.sum()) == len(kept), "kept sets of other sizes than they say")
    _hold(_within(kept, 0, model.vocabulary_size - 1), "a kept token outside the vocabulary")
    return np.split(kept, np.cumsum(sizes)[:-1])


def _within(values: np.ndarray, lowest: float, highest: float) -> bool:
    """Whether every value is a number from `lowest` to `highest`; a NaN is in no range."""
    return not len(values) or bool(lowest <= values.min() and values.max() <= highest)


def _array(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    _hold(len(data) % dtype.itemsize == 0, f"{name} that are cut in the middle of a number")
    return np.frombuffer(data, dtype)


def _hold(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidResponse(otherwise)
