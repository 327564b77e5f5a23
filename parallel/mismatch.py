"""The bounds on the mismatch of engine and trainer, by precision. Never imports torch.

Both compute the log-probabilities of equal tokens under equal weights, mu and pi. In fp32 they
agree to about 1e-5 nats, so one token far off shows a wrong weight sync. In bf16 both sides round,
each with its own kernels: over millions of tokens the largest difference is 0.5 to 5 nats when all
is right, so the maximum is only reported. The mean and the share of tokens far off stay small, and
wrong weights raise both (tests/engine/test_bf16.py swaps two experts).

A share above 1e-3 is a warning, for the correction (`tis`) is its remedy; ten times as much stops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallel.settings import EngineSettings, ModelSettings

HIGH_RATIO = math.log(2)  # nats; the metric `high_ratio` counts tokens beyond it
# The share of such tokens that is a warning: with replayed routes about 1e-4 is healthy.
WARNED_SHARE = 1e-3
GUIDE = "docs/how-to/mismatch.md lists what to check, in order"


@dataclass(frozen=True)
class MismatchBounds:
    """Upper bounds on |log mu - log pi| over the tokens of one check, in nats; inf: only reported.

    `high_ratio` bounds the share of tokens beyond ln 2.
    """

    largest: float
    mean: float
    high_ratio: float

    def exceeded(self, metrics: Mapping[str, float], tokens: float) -> list[str]:
        """Return which bounds the metrics of `tokens` tokens exceed, and by how much.

        A check may have few tokens: probes have 256 per engine. So the largest difference does not
        count towards the mean, and `high_ratio` allows for the chance of a small sample. NaN
        exceeds every bound.
        """
        return list(self._exceeded(metrics, max(tokens, 1.0)))

    def _exceeded(self, metrics: Mapping[str, float], tokens: float) -> Iterator[str]:
        largest = metrics["mismatch_max"]
        if not largest <= self.largest:
            yield f"by up to {largest:.3g} nats, above {_key('largest')} = {self.largest:g}"
        without = metrics["mismatch_mean"] - largest / tokens
        if math.isfinite(self.mean) and not without <= self.mean:
            mean = f"by {metrics['mismatch_mean']:.3g} nats on average over {tokens:g} tokens"
            yield f"{mean}, above {_key('mean')} = {self.mean:g}"
        if _more_than_chance(metrics["high_ratio"], self.high_ratio, tokens):
            share = _far_off(metrics["high_ratio"], tokens)
            yield f"{share}, above {_key('high_ratio')} = {self.high_ratio:g}"


def warning(metrics: Mapping[str, float], tokens: float) -> str | None:
    """Return what is to be reported of a check that exceeds no bound, or None.

    The guard `mismatch` reports the same of a training step.
    """
    share, tokens = metrics["high_ratio"], max(tokens, 1.0)
    if not _more_than_chance(share, WARNED_SHARE, tokens):
        return None
    return f"{_far_off(share, tokens)}, a share above {WARNED_SHARE:g}"


def _more_than_chance(share: float, bound: float, tokens: float) -> bool:
    """Return whether a share of `tokens` exceeds a bound by more than a small sample's chance.

    That is one token and four standard deviations of a Poisson count. True of NaN.
    """
    expected = bound * tokens
    return not share * tokens <= expected + 4 * math.sqrt(expected) + 1


def _far_off(share: float, tokens: float) -> str:
    return f"by more than ln 2 nats on {share * tokens:.0f} of {tokens:g} tokens"


# The setting of each bound.
KEYS = {
    "largest": "max_logprob_difference",
    "mean": "max_mean_logprob_difference",
    "high_ratio": "max_high_ratio",
}
# fp8 rounds the engine's weights once more; its bounds were not measured.
DEFAULTS = {
    "fp32": MismatchBounds(largest=1e-4, mean=math.inf, high_ratio=math.inf),
    "bf16": MismatchBounds(largest=math.inf, mean=0.05, high_ratio=1e-2),
    "fp8": MismatchBounds(largest=math.inf, mean=0.1, high_ratio=5e-2),
}


def mismatch_bounds(precision: str, weights: str = "model") -> MismatchBounds:
    """Return the default bounds for `model.precision` and the engine's weights, model or fp8."""
    return DEFAULTS[precision if weights == "model" else weights]


def bounds_of(model: ModelSettings, engine: EngineSettings) -> MismatchBounds:
    """Return the bounds of a run: the defaults of its precision under the engine's settings."""
    default = mismatch_bounds(model.precision, engine.weights)
    overrides = {name: getattr(engine, key) for name, key in KEYS.items()}
    return MismatchBounds(
        **{
            name: getattr(default, name) if value is None else value
            for name, value in overrides.items()
        }
    )


def _key(bound: str) -> str:
    return f"engine.{KEYS[bound]}"
