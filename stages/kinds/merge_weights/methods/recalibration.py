"""The recalibration of a router after a merge of weights: the solver of HARC (arXiv 2606.03391).

A router W of E experts, [E, H], replaces the routers W_d of several models on their own samples. It
minimises

    sum over models d of weight_d * mean over inputs x of d of (W x - W_d x)^T H (W x - W_d x),

with H the Hessian of KL(p_d || p) in the logits of p, at p = p_d, the scores of W_d x: twice the KL
of the routing, to second order. The x are the inputs of the merged model's router. H is
A (diag(p) - p p^T) A, with A = 1 for a softmax, as in the authors' code, and A = diag(1 - sigmoid)
for sigmoids that are normalised to sum to 1 (derived here, for DeepSeek-V3's routers).

The matrix of this quadratic form, [E H, E H], is never built: conjugate gradients need products
with it alone. Off-diagonal elements of each model's matrix are scaled by `OFF_DIAGONAL`: it is
singular otherwise, since a softmax ignores a shift of all logits and few samples leave directions
of x free. Sums are in float64. Never imports torch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

OFF_DIAGONAL = 0.9  # as in the authors' scripts
TOLERANCE = 1e-12  # of the residual, relative to the right-hand side's
MOST_ITERATIONS = 1000  # as in the authors' scripts

Reduce = Callable[["Tensor"], "Tensor"]  # returns the sum over ranks of a rank's tensor


@dataclass(frozen=True)
class RouterSamples:
    """A model's router, [E, H] in float64, and inputs, parts [tokens, H], of the merged model's.

    `sigmoid` tells that its scores are normalised sigmoids instead of a softmax. Its term of the
    objective counts `weight` times.
    """

    router: Tensor
    inputs: Sequence[Tensor]
    sigmoid: bool = False
    weight: float = 1.0


@dataclass(frozen=True)
class Recalibrated:
    """A router that minimises the objective, [E, H] in float64, and the iterations that it took."""

    router: Tensor
    iterations: int


class RouterObjective:
    """The objective of a router, whose samples are divided among ranks.

    `reduce` sums over the ranks. All of them must call each method alike.
    """

    def __init__(
        self, samples: Sequence[RouterSamples], reduce: Reduce = lambda total: total
    ) -> None:
        self._reduce = reduce
        self._terms = [_Term(model_samples, reduce) for model_samples in samples]

    def value(self, router: Tensor) -> float:
        """Return the objective of a router, [E, H] in float64."""
        total = router.new_zeros(())
        for term in self._terms:
            difference = router - term.router
            total += (difference * term.times(difference)).sum()
        return float(self._reduce(total))

    def descent(self, router: Tensor) -> Tensor:
        """Return half the negative gradient of the objective at a router."""
        return self._product(term.router - router for term in self._terms)

    def solve(self, start: Tensor) -> Recalibrated:
        """Return the minimum, found from `start` by conjugate gradients.

        They are preconditioned with the matrix's diagonal: the inputs of a router have some
        columns much larger than the others. Where the diagonal is 0, no sample decides the element,
        and it stays as it is in `start`.
        """
        diagonal = start.new_zeros(start.shape)
        for term in self._terms:
            diagonal += term.diagonal
        diagonal = self._reduce(diagonal)
        inverse = diagonal.reciprocal().masked_fill(diagonal == 0, 0.0)
        router, residual = start.clone(), self.descent(start)
        converged = TOLERANCE**2 * _energy(self.descent(start.new_zeros(start.shape)), inverse)
        direction, energy, iterations = inverse * residual, _energy(residual, inverse), 0
        while energy > converged and iterations < MOST_ITERATIONS:
            product = self._product(direction for _ in self._terms)
            step = energy / (direction * product).sum()
            router += step * direction
            residual = residual - step * product
            before, energy = energy, _energy(residual, inverse)
            direction = inverse * residual + energy / before * direction
            iterations += 1
        return Recalibrated(router, iterations)

    def _product(self, vectors: Iterable[Tensor]) -> Tensor:
        """Return the sum over models of each one's matrix times its vector."""
        pairs = zip(self._terms, vectors, strict=True)
        total, *products = (term.times(vector) for term, vector in pairs)
        for product in products:
            total += product
        return self._reduce(total)


class _Term:
    """The matrix of one model's samples, of this rank alone, divided by the tokens of all ranks."""

    def __init__(self, samples: RouterSamples, reduce: Reduce) -> None:
        self.router = samples.router
        count = self.router.new_tensor(sum(len(inputs) for inputs in samples.inputs))
        self._scale = samples.weight / float(reduce(count))
        self._batches = [(inputs, *_curvature(samples, inputs)) for inputs in samples.inputs]
        self.diagonal = self.router.new_zeros(self.router.shape)
        off_diagonal = 1 - self.router.new_ones(len(self.router)).diag()
        for inputs, p, a, _ in self._batches:
            # p @ others is 1 - p, without cancellation.
            self.diagonal += (
                self._scale * (p * (p @ off_diagonal) * a * a).T @ inputs.double().square()
            )

    def times(self, vector: Tensor) -> Tensor:
        """Return the matrix times a vector of the form of a router."""
        product = vector.new_zeros(vector.shape)
        for inputs, p, a, top in self._batches:
            x = inputs.double()
            logits = a * (x @ vector.T)
            # A shift of all changes nothing; without it a p near 1 would leave rounding alone.
            logits -= logits.gather(-1, top)
            product += (a * p * (logits - (p * logits).sum(-1, keepdim=True))).T @ x
        shrunk = OFF_DIAGONAL * self._scale * product
        return shrunk.add_(self.diagonal * vector, alpha=1 - OFF_DIAGONAL)


def _curvature(samples: RouterSamples, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p and the diagonal of A, [tokens, E] both, and the largest p's index, [tokens, 1]."""
    logits = inputs.double() @ samples.router.T
    top = logits.argmax(-1, keepdim=True)
    if not samples.sigmoid:
        return logits.softmax(-1), logits.new_ones(()), top
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True), (-logits).sigmoid(), top


def _energy(residual: Tensor, inverse: Tensor) -> Tensor:
    return (residual * inverse * residual).sum()
