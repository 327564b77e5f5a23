"""What a model says about the response tokens of one micro-batch, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel.batch import MicroBatch
from parallel.model import vocabulary
from parallel.model.vocabulary import HeadLogits


@dataclass
class Responses:
    """Logits [n, vocabulary / TP] of the n response tokens that this rank predicts.

    Every method returns fp32 [B, R], whole and alike on all tensor- and context-parallel ranks,
    meaningful under the batch's mask, and differentiable where the logits are.
    """

    logits: torch.Tensor | HeadLogits
    batch: MicroBatch

    def log_probs(self, temperature: float = 1.0) -> torch.Tensor:
        """log pi of every target, in nats, of the distribution that it was sampled from: where
        top-p or top-k left tokens out, pi is renormalised on what they kept."""
        targets, kept = self.batch.own_targets, self.batch.kept
        return self.batch.spread(vocabulary.log_probs(self.logits, targets, temperature, kept))

    def entropy(self, temperature: float = 1.0) -> torch.Tensor:
        """Entropy over the whole vocabulary at every response token, in nats."""
        return self.batch.spread(vocabulary.entropy(self.logits, temperature))

    def kl(self, other: torch.Tensor | HeadLogits, temperature: float = 1.0) -> torch.Tensor:
        """KL(this || other) over the whole vocabulary at every response token, in nats."""
        return self.batch.spread(vocabulary.kl(self.logits, other, temperature))
