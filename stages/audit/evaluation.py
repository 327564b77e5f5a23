"""The audit of an evaluation or a gate: each model's answers by that model's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from stages.audit import recorded
from stages.audit.blocks import recorded_stage
from stages.audit.model import Model, parent_model
from stages.audit.recorded import NotAuditable, RecordedRun, RecordedSample, document, naming
from stages.audit.rows import Comparison, number

DEFAULT_BOUND = 1e-4  # nats, where engine.max_logprob_difference is null; audited runs are fp32
COMPARED = 32  # answers of a model in a domain whose log-probabilities are recomputed
# Rewards that say nothing about whether the answer is right.
WATCHING = ("overlong", "length", "format", "language")


def evaluation_rows(run: RecordedRun, stage: str) -> list[Comparison]:
    """Compare every model's answers with its checkpoint, and its accuracies with the answers.

    Raises:
        NotAuditable: no answers were written.
    """
    directory = run.stage(stage)
    models = sorted((directory / "models").glob("*.json"))
    if not models:
        raise NotAuditable(f"no results at {directory}/models")
    measuring = recorded_stage(run, stage)
    settings = measuring.settings if measuring.kind == "gate" else run.settings["evaluation"]
    of_each = settings.get("samples_per_problem", 1)  # older gates asked for one answer
    rows = []
    for file in models:
        name = unquote(file.name.removesuffix(".json"))
        accuracies, model = document(file), parent_model(run, stage, name)
        for domain, measured in accuracies.items():
            answers = _answers(directory / "samples" / file.stem, domain)
            with naming(file):
                accuracy, count = float(measured["accuracy"]), float(measured["n"])
            rows.append(_logprobs(f"{name} on {domain}: log p", model, run, domain, answers))
            solved = sum(_solved(run, answer) for answer in answers) / len(answers)
            rows.append(number(f"{name} on {domain}: accuracy", accuracy, solved, scale=1.0))
            rows.append(number(f"{name} on {domain}: n", count, len(answers) / of_each))
    return rows


def _answers(directory: Path, domain: str) -> list[RecordedSample]:
    paths = sorted(directory.glob("*.parquet"))
    files = [path for path in paths if path.stem.rpartition("_")[0] == domain]
    if not files:
        raise NotAuditable(
            f"no answers at {directory}; evaluate again: braid resume RUN --from the evaluation"
        )
    return [sample for file in files for sample in recorded.samples(file)]


def _logprobs(
    quantity: str, model: Model, run: RecordedRun, domain: str, answers: list[RecordedSample]
) -> Comparison:
    """Compare the mean log-probability of the answers' tokens, by the largest difference in nats.

    A greedy answer is compared with the most likely tokens instead.
    """
    temperature = run.settings["domains"][domain].get("evaluation", {}).get("temperature")
    if temperature is None:  # of its own
        temperature = run.settings["evaluation"]["temperature"]
    engine, audited, apart, tokens = 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for answer in answers[:COMPARED]:
            # An engine may choose other experts than float64 does where two scores nearly tie.
            read = model.read(answer, replay=answer.routes is not None)
            logprobs = read.logprobs(temperature or 1.0)
            theirs = read.distribution(1.0).amax(-1) if temperature == 0 else answer.logprobs
            apart = max(apart, float((logprobs - theirs).abs().max()))
            engine, audited = engine + float(theirs.sum()), audited + float(logprobs.sum())
            tokens += len(logprobs)
    bound = run.settings["engine"]["max_logprob_difference"] or DEFAULT_BOUND
    return Comparison(quantity, engine / tokens, audited / tokens, apart, bound)


def _solved(run: RecordedRun, answer: RecordedSample) -> bool:
    """Return true where every reward that judges answers is full; all rewards if none judges.

    An answer without a reward is not solved.
    """
    rewards: dict[str, Any] = run.settings["domains"][answer.domain]["rewards"]
    if answer.fields["reward"] is None:
        return False
    reward_parts = answer.fields["reward_parts"] or {}
    counted = {name: reward for name, reward in rewards.items() if reward["weight"]}
    judging = {
        name: reward
        for name, reward in counted.items()
        if reward["kind"] not in WATCHING and reward["weight"] > 0
    }
    return all(reward_parts.get(name, 0.0) >= 1 for name in judging or counted or rewards)
