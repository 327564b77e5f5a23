"""A checkpoint as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from parallel import checkpoints
from parallel.distributed import is_main
from parallel.hugging_face import hugging_face_config
from parallel.policy import Policy
from stages.settings import StageJob
from stages.tokenizer import CharacterTokenizer


def run(job: StageJob) -> None:
    """Write the parent's weights, configuration and tokenizer to `job.output`, whole or not at all.

    Raises OSError when the output cannot be written.
    """
    assert job.parent is not None and job.output is not None
    policy = Policy(job.settings.model, job.settings.layout)
    checkpoints.load_weights(policy, job.parent)
    # Every rank takes part in the gathering; only the main one keeps what it yields.
    weights = {name: tensor.cpu() for name, tensor in policy.weights() if is_main()}
    if is_main():
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=job.output.parent, prefix=f".{job.output.name}."
        ) as scratch:
            unfinished = Path(scratch) / job.output.name
            unfinished.mkdir()
            try:
                save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
                (unfinished / "model.safetensors").chmod(0o644)  # safetensors makes it private
            except SafetensorError as error:  # what safetensors makes of a full disk
                raise OSError(f"cannot write {job.output}: {error}") from error
            hugging_face_config(job.settings.model).save_pretrained(unfinished)
            CharacterTokenizer().save(unfinished)
            shutil.rmtree(job.output, ignore_errors=True)
            unfinished.rename(job.output)
