"""What a merge costs: a rank's memory with 1, 3 and 12 teachers, a step's time, and bytes kept.

And the memory and time of merging the weights of 3 and of 12 models, beside those of loading one.

    python benchmarks/teachers.py > benchmarks/teachers.json

Two ranks (layout.tensor 2) and a model of some 70 million parameters in fp32: 12 teachers' files
are 3.4 GiB. Every case is two processes of its own, whose peak resident memory the system reports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import measured

from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings, RoutingLossSettings

MODEL = ModelSettings(
    vocabulary_size=8192,
    hidden_size=512,
    layers=8,
    attention_heads=8,
    key_value_heads=4,
    head_dim=64,
    experts=8,
    experts_per_token=2,
    expert_hidden_size=512,
)
LAYOUT = LayoutSettings(ranks=2, tensor=2)
TEACHERS, STEPS = 12, 4
SAMPLES, PROMPT, RESPONSE = 12, 32, 96  # of all domains together
OPD_VOCABULARY, OPD_HIDDEN = 151_936, 2048  # of Qwen3-30B-A3B


def main() -> dict[str, Any]:
    found: dict[str, Any] = {**measured(), "samples": SAMPLES, "response_tokens": RESPONSE}
    with tempfile.TemporaryDirectory() as directory:
        found |= _on_ranks(write_teachers, directory)
        cases = {f"{n} one": (n, "one", "device") for n in (1, 3, 12)}
        cases |= {"3 all": (3, "all", "device"), "3 one, disk": (3, "one", "disk")}
        for name, case in cases.items():
            found[name] = _on_ranks(merge_steps, directory, *case)
        found["one model loaded"] = _on_ranks(load_model, directory)
        for count, method in ((3, "average"), (12, "average"), (12, "ties")):
            found[f"{method} of {count}"] = _on_ranks(merge_weights, directory, count, method)
    peaks = [found[f"{n} one"]["peak_mebibytes"] for n in (1, 3, 12)]
    found["peak_spread_percent"] = round(100 * (max(peaks) / min(peaks) - 1), 2)
    ratio = found["3 one"]["seconds_a_step"] / found["3 all"]["seconds_a_step"]
    found["seconds_one_over_all"] = round(ratio, 3)
    return {**found, "kept": kept_bytes()}


def kept_bytes() -> dict[str, float]:
    """Return the bytes of a token's hidden states and of its logits, in bf16."""
    hidden, logits = 2 * OPD_HIDDEN, 2 * OPD_VOCABULARY
    return {
        "vocabulary": OPD_VOCABULARY,
        "hidden_size": OPD_HIDDEN,
        "hidden_bytes_a_token": hidden,
        "logits_bytes_a_token": logits,
        "times_fewer": round(logits / hidden, 1),
    }


def write_teachers(directory: str) -> dict[str, Any]:
    """Write checkpoints of models with different random weights."""
    from parallel.checkpoint.save import Saver
    from parallel.model.policy import Policy

    policy = Policy(MODEL, LAYOUT)
    for number in range(TEACHERS):
        policy.start_fresh(number + 1)
        Saver(Path(directory) / str(number), asynchronous=False).begin(policy, 1, {})
    own = sum(each.numel() for chunk in policy.chunks for each in chunk.parameters())
    files = Path(directory, "0").rglob("*.distcp")
    return {
        "parameters_of_a_rank": own,
        "bytes_of_a_teacher": sum(each.stat().st_size for each in files),
    }


def merge_steps(directory: str, count: int, resident: str, states: str) -> dict[str, Any]:
    """Take steps of a merge with `count` teachers on samples that are always the same number."""
    from parallel.model.policy import TrainedPolicy
    from stages.kinds.distill.teachers import Teachers

    job = _job(directory, count, resident, states)
    optimizer = OptimizerSettings(learning_rate=1e-5)
    policy = TrainedPolicy(MODEL, LAYOUT, optimizer, STEPS, RoutingLossSettings())
    policy.start_fresh(0)
    teachers = Teachers(job, policy, job.block_settings)
    seconds, grading = [], []
    for step in range(STEPS):
        parts = _parts(job.domains, step)
        begun = time.monotonic()
        teachers.grade(parts)
        grading.append(time.monotonic() - begun)
        kept = teachers.hidden_states.bytes
        policy.accumulate(parts, _loss, SAMPLES * (PROMPT + RESPONSE))
        policy.step()
        teachers.clear(parts)
        seconds.append(time.monotonic() - begun)
    return {
        "peak_mebibytes": _peak_mebibytes(),
        "seconds_a_step": round(median(seconds[1:]), 3),
        "seconds_grading": round(median(grading[1:]), 3),
        "kept_bytes": kept,
    }


