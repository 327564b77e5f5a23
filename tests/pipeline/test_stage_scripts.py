"""The stage scripts in slurm/, run by bash without a Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallel.errors import UserError
from pipeline import cli
from pipeline.slurm.stage import stage_of_task
from pipeline.slurm.submit import SCRIPTS
from stages.kinds import KINDS
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.conftest import Braid
from tests.runs import REPOSITORY

ALL = sorted(SCRIPTS.glob("*.sbatch"), key=lambda path: path.stem)
PREPARE = "braid submit CONFIG --cluster PROFILE --prepare"


def body(script: Path) -> str:
    return script.read_text().partition("\ntrap ")[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A prepared run, in a directory whose name a shell would take apart."""
    run = tmp_path / "my runs" / "small"
    run.mkdir(parents=True)
    (run / "run.yaml").touch()
    return run


@pytest.fixture
def printing(tmp_path: Path) -> Path:
    """The directory of a `braid` that prints its arguments."""
    program = tmp_path / "bin" / "braid"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "%s|" "$@"\n')
    program.chmod(0o755)
    return program.parent


def bash(script: Path, *arguments: object, path: Path | None = None, **environment: str) -> tuple:
    """Return the exit code and both outputs of a script that finds only bash's own programs."""
    found = subprocess.run(
        ["/bin/bash", str(script), *map(str, arguments)],
        env={"PATH": f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return found.returncode, found.stdout, found.stderr


def test_all_scripts_do_the_same() -> None:
    assert {script.stem for script in ALL} == {kind.script or kind.name for kind in KINDS.values()}
    assert len({body(script) for script in ALL}) == 1
    assert "braid stage" in body(ALL[0])


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.stem)
def test_a_script_runs_its_stage(script: Path, run: Path, printing: Path) -> None:
    said = f"stage|--trust-run|{run}|merge|"
    assert bash(script, run, "merge", path=printing) == (0, said, "")
    (run / "setup.sh").write_text(f"export PATH={printing}:$PATH\n")
    assert bash(script, run, "merge") == (0, said, "")
    stages = ("experts.a", "experts.b")
    found = bash(script, run, *stages, path=printing)
    assert found == (0, f"stage|--trust-run|{run}|experts.a|experts.b|", "")


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.stem)
def test_a_script_without_a_stage_says_how_to_submit_it(script: Path, run: Path) -> None:
    for arguments in ((), (run,)):
        code, out, err = bash(script, *arguments)
        assert (code, out) == (1, "")
        assert err.endswith(f"usage: sbatch [OPTIONS] slurm/{script.name} runs/NAME STAGE\n")


def test_a_stage_without_its_run_says_how_to_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stage", str(tmp_path / "small"), "merge"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"no run {tmp_path}/small in " in err
    assert err.endswith(f"create a run with: {PREPARE}\n")


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.stem)
def test_a_script_without_braid_says_how_to_have_it(script: Path, run: Path) -> None:
    code, out, err = bash(script, run, "merge")
    assert (code, out) == (1, "")
    assert err == (
        f"{run}: braid is not on PATH; activate its environment before sbatch, or in the profile's "
        f"setup, for {run}/setup.sh: {PREPARE}\n"
    )
    (run / "setup.sh").write_text("export PATH=/usr/bin:/bin\n")
    code, _, err = bash(script, run, "merge")
    assert (code, err.startswith(f"{run}: braid is not on PATH; ")) == (1, True)


def test_several_stages_are_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage_of_task(["merge"]) == "merge"
    stages = ["experts.a", "experts.b"]
    with pytest.raises(UserError, match="2 stages need a job array; use sbatch --array=0-1"):
        stage_of_task(stages)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    with pytest.raises(UserError, match="2 stages need a job array"):
        stage_of_task(stages)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert stage_of_task(stages) == "experts.b"


def test_a_setup_that_fails_ends_the_job(run: Path, printing: Path) -> None:
    (run / "setup.sh").write_text("echo no such module; false\n")
    assert bash(ALL[0], run, "merge", path=printing) == (1, "no such module\n", "")


STAND_IN = f"""\
#!{sys.executable}
# The part of `braid stage` that starts the ranks.
import sys
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.validate import load_cluster
from pipeline.launch.processes import wait_for_all
from pipeline.slurm.places import place
from pipeline.slurm.steps import SlurmJob
run = Path(sys.argv[-2])
cluster = load_cluster(run / "cluster.yaml")
places = place(["n1"], LayoutSettings(ranks=2), EngineSettings(), cluster, samples=False)
show = "import os; print('seed', os.environ.get('PYTHONHASHSEED'), hash('a set'))"
[ranks] = SlurmJob(places, cluster).start_ranks([sys.executable, "-c", show], 2, run, False)
wait_for_all([ranks], seconds=60)
print((run / "srun.log").read_text())
"""
SRUN = """\
#!/bin/bash
# Two tasks of a step, with the environment that --export gives them.
clean="env -i"
while [[ "$1" == --* ]]; do
    if [ "$1" = --export=ALL ]; then clean=env; fi
    shift
done
for task in 0 1; do $clean "$@"; done
"""


@pytest.mark.parametrize("seed", ["0", "7"])
def test_the_hash_seed_reaches_the_ranks(
    seed: str,
    braid: Braid,
    config: Path,
    profile: Path,
    runs: Path,
    slurm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six datasets draw by it. Here sbatch hands no environment on, as with --export=NONE."""
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    code, _, err = braid("submit", config, "--cluster", profile, "--prepare")
    assert code == 0, err
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("braid", STAND_IN), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    setup = runs / "small" / "setup.sh"
    setup.write_text(setup.read_text() + f"export PATH={programs}:$PATH\n")
    code, out, err = bash(SCRIPTS / "grpo.sbatch", runs / "small", "experts.sums")
    assert (code, err) == (0, "")
    first, second = [line for line in out.splitlines() if line.startswith("seed ")]
    assert first.startswith(f"seed {seed} ")
    assert first == second
