"""Every stage for real, in the fewest steps: once in peace, and once killed again and again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_run import Kill, KilledRun
from moments import Moment, Timeline, draw, watch
from runs import BRAID, CONFIG, REPOSITORY, STAGES, TRAINING, braid, finish, metrics
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from virtual_cluster import Cluster

from pipeline.run_directory import RunDirectory

pytestmark = pytest.mark.slow

ARGUMENTS = ("deterministic=true", "evaluation.problems=20")
MODELS = [*TRAINING]
PROCESSES = ["launcher", "engine", "reward worker"]
SEED = 0
DOMAINS = ["chain_sum", "spell_backward", "number_sorting"]


@dataclass(frozen=True)
class Run:
    """A finished run and what its last command printed."""

    path: Path
    output: str
    timeline: Timeline = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.path / "results.json").read_text())

    @property
    def exported(self) -> Path:
        return self.path / "stages" / "export" / "huggingface"


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Watched while it goes on, to know what there is to kill, and when."""
    directory = tmp_path_factory.mktemp("peaceful")
    log = directory / "braid.log"
    launched = braid(directory, "run", CONFIG, *ARGUMENTS, log=log)
    timeline = watch(directory / "smoke", launched)
    assert launched.returncode == 0, log.read_text()
    return Run(directory / "smoke", log.read_text(), timeline)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, peaceful: Run) -> Run:
    """A few moments of the kill matrix (benchmarks/chaos.py), and two that are always the same.

    `KilledRun` holds the run to clean ends, to continuing from the newest whole checkpoint, and to
    repeating no finished stage.
    """
    directory = tmp_path_factory.mktemp("killed")
    moments = [
        *draw(peaceful.timeline, PROCESSES, random.Random(SEED)),
        # The merge has saved nothing by then, and does its first step twice.
        Moment("launcher", "merge", step=1, seconds=0.0, which=0.0),
        Moment("rank 0", "evaluate", step=4, seconds=0.0, which=0.0),
    ]
    moments.sort(key=lambda moment: (STAGES.index(moment.stage), moment.step, moment.seconds))
    begin = ["run", CONFIG, *ARGUMENTS, "merge.loop.checkpoint_every=2"]
    run = KilledRun(directory, "smoke", begin, ["resume", "smoke"])
    try:
        struck = [run.kill(moment, STAGES) for moment in moments]
        run.finish()
    finally:
        run.close()
    assert all(struck), run.kills
    return Run(run.path, run.output(), kills=run.kills)


