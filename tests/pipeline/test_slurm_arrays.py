"""Arrays of Slurm jobs: the stages of a block with `for_each` that wait for the same jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Thread

import pytest

from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import load
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run, StageState
from pipeline.slurm.submit import Submission, submissions
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.violations import TRAINED, edited

Braid = Callable[..., tuple[int, str, str]]
EACH = "for_each: domain"
LAST = "  export: {kind: export, from: merge}\n"
PAIRS = "data: {pairs: {source: jsonl, path: pairs.jsonl}}"
KEPT = "prompts: 8, keep: {reward: null}"
MIXTURE = "data: {good: {stage: collect}}, sequences_per_step: 4"


def submitted(
    config: Path,
    run: RunDirectory,
    *blocks: str,
    done: Collection[str] = (),
    only: Collection[str] = (),
) -> list[Submission]:
    """Return the submissions of the smallest configuration with further blocks of stages."""
    edited(config, LAST, "".join([LAST, *(f"  {block}\n" for block in blocks)]))
    whole = Run(run.path, load(config, to_start=False))
    states = {
        stage.name: StageState("done" if stage.name in done else "pending")
        for stage in whole.stages
    }
    wanted = [stage for stage in whole.stages if not only or stage.name in only]
    return submissions(whole, ClusterSettings(array_task_throttle=3), wanted, states)


def stages(found: list[Submission]) -> list[list[str]]:
    """Return the names of every submission's stages."""
    return [[stage.name for stage in each.stages] for each in found]


def option(of: Submission, name: str) -> str:
    """Return an option of a submission; empty without it."""
    given = (each.partition("=") for each in of.options)
    return next((value for key, _, value in given if key == f"--{name}"), "")


@pytest.mark.parametrize(
    "block",
    [
        f"kind: sft, from: cold_start, {TRAINED[1:-1]}",
        f"kind: distill, from: cold_start, teachers: cold_start, {TRAINED[1:-1]}",
        f"kind: dpo, from: cold_start, {PAIRS}, {TRAINED[1:-1]}",
        f"kind: sample, from: cold_start, {KEPT}",
        "kind: grpo, from: cold_start",
        "kind: evaluate, models: [cold_start]",
        "kind: export, from: cold_start",
        "kind: import, from: cold_start",
    ],
    ids=lambda block: block.split(",")[0].removeprefix("kind: "),
)
def test_the_stages_of_one_block_are_an_array_whatever_their_kind(
    block: str, config: Path, run: RunDirectory
) -> None:
    (config.parent / "pairs.jsonl").touch()
    found = submitted(config, run, f"more: {{{EACH}, {block}}}")
    kind = block.split(",")[0].removeprefix("kind: ")
    [array] = [each for each in found if each.stages[0].block == "more"]
    assert stages([array]) == [["more.sums", "more.words"]]
    assert (option(array, "array"), option(array, "job-name")) == ("0-1%3", "small.more")
    assert option(array, "comment").endswith("small/more.sums,more.words")
    assert option(array, "output").endswith("%x-%A_%a.out")
    assert array.script.name == f"{kind}.sbatch"
    assert array.after == ("{0}",)


def test_stages_of_different_blocks_are_different_arrays(config: Path, run: RunDirectory) -> None:
    """Two blocks of one kind whose stages wait for the same job; and one stage is no array."""
    found = submitted(
        config,
        run,
        f"again: {{kind: grpo, from: cold_start, {EACH}}}",
        "alone: {kind: grpo, from: cold_start, domains: [sums]}",
    )
    expected = [
        ["cold_start"],
        ["experts.sums", "experts.words"],
        ["again.sums", "again.words"],
        ["alone"],
        ["merge"],
    ]
    assert stages(found)[: len(expected)] != expected  # merge comes before the last three
    assert sorted(stages(found)[: len(expected)]) == sorted(expected)
    assert {each.after for each in found[1:5] if each.stages[0].name != "merge"} == {("{0}",)}
    assert [option(each, "array") for each in found if len(each.stages) == 1] == [""] * 5


def test_stages_of_a_block_that_wait_for_different_jobs_are_no_array(
    config: Path, run: RunDirectory
) -> None:
    second = f"second: {{kind: grpo, from: experts, {EACH}}}"
    found = submitted(config, run, second)
    own = [each for each in found if each.stages[0].block == "second"]
    assert stages(own) == [["second.sums"], ["second.words"]]
    assert [each.after for each in own] == [("{1}_0",), ("{1}_1",)]
    assert [option(each, "array") for each in own] == ["", ""]


def test_what_is_done_is_no_job_to_wait_for(config: Path, run: RunDirectory) -> None:
    """A partial submission: stages that would wait for different stages wait for the same jobs."""
    second = f"second: {{kind: grpo, from: experts, {EACH}}}"
    done = ("cold_start", "experts.sums", "experts.words")
    found = submitted(config, run, second, done=done, only=("second.sums", "second.words"))
    assert stages(found) == [["second.sums", "second.words"]]
    assert found[0].after == ()


def test_a_stage_that_is_done_is_left_out_of_its_array(config: Path, run: RunDirectory) -> None:
    third = f"third: {{kind: sft, from: cold_start, {EACH}, {TRAINED[1:]}"
    found = submitted(config, run, third, done=("cold_start", "third.sums"), only=("third.words",))
    assert stages(found) == [["third.words"]]
    assert (option(found[0], "array"), option(found[0], "job-name")) == ("", "small.third.words")


