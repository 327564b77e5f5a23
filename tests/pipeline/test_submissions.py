"""`braid submit` with a stand-in for Slurm: its files, and jobs that the ledger lacks."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.run.directory import RunDirectory
from pipeline.run.ledger import Ledger

Braid = Callable[..., tuple[int, str, str]]


def test_a_dry_run_writes_nothing_and_prepare_the_run_s_directory(
    braid: Braid, config: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\n")
    given = ("submit", config, "--cluster", profile)
    code, shown, err = braid(*given, "--dry-run")
    assert (code, err) == (0, "")
    assert shown.count("sbatch --parsable") == 5
    assert f"\n# writes {runs}/small with this script" in shown
    assert not runs.exists()
    code, said, _ = braid(*given, "--prepare")
    script = runs / "small" / "slurm" / "submit.sh"
    assert (code, said) == (0, f"nothing is submitted; the commands are in {script}\n")
    assert shown.startswith(script.read_text())
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    code, again, _ = braid(*given, "--dry-run")
    assert code == 0
    assert script.read_text() in again
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
    other = braid(*given, "--dry-run", "--prepare")
    assert other[0] == 2


@pytest.mark.parametrize("option", ["--prepare", "--json"])
def test_a_queue_that_does_not_answer_leaves_no_run(
    option: str, braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    (slurm / "squeue").write_text(f"#!/bin/bash\necho '{said}' >&2; exit 1\n")
    code, _, err = braid("submit", config, "--cluster", profile, option)
    assert (code, err) == (
        1,
        f"braid: squeue failed: {said}; run this on a login node of the cluster, which has Slurm's "
        "commands\n",
    )
    assert not (runs / "small").exists()


def test_a_missing_profile_is_copied_from_the_example(braid: Braid, config: Path) -> None:
    code, _, err = braid("submit", config, "--dry-run")
    copied = "cp configs/clusters/example.yaml configs/clusters/mine.yaml and fill it in"
    assert (code, err) == (1, f"braid: --cluster FILE is required; {copied}\n")


def test_engines_need_no_cores_where_they_are_submitted(
    braid: Braid, config: Path, profile: Path, slurm: Path
) -> None:
    own = "engine={count: 99, placement: own}"
    code, out, err = braid("submit", config, own, "--cluster", profile, "--dry-run")
    assert (code, err) == (0, "")
    assert "--nodes=51 " in out  # 2 ranks and 99 engines, 2 a node


def test_the_script_of_a_finished_run_submits_nothing(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    given = ("submit", config, "--cluster", profile, "--prepare")
    assert braid(*given)[0] == braid("run", config)[0] == 0
    code, out, _ = braid(*given)
    script = runs / "small" / "slurm" / "submit.sh"
    assert (code, out.splitlines()[-1].rpartition(" ")[2]) == (0, str(script))
    assert "sbatch" not in script.read_text()
    dry_run = braid("submit", config, "--cluster", profile, "--dry-run")
    said = "# nothing to submit: 6 done; rerun a stage and what follows with --from STAGE"
    assert (dry_run[0], dry_run[1].splitlines()[1:], dry_run[2]) == (0, [said], "")


@pytest.mark.parametrize("said", ["${job}$(touch x)", """${job}`touch x`"'\\ !;touch x;"""])
def test_the_script_of_a_submission_runs_nothing_but_sbatch(
    said: str, braid: Braid, config: Path, profile: Path, slurm: Path, tmp_path: Path
) -> None:
    options = {"account": said, "constraint": "${job_0}", "options": [f"--licenses={said}"]}
    profile.write_text(json.dumps({"ranks_per_node": 2, **options}))
    (slurm / "sbatch").write_text(
        "#!/bin/bash\n"
        'folder=$(dirname "$0")\n'
        'printf "%s\\0" "$@" END >> "$folder/submitted"\n'
        'echo $((100 + $(tr -cd "\\n" < "$folder/count" | wc -c))); echo >> "$folder/count"\n'
    )
    (slurm / "count").touch()
    runs = tmp_path / said
    given = ("submit", config, "--cluster", profile, "--runs-dir", runs)
    code, shown, err = braid(*given, "--dry-run")
    assert (code, err) == (0, "")
    assert braid(*given, "--prepare")[0] == 0
    script = runs / "small" / "slurm" / "submit.sh"
    assert shown.startswith(script.read_text())
    here = tmp_path / "here"
    here.mkdir()
    subprocess.run(["bash", script], cwd=here, check=True)
    assert not list(here.iterdir())
    by_script = (slurm / "submitted").read_text()
    (slurm / "submitted").unlink()
    (slurm / "count").write_text("")
    assert braid(*given)[0] == 0
    assert by_script == (slurm / "submitted").read_text()
    first, second, *_ = [job.split("\0") for job in by_script.split("END\0")]
    for option in (f"--account={said}", "--constraint=${job_0}", f"--licenses={said}"):
        assert option in first
    assert first[-3:] == [str(runs / "small"), "cold_start", ""]
    assert "--dependency=afterok:100" in second


