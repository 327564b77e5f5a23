"""The log-probabilities of preference pairs under a reference: computed once, kept on disk."""

from __future__ import annotations

import gc
import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel import batch
from parallel.batch import RankPlace, Responses
from parallel.checkpoint import load
from parallel.distributed import broadcast, gather, is_main
from parallel.errors import report_notice
from parallel.files import HUGGING_FACE, CheckpointError, read_checkpoint, replacing, weights_digest
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.kinds.dpo.pairs import DrawnPair, PairStream
from stages.kinds.dpo.settings import DpoSettings
from stages.settings import StageJob

KEY = "key"  # the array's name; sources have the prefix OF
# The last two: a flipped bit names a place before the file, or a compression unknown to zipfile.
DAMAGED = (ValueError, KeyError, EOFError, zipfile.BadZipFile, OSError, NotImplementedError)
OF = "source/"
PASSES = 8  # pairs that are evaluated together, in steps' pairs

Logprobs = dict[str, np.ndarray]  # by source: float64 [rows, 2], chosen and rejected, in nats


class ReferenceLogprobs:
    """The log-probabilities of every pair, in a file with the digests of reference and pairs.

    The main rank keeps them. The reference is loaded only where the file is missing, damaged or of
    another reference or other pairs, and is freed again: it must be computed before the policy is
    built, so that never two models are held.
    """

    def __init__(
        self, job: StageJob, dpo: DpoSettings, streams: Mapping[str, PairStream], reference: Path
    ) -> None:
        self._settings, self._dpo = job.settings, dpo
        self._streams, self._reference = streams, reference
        self._logprobs: Logprobs | None = None
        path, key = job.files.reference, ""
        if is_main():
            key = self._key()
            self._logprobs = _read(path, key)
        self.computed = not broadcast(self._logprobs is not None)
        if self.computed:
            logprobs = self._compute()
            if is_main():
                _write(path, key, logprobs)
                self._logprobs = logprobs

    def of(self, pair: DrawnPair) -> tuple[float, float]:
        """Return the log-probabilities of a pair's responses, on the main rank."""
        assert self._logprobs is not None
        chosen, rejected = self._logprobs[pair.name][pair.row].tolist()
        return chosen, rejected

    def _key(self) -> str:
        """Return the digests that the log-probabilities depend on, as JSON."""
        if (self._reference / HUGGING_FACE).is_file():
            digest = weights_digest(self._reference)
        elif (checkpoint := read_checkpoint(self._reference)) is not None:
            digest = checkpoint.digest
        else:
            raise CheckpointError(f"{self._reference} is no whole checkpoint; rerun its stage")
        model = hashlib.sha256(self._settings.model.model_dump_json().encode()).hexdigest()
        data = {name: stream.digest for name, stream in self._streams.items()}
        return json.dumps({"reference": digest, "model": model, "data": data}, sort_keys=True)

    def _compute(self) -> Logprobs:
        """Return the log-probabilities; the main rank's are complete. Collective."""
        policy = Policy(self._settings.model, self._settings.layout)
        load.weights(policy, self._reference)
        logprobs = {
            name: np.full((len(stream.rows), 2), np.nan) for name, stream in self._streams.items()
        }
        at_once = PASSES * self._dpo.pairs_per_step
        all_pairs = chain.from_iterable(stream.all() for stream in self._streams.values())
        while pairs := broadcast(list(islice(all_pairs, at_once)) if is_main() else None):
            sums = self._evaluate(policy, samples_of(pairs))
            for number, of_pair in sums.items() if is_main() else ():
                logprobs[pairs[number].name][pairs[number].row] = of_pair
        del policy
        gc.collect()  # its modules and hooks are cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return logprobs

    def _evaluate(self, policy: Policy, samples: list[Sample]) -> dict[int, Sequence[float]]:
        """Return both log-probabilities of every pair by its number, on every rank. Collective."""
        budget = self._dpo.loop.micro_batch_tokens
        micro_batches = batch.split(samples, RankPlace.here(), budget, replay=False, together=2)
        sums = policy.evaluate(
            micro_batches, lambda responses: sequence_logprobs(responses).tolist()
        )
        rank_logprobs = {
            micro_batch.samples[at].group: values[at : at + 2]
            for micro_batch, values in zip(
                micro_batches, sums, strict=False
            )  # empty except on the last stage
            for at in range(0, len(values), 2)
        }
        return {
            number: both for logprobs in gather(rank_logprobs) for number, both in logprobs.items()
        }


def samples_of(pairs: Sequence[DrawnPair]) -> list[Sample]:
    """Return the samples of pairs in turn, chosen and rejected, with their pair's number."""
    for number, pair in enumerate(pairs):
        pair.chosen.group = pair.rejected.group = number
    return [sample for pair in pairs for sample in (pair.chosen, pair.rejected)]


def sequence_logprobs(responses: Responses) -> Tensor:
    """Return log pi of every response, float64 [B], in nats; differentiable.

    Double precision: a loss takes differences of sums over thousands of tokens.
    """
    logprobs = responses.logprobs().double()
    return logprobs.masked_fill(~responses.batch.mask, 0.0).sum(-1)


def _read(path: Path, key: str) -> Logprobs | None:
    """Return what the file has under the key; None, with a notice, where it cannot be used."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file[KEY]) == key:
                return {name.removeprefix(OF): file[name] for name in file.files if name != KEY}
        why = "of another reference, model or other pairs"
    except FileNotFoundError:
        return None
    except DAMAGED as error:
        why = f"damaged ({error})"
    report_notice(f"{path} is {why}; computing the reference's log-probabilities again")
    return None


def _write(path: Path, key: str, logprobs: Logprobs) -> None:
    """Write the file atomically: a killed process leaves none, or the whole."""
    arrays: dict[str, Any] = {KEY: np.array(key)}
    arrays |= {f"{OF}{name}": values for name, values in logprobs.items()}
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