def test_a_stage_waits_for_one_that_is_submitted_after_its_block_s_first(
    config: Path, run: RunDirectory
) -> None:
    """`taught.words` waits for `late`, whose job is submitted after that of `taught.sums`."""
    found = submitted(
        config,
        run,
        f"taught: {{kind: distill, from: cold_start, {EACH}, "
        f"teachers: {{sums: cold_start, words: late}}, {TRAINED[1:]}",
        "late: {kind: grpo, from: cold_start, domains: [words]}",
    )
    names = [name for [name, *_] in stages(found)]
    own = [each for each in found if each.stages[0].block == "taught"]
    assert stages(own) == [["taught.sums"], ["taught.words"]]
    assert own[0].after == ("{0}",)
    assert own[1].after == ("{0}", f"{{{names.index('late')}}}")


def test_the_gates_of_a_block_are_an_array_of_their_own(config: Path, run: RunDirectory) -> None:
    edited(config, f"{EACH}}}", f"{EACH}, gate: {{problems: 20}}}}")
    done = ("cold_start", "experts.sums", "experts.words")
    gates = [f"gates.{name}" for name in done[1:]]
    found = submitted(config, run, done=done, only=gates)
    assert stages(found) == [gates]
    assert option(found[0], "job-name") == "small.gates.experts"
    assert found[0].script.name == "gate.sbatch"


def test_a_gate_and_a_stage_of_one_block_are_no_array(config: Path, run: RunDirectory) -> None:
    """Neither waits for a job where one expert is done and the other is not."""
    edited(config, f"{EACH}}}", f"{EACH}, gate: {{problems: 20}}}}")
    left = ["experts.words", "gates.experts.sums"]
    found = submitted(config, run, done=("cold_start", "experts.sums"), only=left)
    assert stages(found) == [[name] for name in left]
    assert [each.script.name for each in found] == ["grpo.sbatch", "gate.sbatch"]
    assert [each.after for each in found] == [(), ()]


def test_an_array_of_samples_is_one_job_for_what_reads_it(config: Path, run: RunDirectory) -> None:
    found = submitted(
        config,
        run,
        f"collect: {{kind: sample, from: cold_start, {EACH}, {KEPT}}}",
        f"tuned: {{kind: sft, from: cold_start, {EACH}, {MIXTURE}, {TRAINED[1:]}",
    )
    names = [name for [name, *_] in stages(found)]
    array = names.index("collect.sums")
    assert len(found[array].stages) == 2
    tuned = {each.stages[0].name: each.after for each in found if each.stages[0].block == "tuned"}
    assert tuned == {
        "tuned.sums": ("{0}", f"{{{array}}}_0"),
        "tuned.words": ("{0}", f"{{{array}}}_1"),
    }


def test_a_task_of_an_array_of_any_kind_is_known_and_cancelled_alone(
    braid: Braid, config: Path, profile: Path, slurm: Path
) -> None:
    edited(config, LAST, f"{LAST}  warm: {{kind: sft, {EACH}, {TRAINED[1:]}\n")
    code, out, err = braid("submit", config, "--cluster", profile)
    assert (code, err) == (0, "")
    assert "warm.sums: job 103_0\nwarm.words: job 103_1\n" in out
    number = "103_1"
    status = " ".join(braid("status", "small")[1].split())
    assert f"job {number} waits: Priority" in status
    code, out, _ = braid("cancel", "small", "warm.words")
    assert (code, out.splitlines()[0]) == (0, f"warm.words: cancelled (job {number})")
    assert (slurm / "cancelled").read_text().splitlines()[0] == number
    queue = (slurm / "queue").read_text().splitlines(keepends=True)
    (slurm / "queue").write_text("".join(each for each in queue if not each.startswith(number)))
    (slurm / "cancelled").unlink()
    code, out, err = braid("submit", config, "--cluster", profile)
    assert (code, err) == (0, "")
    assert "warm.sums: submitted already" in out
    assert "\nwarm.words: job " in f"\n{out}"


def test_evaluations_of_one_block_are_one_table(
    braid: Braid, config: Path, run: RunDirectory
) -> None:
    """Each measures the same model on its own domain, and two may end at the same time."""
    edited(config, "evaluate: {kind: evaluate}", f"evaluate: {{kind: evaluate, {EACH}}}")
    assert braid("run", config)[0] == 0
    whole = Run(run.path, load(config))
    row = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 20}

    def measured(domain: str) -> None:
        path = run.stage(f"evaluate.{domain}").results
        path.write_text(json.dumps({"models": {"merge": {domain: row}}}))

    measured("sums")
    run.results.unlink()
    with whole.lock_results():  # as another task of the array does
        thread = Thread(target=whole.write_results)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not run.results.exists()
        measured("words")
    thread.join(PATIENCE_SECONDS)
    assert json.loads(run.results.read_text())["models"] == {"merge": {"sums": row, "words": row}}


def test_the_former_name_of_the_throttle_is_an_error_that_names_the_new_one(
    config: Path, profile: Path, braid: Braid
) -> None:
    profile.write_text("ranks_per_node: 2\nexperts_at_once: 2\n")
    code, _, err = braid("submit", config, "--cluster", profile, "--dry-run")
    assert code == 1
    assert "cluster.yaml:2: experts_at_once: renamed to array_task_throttle" in err
