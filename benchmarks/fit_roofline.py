"""Fit the roofline's efficiencies to published steps, and say how far each is off.

    python benchmarks/fit_roofline.py

Least squares of log(simulated / published seconds) of the steps in tests/parallel/
published_steps.py, with a weak pull to guesses made before, over all efficiencies but `load`, and
the rate at which NeMo-RL gathers a model. It also fits with each step left out. Needs scipy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parents[1]))
from parallel.estimates.roofline.hardware import REACHED, Efficiencies
from tests.parallel.published_steps import H100, PublishedStep

PULL = 0.15  # of a factor e off a guess, beside a step that is a factor e off
GUESSES = {
    **{"dense": 0.55, "experts": 0.30, "memory": 0.6, "link": 0.5, "network": 0.5},
    **{"layer": 1.2e-3, "decode_layer": 150e-6, "reduce": 15e-6, "far_reduce": 60e-6},
    **{"step": 8.0, "gathered": 20e9},
}


def simulated(step: PublishedStep, logarithms: np.ndarray) -> float:
    """Return a step's seconds with the efficiencies whose logarithms these are."""
    found = dict(zip(GUESSES, np.exp(logarithms).tolist(), strict=True))
    gathered = found.pop("gathered")
    return step.simulated(Efficiencies(**{**asdict(REACHED), **found}), gathered).total


def fitted(steps: Iterable[PublishedStep]) -> np.ndarray:
    """Return the logarithms of the efficiencies that fit steps best."""
    steps, start = list(steps), np.log([*GUESSES.values()])

    def off(logarithms: np.ndarray) -> np.ndarray:
        times = [math.log(simulated(each, logarithms) / each.seconds) for each in steps]
        return np.concatenate([times, PULL * (logarithms - start)])

    return np.asarray(least_squares(off, start).x)


def main() -> None:
    """Fit and print."""
    best = fitted(H100.values())
    for name, value in zip(GUESSES, np.exp(best), strict=True):
        print(f"{name:13} {value:.3g}")
    for name, step in H100.items():
        others = fitted(each for each in H100.values() if each is not step)
        print(
            f"{name:26} published {step.seconds:6.1f} s, fitted"
            f" {simulated(step, best) / step.seconds - 1:+4.0%}, left out"
            f" {simulated(step, others) / step.seconds - 1:+4.0%}"
        )


if __name__ == "__main__":
    main()