@pytest.mark.parametrize("name", ["peaceful", "killed"])
def test_a_run_ends_with_the_table(name: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    assert list(run.results["models"]) == MODELS
    for scores in run.results["models"].values():
        assert list(scores) == DOMAINS
        for score in scores.values():
            assert set(score) == {"accuracy", "low", "high", "n"}
            assert 0 <= score["low"] <= score["accuracy"] <= score["high"] <= 1
            assert score["n"] == 20
    assert set(run.results["minutes"]) == set(STAGES)
    for model in MODELS:
        assert model in run.output
    assert "stages/export/huggingface" in run.output


def test_no_finished_stage_is_repeated(killed: Run) -> None:
    events = [json.loads(line) for line in (killed.path / "ledger.jsonl").read_text().splitlines()]
    done = Counter(event["stage"] for event in events if event["state"] == "done")
    assert done == Counter(STAGES)
    started = [event for event in events if event["cause"].startswith("from ")]
    ended = sum(kill.outcome == "resumed" for kill in killed.kills)
    assert ended >= 3  # the launcher twice, and rank 0
    assert len(started) <= len(STAGES) + ended


def test_no_step_is_missing_or_told_twice(killed: Run) -> None:
    for stage in TRAINING:
        steps = [line["step"] for line in metrics(killed.path, stage)]
        assert steps == list(range(1, len(steps) + 1))


def test_a_killed_run_ends_with_the_same_weights_and_results(peaceful: Run, killed: Run) -> None:
    expected, found = (load_file(run.exported / "model.safetensors") for run in (peaceful, killed))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert killed.results["models"] == peaceful.results["models"]


def test_jobs_of_slurm_make_the_same_weights(
    peaceful: Run, cluster: Cluster, tmp_path: Path
) -> None:
    """Each of the two ranks on a node of its own, and the engine as a further step."""
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 1\n")
    stages = ["cold_start", "experts.chain_sum"]
    only = [part for stage in stages for part in ("--only", stage)]
    where = ["--cluster", str(profile), "--runs-dir", str(tmp_path)]
    submitted = subprocess.run(
        [*BRAID, "submit", CONFIG, *ARGUMENTS, *where, *only],
        cwd=REPOSITORY,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert submitted.returncode == 0, submitted.stderr
    *_, last = [line for line in submitted.stdout.splitlines() if ": job " in line]
    cluster.wait_until(lambda: cluster.state(last.split()[-1]) == "COMPLETED", seconds=300)
    for stage in stages:
        assert _tensors(tmp_path / "smoke", stage) == _tensors(peaceful.path, stage)


def _tensors(run: Path, stage: str) -> dict[str, str]:
    """Checksums of the files with a stage's last weights and optimizer state."""
    checkpoint = RunDirectory(run).stage(stage).newest_checkpoint()
    assert checkpoint is not None
    files = json.loads((checkpoint.path / "checksums.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".distcp")}


def test_what_was_drawn_before_a_kill_is_not_drawn_again(peaceful: Run, killed: Run) -> None:
    merge = metrics(killed.path, "merge")
    assert merge[0]["replayed"] == 4 * len(DOMAINS)
    assert [line["loss"] for line in merge] == [
        line["loss"] for line in metrics(peaceful.path, "merge")
    ]
    assert not list((killed.path / "stages").glob("*/rollouts/log/*"))  # checkpoints have it all


def test_engine_and_trainer_agree_after_every_refit(peaceful: Run) -> None:
    for stage in TRAINING[1:]:
        lines = metrics(peaceful.path, stage)
        assert len(lines) == 2
        assert all(line["mismatch_max"] <= 1e-4 for line in lines)


def test_each_domain_has_its_own_kl(peaceful: Run) -> None:
    logged = {domain: metrics(peaceful.path, f"experts.{domain}")[-1] for domain in DOMAINS}
    assert "kl" not in logged["chain_sum"]
    assert logged["spell_backward"]["kl"] >= 0
    assert "kl" in logged["number_sorting"]


def test_a_gate_measures_an_expert_and_its_parent_on_its_own_domain(peaceful: Run) -> None:
    folder = peaceful.path / "stages" / "gates.chain_sum"
    models = json.loads((folder / "results.json").read_text())["models"]
    assert [(name, list(scores)) for name, scores in models.items()] == [
        ("experts.chain_sum", ["chain_sum"]),
        ("cold_start", ["chain_sum"]),
    ]
    assert [scores["chain_sum"]["n"] for scores in models.values()] == [20, 20]
    verdict = json.loads((folder / "verdict.json").read_text())
    gain, *bounds = verdict["reasons"]
    assert verdict["outcome"] in ("passed", "warned")
    assert gain.startswith("experts.chain_sum gains ")
    assert all("mismatch_max reaches" in bound and "above" not in bound for bound in bounds)
    said = f"gates.chain_sum  {verdict['outcome']}: experts.chain_sum gains "
    assert said in peaceful.output


def test_a_domain_is_tried_on_a_finished_stage(peaceful: Run) -> None:
    domain = str(REPOSITORY / "configs" / "domains" / "spell_backward.yaml")
    asked = ("--run", "smoke", "--stage", "cold_start", "--samples", "4")
    output = finish(braid(peaceful.path.parent, "domain", "check", domain, *asked))
    assert "128 responses to 32 prompts" in output
    assert "groups that teach nothing" in output
    assert "reward/exact: " in output


def test_metrics_go_to_weights_and_biases_offline(peaceful: Run) -> None:
    for stage in TRAINING:
        assert list((peaceful.path / "stages" / stage / "wandb").glob("offline-run-*/*.wandb"))


def test_transformers_and_vllm_load_the_exported_model(peaceful: Run) -> None:
    model = AutoModelForCausalLM.from_pretrained(peaceful.exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(peaceful.exported)
    prompt = tokenizer("4-1-7+7=", return_tensors="pt").input_ids
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    program = (
        "import sys\n"
        "from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=64,\n"
        "              kv_cache_memory_bytes=64 << 20)\n"
        "    greedy = SamplingParams(temperature=0, max_tokens=6)\n"
        "    print(list(llm.generate('4-1-7+7=', greedy)[0].outputs[0].token_ids))\n"
    )
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program, str(peaceful.exported)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == expected.tolist()
