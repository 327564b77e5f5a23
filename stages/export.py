"""A checkpoint as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import shutil

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
    policy = Policy(job.settings.model)
    checkpoints.load_weights(policy, job.parent)
    weights = {name: tensor.cpu() for name, tensor in policy.weights()}
    if is_main():
        unfinished = job.output.with_name(f"{job.output.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        hugging_face_config(job.settings.model).save_pretrained(unfinished)
        CharacterTokenizer().save(unfinished)
        shutil.rmtree(job.output, ignore_errors=True)
        unfinished.rename(job.output)