def load_model(directory: str) -> dict[str, Any]:
    """Load one of the models, without an optimizer."""
    from parallel.checkpoint import load
    from parallel.model.policy import Policy

    begun = time.monotonic()
    load.weights(Policy(MODEL, LAYOUT), Path(directory) / "0" / "step_1")
    return {"peak_mebibytes": _peak_mebibytes(), "seconds": round(time.monotonic() - begun, 3)}


def merge_weights(directory: str, count: int, method: str) -> dict[str, Any]:
    """Run a stage that merges the weights of `count` models, which started from the first."""
    from stages.kinds.merge_weights import work as merge_weights
    from stages.kinds.merge_weights.settings import MergeWeightsSettings
    from stages.settings import StageJob

    paths = {f"model_{n}": Path(directory) / str(n) / "step_1" for n in range(count)}
    block = {"from": "start", "models": {name: name for name in paths}, "method": method}
    settings = {"merged": MergeWeightsSettings.model_validate(block)}
    job = StageJob.model_construct(  # type: ignore[call-arg]
        stage="merged",
        block="merged",
        seeded_as="merged",
        directory=Path(directory) / f"{method}_{count}",
        domains=[],
        parent=paths["model_0"],
        models=paths,
        settings=partial_settings(seed=0, model=MODEL, layout=LAYOUT, stages=settings),
    )
    begun = time.monotonic()
    merge_weights.run(job)
    return {"peak_mebibytes": _peak_mebibytes(), "seconds": round(time.monotonic() - begun, 3)}


def partial_settings(**blocks: Any) -> Any:
    """Return a run's settings with these blocks alone."""
    from stages.settings import RunSettings

    return RunSettings.model_construct(**blocks)


def _peak_mebibytes() -> float:
    """Return the peak resident memory of this process."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _job(directory: str, count: int, resident: str, states: str) -> Any:
    from stages.kinds.distill.settings import DistillSettings
    from stages.settings import StageJob

    domains = [f"domain_{n}" for n in range(count)]
    block = {
        "from": "start",
        "teachers": {name: name for name in domains},
        "teacher_memory": {"resident": resident, "hidden_states": states},
        "optimizer": {"learning_rate": 1e-5},
        "loop": {"steps": STEPS},
    }
    settings = DistillSettings.model_validate(block)
    paths = [Path(directory) / str(n) / "step_1" for n in range(count)]
    return StageJob.model_construct(  # type: ignore[call-arg]
        stage="merge",
        block="merge",
        domains=domains,
        directory=Path(directory) / "merge",
        teachers=dict(zip(domains, paths, strict=True)),
        settings=partial_settings(model=MODEL, layout=LAYOUT, stages={"merge": settings}),
    )


def _parts(domains: list[str], step: int) -> list[Any]:
    """Return a micro-batch of each sample, an equal number of each domain."""
    from parallel.batch import RankPlace, collate
    from parallel.sample import Sample

    draw = np.random.default_rng(step)
    found = []
    for number in range(SAMPLES):
        domain = domains[number * len(domains) // SAMPLES]
        tokens = draw.integers(0, MODEL.vocabulary_size, PROMPT + RESPONSE).astype(np.int32)
        sample = Sample(domain=domain, prompt=tokens[:PROMPT], response=tokens[PROMPT:])
        found.append(replace(collate([sample], RankPlace.here(), False), domain=domain))
    return found


def _loss(responses: Any) -> tuple[Any, float]:
    value = responses.kl(responses.batch.teachers[0].load()).sum() / (SAMPLES * RESPONSE)
    return value, value.item()


def _on_ranks(function: Any, *arguments: Any) -> dict[str, Any]:
    """Run a function on every rank, in new processes; return the largest of each number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with context.Pool(LAYOUT.ranks) as pool:
        calls = [(rank, port, function, arguments) for rank in range(LAYOUT.ranks)]
        ranks = pool.starmap(_rank, calls, chunksize=1)
    return {name: max(each[name] for each in ranks) for name in ranks[0]}


def _rank(rank: int, port: int, function: Any, arguments: Any) -> dict[str, Any]:
    place = {"RANK": rank, "WORLD_SIZE": LAYOUT.ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_PORT=str(port))
    from parallel.distributed import process_groups

    with process_groups(LAYOUT, seed=0):
        return function(*arguments)


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
