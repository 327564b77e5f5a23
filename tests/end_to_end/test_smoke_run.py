"""Every stage for real, in the fewest steps: one run left alone, and one killed and resumed.

`make test` has the short run: one domain, and one kill of the launcher and of the engine.
`make test-all` has the smoke run too: three domains, and kills at random moments.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.run.directory import RunDirectory
from tests.awaiting import PATIENCE_SECONDS
from tests.chromium import opened, screenshot, visit
from tests.end_to_end.killed_run import Kill, KilledRun
from tests.end_to_end.moments import Moment, Timeline, draw, watch
from tests.runs import BRAID, REPOSITORY, braid, finish, metrics
from tests.tiers import tiered
from tests.virtual_cluster import Cluster
from tests.warm_runs import WarmBraid

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SEED = 0


@dataclass(frozen=True)
class RunPlan:
    """A configuration, and when processes of a run of it are killed.

    `drawn` processes are killed at moments of a seed. `ends` kills at least end the command.
    """

    config: Path
    domains: list[str]  # those without a KL first
    without_kl: int
    moments: list[Moment]
    ends: int
    drawn: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.config.stem

    @property
    def arguments(self) -> list[str]:
        return [str(self.config), "deterministic=true", "evaluation.problems=20"]

    @property
    def training(self) -> list[str]:
        return ["cold_start", *(f"experts.{domain}" for domain in self.domains), "merge"]

    @property
    def stages(self) -> list[str]:
        *before, merge = self.training
        return [*before, "gates.experts.chain_sum", merge, "evaluate", "export"]


# The merge has saved nothing by then, and repeats its first step.
IN_THE_MERGE = Moment("launcher", "merge", step=1, seconds=0.0, which=0.0)
SHORT = RunPlan(
    Path(__file__).with_name("short.yaml"),
    ["chain_sum"],
    without_kl=0,
    moments=[
        # One ends nothing: the next process is started without it, or by another.
        Moment("fork server", "cold_start", step=1, seconds=0.0, which=0.0),
        Moment("engine", "experts.chain_sum", step=1, seconds=0.0, which=0.0),
        IN_THE_MERGE,
    ],
    ends=1,
)
SMOKE = RunPlan(
    REPOSITORY / "configs" / "smoke.yaml",
    ["chain_sum", "spell_backward", "number_sorting"],
    without_kl=1,
    moments=[IN_THE_MERGE, Moment("rank 0", "evaluate", step=4, seconds=0.0, which=0.0)],
    ends=3,  # the launcher twice, and rank 0
    drawn=["launcher", "engine", "reward worker"],
)


@dataclass(frozen=True)
class SmokeRun:
    """A finished run and what its last command printed."""

    plan: RunPlan
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


@pytest.fixture(scope="module", params=tiered([SHORT, SMOKE], [SHORT]), ids=["short", "smoke"])
def plan(request: pytest.FixtureRequest) -> RunPlan:
    return request.param


@pytest.fixture(scope="module")
def peaceful(plan: RunPlan, tmp_path_factory: pytest.TempPathFactory) -> SmokeRun:
    """A run that nothing is killed in, watched for its timeline where kills are drawn from it."""
    directory = tmp_path_factory.mktemp("peaceful")
    log = directory / "braid.log"
    launched = braid(directory, "run", *plan.arguments, log=log)
    timeline = watch(directory / plan.name, launched) if plan.drawn else []
    assert launched.wait(PATIENCE_SECONDS) == 0, log.read_text()
    return SmokeRun(plan, directory / plan.name, log.read_text(), timeline)


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory,
    plan: RunPlan,
    peaceful: SmokeRun,
    warm_braid: WarmBraid,
) -> SmokeRun:
    """Kills at the moments of the plan: some of a seed, as in benchmarks/chaos.py, some always.

    `KilledRun` holds the run to clean ends, to continuing from the newest whole checkpoint, and to
    repeating no finished stage.
    """
    directory = tmp_path_factory.mktemp("killed")
    moments = [
        *draw(peaceful.timeline, plan.drawn, random.Random(SEED)),
        *plan.moments,
    ]
    order = plan.stages
    moments.sort(key=lambda moment: (order.index(moment.stage), moment.step, moment.seconds))
    begin = ["run", *plan.arguments, "stages.merge.loop.checkpoint_every=2"]
    run = KilledRun(directory, plan.name, begin, ["resume", plan.name], warm_braid)
    run.kill_at(moments, order)
    return SmokeRun(plan, run.path, run.output(), kills=run.kills)


@pytest.mark.usefixtures("plan")  # of which `name` is
@pytest.mark.parametrize("name", ["peaceful", "killed"])
def test_a_run_ends_with_the_table(name: str, request: pytest.FixtureRequest) -> None:
    run: SmokeRun = request.getfixturevalue(name)
    assert list(run.results["models"]) == run.plan.training
    for scores in run.results["models"].values():
        assert list(scores) == run.plan.domains
        for score in scores.values():
            assert set(score) == {"accuracy", "low", "high", "n"}
            assert 0 <= score["low"] <= score["accuracy"] <= score["high"] <= 1
            assert score["n"] == 20
    assert set(run.results["minutes"]) == set(run.plan.stages)
    for model in run.plan.training:
        assert model in run.output
    assert "stages/export/huggingface" in run.output


def test_ranks_and_engines_were_forked(peaceful: SmokeRun) -> None:
    """Their imports start no thread and touch no device, else the servers would have refused."""
    logs = list((peaceful.path / "fork_servers").glob("*.log"))
    assert [log.stem for log in sorted(logs)] == ["parallel.engine.server", "stages.main"]
    for log in logs:
        assert "Traceback" not in log.read_text()
        assert f" runs {log.stem} " in log.read_text()


def test_no_finished_stage_is_repeated(killed: SmokeRun) -> None:
    events = [json.loads(line) for line in (killed.path / "ledger.jsonl").read_text().splitlines()]
    done = Counter(event["stage"] for event in events if event["state"] == "done")
    assert done == Counter(killed.plan.stages)
    started = [event for event in events if event["cause"].startswith("from ")]
    ended = sum(kill.outcome == "resumed" for kill in killed.kills)
    assert ended >= killed.plan.ends
    assert len(started) <= len(killed.plan.stages) + ended


def test_no_step_is_missing_or_told_twice(killed: SmokeRun) -> None:
    for stage in killed.plan.training:
        steps = [line["step"] for line in metrics(killed.path, stage)]
        assert steps == list(range(1, len(steps) + 1))


def test_a_killed_run_ends_with_the_same_weights_and_results(
    peaceful: SmokeRun, killed: SmokeRun
) -> None:
    expected, found = (load_file(run.exported / "model.safetensors") for run in (peaceful, killed))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert killed.results["models"] == peaceful.results["models"]


@pytest.mark.combinations  # of test_slurm's jobs and of this run; two stages more
def test_jobs_of_slurm_make_the_same_weights(
    peaceful: SmokeRun, cluster: Cluster, tmp_path: Path
) -> None:
    """Each of the two ranks on a node of its own, and the engine as a further step."""
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 1\nnetwork_interface: lo\n")
    stages = ["cold_start", "experts.chain_sum"]
    only = [part for stage in stages for part in ("--only", stage)]
    where = ["--cluster", str(profile), "--runs-dir", str(tmp_path)]
    submitted = subprocess.run(
        [*BRAID, "submit", *peaceful.plan.arguments, *where, *only],
        cwd=REPOSITORY,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert submitted.returncode == 0, submitted.stderr
    *_, last = [line for line in submitted.stdout.splitlines() if ": job " in line]
    cluster.wait_until(lambda: cluster.state(last.split()[-1]) == "COMPLETED", seconds=300)
    for stage in stages:
        assert _tensors(tmp_path / peaceful.plan.name, stage) == _tensors(peaceful.path, stage)


def _tensors(run: Path, stage: str) -> dict[str, str]:
    """Checksums of the files with a stage's last weights and optimizer state."""
    checkpoint = RunDirectory(run).stage(stage).newest_checkpoint()
    assert checkpoint is not None
    files = json.loads((checkpoint.path / "checksums.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".distcp")}


def test_what_was_drawn_before_a_kill_is_not_drawn_again(
    peaceful: SmokeRun, killed: SmokeRun
) -> None:
    merge = metrics(killed.path, "merge")
    assert merge[0]["replayed"] == 4 * len(killed.plan.domains)
    assert [line["loss"] for line in merge] == [
        line["loss"] for line in metrics(peaceful.path, "merge")
    ]
    assert not list((killed.path / "stages").glob("*/rollouts/log/*"))  # checkpoints have it all


def test_engine_and_trainer_agree_after_every_refit(peaceful: SmokeRun) -> None:
    for stage in peaceful.plan.training[1:]:
        lines = metrics(peaceful.path, stage)
        assert len(lines) == 2
        assert all(line["mismatch_max"] <= 1e-4 for line in lines)


def test_each_domain_has_its_own_kl(peaceful: SmokeRun) -> None:
    plan = peaceful.plan
    logged = [metrics(peaceful.path, f"experts.{domain}")[-1] for domain in plan.domains]
    assert all("kl" not in line for line in logged[: plan.without_kl])
    assert all(line["kl"] >= 0 for line in logged[plan.without_kl :])


def test_a_gate_measures_an_expert_and_its_parent_on_its_own_domain(peaceful: SmokeRun) -> None:
    folder = peaceful.path / "stages" / "gates.experts.chain_sum"
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
    said = f"gates.experts.chain_sum  {verdict['outcome']}: experts.chain_sum gains "
    assert said in peaceful.output


def test_the_models_are_compared_with_what_they_cost(peaceful: SmokeRun) -> None:
    plan = peaceful.plan
    found = json.loads(finish(braid(peaceful.path.parent, "compare", plan.name, "--json")))
    assert found["start"] == "cold_start"
    assert found["experts"] == {domain: f"experts.{domain}" for domain in plan.domains}
    assert found["problems"] == dict.fromkeys(plan.domains, 20)
    assert found["models"].keys() == set(plan.training)
    for name, scores in peaceful.results["models"].items():
        for domain, score in scores.items():
            assert found["models"][name]["scores"][domain]["accuracy"] == score
    costs = {cost["stage"]: cost for cost in found["stages"]}
    assert list(costs) == plan.stages
    assert all(cost["minutes"] > 0 and cost["peak_bytes"] > 100 << 20 for cost in costs.values())
    for name in plan.training:
        lines = metrics(peaceful.path, name)
        assert costs[name]["trained_tokens"] == sum(line["trained_tokens"] for line in lines) > 0
        assert (costs[name]["sampled_tokens"] is None) == (name == "cold_start")


def test_its_report_draws_everything_that_it_recorded(peaceful: SmokeRun, browser: Browser) -> None:
    plan, path = peaceful.plan, peaceful.path
    finish(braid(path.parent, "report", plan.name))
    with opened(browser, path / "report.html") as page:
        visit(page, "verdict")
        text = page.locator("main").inner_text()
        assert all(stage in text for stage in plan.stages)
        for stage in plan.training:
            visit(page, f"curves/{stage}")
            lines = metrics(path, stage)
            charts = page.locator("#charts figure")
            assert charts.count() > 5
            drawn = page.locator("[data-metric=loss]").get_attribute("data-points")
            assert drawn == str(sum("loss" in line for line in lines))
        for stage in plan.training[1:]:
            visit(page, f"samples/{stage}")
            rows = parquet.read_table(path / "stages" / stage / "rollouts", use_threads=False)
            assert page.locator("#count").inner_text().startswith(f"{len(rows)} ")
        for name in ("versus", "merge", "routing", "time", "lineage"):
            visit(page, name)
            screenshot(page, f"{plan.name}-{name}")


def test_a_domain_is_tried_on_a_finished_stage(peaceful: SmokeRun, warm_braid: WarmBraid) -> None:
    domain = str(REPOSITORY / "configs" / "domains" / "spell_backward.yaml")
    asked = ("--run", peaceful.plan.name, "--stage", "cold_start", "--samples", "4")
    output = warm_braid(peaceful.path.parent, "domain", "check", domain, *asked)
    assert "128 responses to 32 prompts" in output
    assert "zero-variance groups, which teach nothing: " in output
    assert "reward/exact: " in output


def test_metrics_go_to_weights_and_biases_offline(peaceful: SmokeRun) -> None:
    for stage in peaceful.plan.training:
        folder = peaceful.path / "stages" / stage / "wandb"
        assert list(folder.glob("offline-run-*/*.wandb"))
        # Of a forked rank, after others have ended.
        assert bool(list(folder.rglob("*.table.json"))) == (stage != "cold_start")
    assert "logs no more" not in peaceful.output


def test_transformers_and_vllm_load_the_exported_model(peaceful: SmokeRun) -> None:
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
        timeout=PATIENCE_SECONDS,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == expected.tolist()
