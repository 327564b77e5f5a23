"""The export of a checkpoint to a Hugging Face directory for transformers and vLLM, verified."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel.batch import RankPlace, Responses, split
from parallel.checkpoint import load
from parallel.distributed import barrier, broadcast, is_main, max_over_ranks
from parallel.errors import UserError
from parallel.files import GENERATION, open_in_place, open_lock, write_atomically
from parallel.hugging_face.config import expected_tensors, hugging_face_config
from parallel.hugging_face.files import WeightFiles, WeightsError
from parallel.hugging_face.multi_token import MultiTokenTensors
from parallel.hugging_face.portable import make_portable
from parallel.hugging_face.weights import fill_weights, forget_weights
from parallel.hugging_face.writer import SHARD_BYTES, verify, write
from parallel.machine.determinism import set_up_rank
from parallel.model.policy import Policy
from parallel.model.vocabulary import HeadLogits
from parallel.sample import Sample
from parallel.settings import ModelSettings
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.kinds.export.model_card import README, model_card
from stages.settings import StageJob

PROBES, PROBE_TOKENS = 4, 8  # random prompts and responses per data-parallel rank, their length
LOCK = "braid_export.lock"  # of an export's temporary directory, held by its main rank
# Of the renaming of a directory to what is no empty directory: a full one, a file, a mount point.
TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY}


def run(job: StageJob) -> None:
    """Write the parent's weights, configuration and tokenizer to `job.output`."""
    assert job.parent is not None and job.output is not None
    remove_unfinished(job)
    # On a GPU, kernels that sum in any order give unequal logits for equal weights. Without these
    # variables TransformerEngine's attention refuses megatron-core's deterministic_mode.
    set_up_rank(deterministic=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if is_main():
        MultiTokenTensors(job.settings.model)  # its errors come before a model is loaded
    policy = Policy(job.settings.model, job.settings.layout)
    load.weights(policy, job.parent)
    inside_run = job.output.is_relative_to(job.directory)
    export(policy, job.output, replaces=inside_run, parent=job.parent)


def export(
    policy: Policy,
    output: Path,
    shard_bytes: int = SHARD_BYTES,
    *,
    replaces: bool = False,
    parent: Path | None = None,
) -> None:
    """Write a policy to the directory `output`, complete and verified or not at all. Collective.

    Every tensor on disk is compared with the policy's, and a policy that is loaded from there must
    give the same logits, bit for bit. All ranks must see the directory. `replaces`: see `publish`;
    `parent` is the policy's checkpoint.

    Raises:
        WeightsError: the written weights differ from the policy's.
        UserError: see `publish`.
        OSError: the output cannot be written.
    """
    before = probe(policy)
    with beside(output) as unfinished:
        if is_main():
            multi_token = MultiTokenTensors(policy.settings)
            expected = expected_tensors(hugging_face_config(policy.settings)) | multi_token.specs
            stream = chain(policy.weights(), multi_token.stream())
            digests = write(unfinished, expected, stream, shard_bytes)
            verify(unfinished, expected, digests)
        else:
            for _ in policy.weights():  # collective: all ranks gather
                pass
        barrier()
        forget_weights(policy.chunks)  # a weight that is not loaded again changes the logits
        fill_weights(policy.bridge, policy.chunks, WeightFiles(unfinished))
        pairs = zip(before, probe(policy), strict=True)
        if max_over_ranks(not all(torch.equal(old, new) for old, new in pairs)):
            raise WeightsError(f"{output}: verification failed", ["other logits than the policy's"])
        if is_main():
            complete(policy.settings, unfinished, multi_token, parent=parent)
            publish(unfinished, output, replaces=replaces)


def complete(
    settings: ModelSettings,
    unfinished: Path,
    multi_token: MultiTokenTensors,
    quantization: dict[str, Any] | None = None,
    parent: Path | None = None,
) -> None:
    """Add configuration, tokenizer and a model card to written weights of a checkpoint `parent`.

    `generation_config.json` is that of `model.initial_weights`, if it has one, with the end tokens
    that the policy was trained to end with: vLLM and transformers stop at those. The
    configuration counts the layers of the `multi_token` tensors, else vLLM would refuse the
    checkpoint: it takes them for layers of the model.
    """
    tokenizer = load_tokenizer(settings)
    config = hugging_face_config(settings)
    ends: Any = [*tokenizer.end_tokens] if len(tokenizer.end_tokens) > 1 else tokenizer.end_token
    config.eos_token_id, config.pad_token_id = ends, tokenizer.pad_token
    if modules := multi_token.modules:
        key = "num_mtp_layers" if hasattr(config, "num_mtp_layers") else "mtp_num_hidden_layers"
        setattr(config, key, multi_token.layers)
        names = ", ".join(modules)
        print(
            f"kept {len(multi_token.specs)} tensors for multi-token prediction, of {names}",
            flush=True,
        )
    if quantization is not None:
        config.quantization_config = quantization
    config.save_pretrained(unfinished)
    tokenizer.save(unfinished)
    make_portable(unfinished, settings)
    defaults = _generation_defaults(settings.initial_weights, tokenizer)
    if defaults is not None:
        write_atomically(unfinished / GENERATION, json.dumps(defaults, indent=2) + "\n")
    ends = ", ".join(f"`{tokenizer.decode_prompt([token])}`" for token in tokenizer.end_tokens)
    write_atomically(unfinished / README, model_card(settings, parent, ends))


def _generation_defaults(start: Path | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the start's defaults with the tokenizer's tokens; None without any to write."""
    try:
        stated = dict(json.loads((start / GENERATION).read_text())) if start else None
    except (OSError, ValueError, TypeError, RecursionError):
        stated = None
    if stated is None and len(tokenizer.end_tokens) == 1:
        return None  # config.json has it
    ends = {"eos_token_id": [*tokenizer.end_tokens], "pad_token_id": tokenizer.pad_token}
    return (stated or {}) | ends


def publish(unfinished: Path, output: Path, *, replaces: bool) -> None:
    """Give a complete directory the name `output`.

    `replaces` allows it to take the place of what is there: a stage's own, of an attempt before.

    Raises:
        UserError: something else is there by now; the message says where the model is instead.
    """
    if replaces and output.exists():
        # Into the scratch directory, which is removed: a reader's open files on NFS stay in theirs.
        output.rename(unfinished.with_name(f"{output.name}.before"))
    try:
        unfinished.rename(output)  # replaces an empty directory, and nothing else
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        fallback = _named_beside(unfinished, output)
        raise UserError(
            f"{output} was taken during the export ({error.strerror}) and is left as it is; the "
            f"model is complete and verified in {fallback}"
        ) from None


def _named_beside(unfinished: Path, output: Path) -> Path:
    """Give a directory the first free name of `output`-2, `output`-3 and so on; return it."""
    for number in count(2):
        candidate = output.with_name(f"{output.name}-{number}")
        try:
            return unfinished.rename(candidate)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
    raise AssertionError("numbers have no end")


def probe(policy: Policy) -> list[torch.Tensor]:
    """Return this rank's logits of random tokens; empty except on the last pipeline stage."""
    draw = np.random.default_rng(0)
    here = RankPlace.here()
    shape = (PROBES * here.data, 2, PROBE_TOKENS)
    tokens = draw.integers(policy.settings.vocabulary_size, size=shape, dtype=np.int32)
    samples = [Sample("probe", prompt, response) for prompt, response in tokens]
    batches = split(samples, here, PROBES * 2 * PROBE_TOKENS, replay=False)

    def logits(responses: Responses) -> torch.Tensor:
        head = responses.logits
        assert isinstance(head, HeadLogits)
        return head.hidden @ head.weight.T

    return policy.evaluate(batches, logits)


def remove_unfinished(job: StageJob) -> None:
    """Remove what a killed attempt of the stage has written, which may be a whole model."""
    if is_main():
        for left in job.files.path.glob(f".{job.files.exported.name}.*"):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def beside(output: Path) -> Iterator[Path]:
    """Yield, on every rank, the main rank's `scratch` directory beside `output`."""
    if not is_main():
        yield broadcast(None)
        return
    with scratch(output) as unfinished:
        yield broadcast(unfinished)


@contextmanager
def scratch(output: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `output`; remove it at the end.

    Those of killed exports to the same place are removed first.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(output)
    with (
        tempfile.TemporaryDirectory(
            dir=output.parent, prefix=f".{output.name}.", ignore_cleanup_errors=True
        ) as temporary,
        locked(Path(temporary)),
    ):
        unfinished = Path(temporary) / output.name
        unfinished.mkdir()
        yield unfinished


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a temporary directory, which the kernel releases when the process dies.

    Where a file system has no locks, it is left unlocked, and stays after a kill.
    """
    with open_lock(directory / f"{LOCK}.new") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            Path(file.name).rename(directory / LOCK)  # so that nobody sees it unlocked
        yield


def remove_abandoned(output: Path) -> None:
    """Remove the temporary directories beside `output` whose processes are dead."""
    for lock in output.parent.glob(f".{glob.escape(output.name)}.*/{LOCK}"):
        with suppress(OSError), open_in_place(lock, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
