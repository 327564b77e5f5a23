"""Experts of one run, each with its own objective: real policies on what fake engines draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.domains import DomainSettings
from stages.kinds.grpo import work as grpo
from tests.fake_engines import toy_domain, toy_job, toy_run
from tests.stages.toys import faked

pytestmark = pytest.mark.usefixtures("one_rank")

SUMS = {"coefficient": 0.1, "estimator": "k3", "target": 1e-9}
WORDS = {"coefficient": 0.001, "estimator": "k2", "target": 1e-9}
MEASURED_ANEW = ("time", "seconds_")  # what two runs that do the same differ in


def domain(dataset: str, kl: dict[str, Any]) -> DomainSettings:
    return toy_domain(
        prompts={"dataset": dataset},
        optimizer={"learning_rate": 1e-2},
        objective={"kl": kl},
        loop={"steps": 2, "micro_batch_tokens": 256},
    )


def logged(directory: Path, **domains: DomainSettings) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of each expert of a run with these domains, by stage name."""
    settings = toy_run(**domains)
    found = {}
    for name in domains:
        stage = f"experts.{name}"
        job = toy_job(directory / stage, settings, stage=stage, domain=name)
        job.directory.mkdir(parents=True)
        with faked():
            grpo.run(job)
        lines = (job.directory / "metrics.jsonl").read_text().splitlines()
        found[job.stage] = [
            {k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED_ANEW)}
            for line in lines
        ]
    return found


def test_each_domain_has_its_own_kl_and_logs_it_under_its_own_name(tmp_path: Path) -> None:
    together = logged(
        tmp_path / "both", sums=domain("chain_sum", SUMS), words=domain("spell_backward", WORDS)
    )
    coefficients = {name: lines[0]["kl_coefficient"] for name, lines in together.items()}
    assert coefficients == {"experts.sums": 0.1, "experts.words": 0.001}
    # What one expert logs is what it logs without the other, to the last bit.
    alone = logged(tmp_path / "alone", words=domain("spell_backward", WORDS))
    assert together["experts.words"] == alone["experts.words"]
    other = logged(tmp_path / "other", words=domain("spell_backward", {**WORDS, "estimator": "k3"}))
    assert other["experts.words"][1]["kl"] != alone["experts.words"][1]["kl"]
