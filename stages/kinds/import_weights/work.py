"""The import of a model from outside the run, such as a Hugging Face checkpoint."""

from __future__ import annotations

from parallel.checkpoint import load
from parallel.checkpoint.save import Saver
from parallel.distributed import is_main
from parallel.model.policy import Policy
from stages.data.prompts import Split, held_out_problems
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.settings import RunSettings, StageJob


def run(job: StageJob) -> None:
    """Write the model of `from`, or `model.initial_weights`, as the checkpoint of step 0.

    Raises:
        WeightsError: they are of another model.
    """
    if is_main():
        look_for_held_out(job.settings, load_tokenizer(job.settings.model))
    policy = Policy(job.settings.model, job.settings.layout)
    if job.parent is not None:
        load.weights(policy, job.parent)
    else:
        policy.start_fresh(job.settings.seed)
    Saver(job.files.checkpoints, asynchronous=False).begin(policy, 0, {})


def look_for_held_out(settings: RunSettings, tokenizer: Tokenizer) -> None:
    """Check that every domain has enough held-out problems, before hours of training.

    Raises:
        DomainError: a domain has too few.
    """
    for domain, domain_settings in settings.domains.items():
        longest = settings.longest_prompt(domain_settings.sampling)
        reported, gated = settings.evaluation.problems, settings.gate_problems(domain)
        counts: dict[Split, int] = {"held_out": reported, "gate": gated}
        for split, count in counts.items():
            held_out_problems(domain_settings.prompts, tokenizer, domain, count, longest, split)