@pytest.mark.parametrize("job", ["$(touch x)", "{0}", "{9}", "1 2", "", "1\n2"])
def test_only_a_job_number_is_a_job(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path, job: str
) -> None:
    assert braid("submit", config, "--cluster", profile, "--prepare")[0] == 0
    (slurm / "squeue").write_text("#!/bin/bash\nexit 1\n")  # so that the ledger alone is believed
    ledger = Ledger(runs / "small" / "ledger.jsonl")
    ledger.append("cold_start", "submitted", "x", 0, job=job)
    assert ledger.events() == []
    code, shown, err = braid("submit", config, "--cluster", profile, "--dry-run")
    assert (code, err) == (0, "")
    assert shown.count("sbatch --parsable") == 5
    assert "touch" not in shown


def test_nothing_is_made_for_a_stage_that_cannot_start(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\n")
    code, _, err = braid("submit", config, "--cluster", profile, "--only", "merge")
    assert code == 1
    assert "merge needs cold_start, which is pending" in err
    assert not runs.exists()


def contents(run: Path) -> dict[Path, bytes]:
    """Return the contents of all files other than locks."""
    files = (path for path in run.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("command", ["run", "evaluate", "export"])
def test_nothing_that_jobs_read_changes_while_they_wait(
    command: str, braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path, tmp_path: Path
) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    assert braid("submit", config, "--cluster", profile)[0] == 0
    before = contents(runs / "small")
    given = {
        "run": (config, "stages.merge.optimizer.learning_rate=0.5", "--from", "merge"),
        "evaluate": ("small", "--stage", "cold_start"),
        "export": ("small", "--stage", "cold_start", "--to", tmp_path / "there"),
    }
    code, _, err = braid(command, *given[command])
    assert code == 1
    assert "has jobs in Slurm's queue: 100_0, 100_1, 101, 102, 103; wait" in err
    assert contents(runs / "small") == before


def test_a_profile_that_queued_jobs_would_read_is_not_changed_under_them(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    assert braid("submit", config, "--cluster", profile, "--only", "cold_start")[0] == 0
    profile.write_text("ranks_per_node: 1\nwarning_seconds: 90\n")
    code, _, err = braid("submit", config, "--cluster", profile)
    assert code == 1
    assert "were submitted with a different ranks_per_node, warning_seconds" in err
    # Options that only sbatch reads may change for the others.
    profile.write_text("ranks_per_node: 2\nkinds: {grpo: {partition: other, ranks_per_node: 4}}\n")
    code, _, err = braid("submit", config, "--cluster", profile)
    assert (code, err) == (0, "")
    assert "--partition=other" in (slurm / "submitted").read_text().splitlines()[1]
    script = (runs / "small" / "slurm" / "submit.sh").read_text()
    assert braid("submit", config, "--cluster", profile)[0] == 0  # with nothing left to submit
    assert (runs / "small" / "slurm" / "submit.sh").read_text() == script


def test_a_profile_may_change_for_jobs_that_left_the_queue(
    braid: Braid, config: Path, profile: Path, slurm: Path
) -> None:
    assert braid("submit", config, "--cluster", profile, "--only", "cold_start")[0] == 0
    (slurm / "queue").write_text("")  # cancelled by hand, before it began
    profile.write_text("ranks_per_node: 1\n")
    assert braid("submit", config, "--cluster", profile)[0] == 0
    assert len((slurm / "submitted").read_text().splitlines()) == 6


def test_nothing_is_submitted_behind_a_gate_that_is_stale(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    gates = ("stages.experts.gate.min_gain=-1", "stages.experts.gate.min_gain=-1")
    only = [
        word
        for name in ("cold_start", "experts.sums", "experts.words", "gates.experts.sums")
        for word in ("--only", name)
    ]
    assert braid("run", config, *gates, *only, "--only", "gates.experts.words")[0] == 0
    (runs / "small/stages/gates.experts.sums/results.json").unlink()
    asked = ("submit", config, *gates, "--cluster", profile, "--only", "merge")
    for options in ((), ("--dry-run",)):
        code, _, err = braid(*asked, *options)
        assert code == 1
        assert "merge waits for gates.experts.sums, which is stale" in err
    assert not (slurm / "submitted").exists()


def test_a_stage_is_resubmitted_with_its_dependents(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    assert braid("run", config)[0] == 0
    edited = ("submit", config, "domains.sums.objective.kl.coefficient=0.5", "--cluster", profile)
    code, _, err = braid(*edited)
    assert code == 1
    assert "--from experts.sums" in err
    before = contents(runs / "small")
    code, shown, err = braid(*edited, "--from", "experts.sums", "--dry-run")
    assert (code, err) == (0, "")
    assert shown.count("sbatch --parsable") == 4  # the expert, merge, evaluation and export
    assert contents(runs / "small") == before
    refused = braid(*edited, "--from", "experts.sums", "--only", "merge")
    assert "merge needs experts.sums, which is pending" in refused[2]
    assert contents(runs / "small") == before
    code, out, err = braid(*edited, "--from", "experts.sums")
    assert (code, err) == (0, "")
    assert "put aside" in out
    assert (runs / "small" / "replaced" / "experts.sums.1").is_dir()
    assert len((slurm / "submitted").read_text().splitlines()) == 4
    code, _, err = braid(*edited, "--from", "merge")
    assert code == 1
    assert "merge, evaluate, export cannot be rerun while a job of it waits or runs" in err


def test_a_submission_reuses_another_run(
    braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    assert braid("run", config, "--name", "other")[0] == 0
    edit = "stages.merge.optimizer.learning_rate=0.5"
    forked = ("submit", config, edit, "--cluster", profile, "--fork", "other")
    code, shown, err = braid(*forked, "--dry-run")
    assert (code, err) == (0, "")
    assert shown.count("sbatch --parsable") == 3
    assert not (runs / "small").exists()
    code, out, err = braid(*forked)
    assert (code, err) == (0, "")
    assert f"reused from {runs}/other: cold_start, experts.sums, experts.words" in out
    assert len((slurm / "submitted").read_text().splitlines()) == 3


REFUSED = {
    "sbatch: error: invalid partition specified: gpuu": ['cluster.yaml:1: partition: "gpuu"'],
    "sbatch: error: Batch job submission failed: Invalid qos specification": [
        'cluster.yaml:3: kinds.sft.qos: "fast"'
    ],
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination"
    " specified": ["cluster.yaml: account: is not set", 'cluster.yaml:1: partition: "gpuu"'],
    "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or"
    " exceeds some limit)": ['cluster.yaml:2: walltime: "9-0"'],
    "sbatch: error: Invalid generic resource (gres) specification": [
        "cluster.yaml:3: kinds.sft.gpus_per_node: 9",
        "cluster.yaml: gpu_type: is not set",
    ],
    "sbatch: error: Invalid --signal specification": ["cluster.yaml:1: warning_seconds: 300"],
    "sbatch: error: Invalid --begin specification": ["cluster.yaml: options: is not set"],
    "sbatch: error: Batch job submission failed: Requested reservation is invalid": [
        "cluster.yaml: options: is not set"
    ],
}


@pytest.mark.parametrize("said", [*REFUSED, "sbatch: error: the plugin of this site objects"])
def test_a_refusal_of_sbatch_names_the_keys_it_is_about(
    said: str, braid: Braid, config: Path, profile: Path, slurm: Path
) -> None:
    profile.write_text(
        "partition: gpuu\nwalltime: '9-0'\n"
        "kinds: {sft: {qos: fast, gpus_per_node: 9, gpu_memory_gib: 80}}\n"
    )
    (slurm / "refuses").write_text(f"{said}\n")
    code, _, err = braid("submit", config, "--cluster", profile)
    assert code == 1
    first, *lines, last = err.splitlines()
    assert first == f"braid: sbatch failed: {said}"
    assert last.startswith("once that is fixed, continue with: braid submit ")
    if said in REFUSED:
        heading, *lines = lines
        assert heading == "the cluster's profile sets:"
    expected = [f"  {profile.parent}/{line}" for line in REFUSED.get(said, [])]
    assert lines == expected


@pytest.mark.parametrize("first", ["the file", "the run's copy"])
def test_after_a_refusal_the_printed_command_takes_the_fixed_profile(
    first: str, braid: Braid, config: Path, profile: Path, runs: Path, slurm: Path
) -> None:
    """The run has a copy of the refused profile, which nobody thinks of when fixing the file."""
    profile.write_text("ranks_per_node: 2\naccount: wrong\n")
    (slurm / "refuses").write_text("sbatch: error: Invalid account\n")
    code, _, err = braid("submit", config, "--cluster", profile, "--only", "cold_start")
    if first == "the run's copy":
        code, _, err = braid("submit", runs / "small" / "run.yaml", "--only", "cold_start")
    assert code == 1
    fixed, printed = err.splitlines()[-1].split(" continue with: braid ")
    assert fixed == "once that is fixed,"
    profile.write_text("ranks_per_node: 2\naccount: mine\n")
    (slurm / "refuses").unlink()
    code, _, err = braid(*shlex.split(printed))
    assert (code, err) == (0, "")
    [job] = (slurm / "submitted").read_text().splitlines()
    assert "--account=mine" in job
    run = RunDirectory(runs / "small")
    assert run.resume_command().startswith(f"braid submit {run.settings_file} --cluster {profile} ")
    profile.unlink()
    assert run.resume_command() == f"braid submit {run.settings_file} --runs-dir {runs}"
