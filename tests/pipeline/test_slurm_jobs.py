"""The jobs of a submission, and the places of a stage's processes; without Slurm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from parallel.errors import UserError
from parallel.machine.network import LOOPBACK, address_of, environment_of
from parallel.machine.slots import nodes_needed
from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.cluster import ClusterSettings, ContainerSettings, KindSettings
from pipeline.config.validate import load_cluster
from pipeline.launch.launcher import write_engine_job
from pipeline.launch.processes import wait_for_all
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.run import Run
from pipeline.slurm.places import (
    PlacedEngine,
    Places,
    check_reachable,
    cpus_of,
    place,
    size_options,
    too_few_cpus,
)
from pipeline.slurm.queue import QueuedJob
from pipeline.slurm.steps import SlurmJob, contained, passed_on
from pipeline.slurm.submit import (
    submissions,
    submit,
    write_scripts,
)
from stages.settings import RunSettings
from tests.awaiting import PATIENCE_SECONDS

EXPORT = KindSettings(walltime="0:10:00")
NODES = [f"n{number}" for number in range(1, 10)]


def sizes(ranks: int, **engine: object) -> tuple[LayoutSettings, EngineSettings]:
    return LayoutSettings(ranks=ranks), EngineSettings.model_validate(engine)


def test_engines_that_share_are_dealt_out_over_the_ranks_nodes() -> None:
    cluster = ClusterSettings(ranks_per_node=4)
    layout, engine = sizes(8, count=4, tensor=2)
    assert nodes_needed(layout, engine, 4) == 2
    first, second = ([node] for node in NODES[:2])
    assert place(NODES[:2], layout, engine, cluster, samples=True) == Places(
        ["n1", "n2"],
        4,
        [
            PlacedEngine(first, [0, 1]),
            PlacedEngine(second, [0, 1]),
            PlacedEngine(first, [2, 3]),
            PlacedEngine(second, [2, 3]),
        ],
    )


def test_engines_on_separate_devices_follow_the_last_rank_on_one_node_each() -> None:
    cluster = ClusterSettings(ranks_per_node=4)
    layout, engine = sizes(3, count=3, tensor=2, placement="own")
    # One device of the first node is left over: an engine of two does not fit there.
    assert nodes_needed(layout, engine, 4) == 3
    found = place(NODES[:3], layout, engine, cluster, samples=True)
    engines = [
        PlacedEngine(["n2"], [0, 1]),
        PlacedEngine(["n2"], [2, 3]),
        PlacedEngine(["n3"], [0, 1]),
    ]
    assert found == Places(["n1"], 4, engines)
    assert place(NODES[:3], layout, engine, cluster, samples=False).engines == []


def test_an_engine_larger_than_a_node_takes_whole_nodes(
    run: RunDirectory, settings: RunSettings, recorded_srun: Path, tmp_path: Path
) -> None:
    cluster = ClusterSettings(ranks_per_node=4, cpus_per_rank=2)
    layout, engine = sizes(5, count=2, tensor=8, placement="own")
    found = place(NODES[:6], layout, engine, cluster, samples=True)
    assert found.rank_nodes == ["n1", "n2"]
    assert found.engines == [(["n3", "n4"], [0, 1, 2, 3]), (["n5", "n6"], [0, 1, 2, 3])]
    assert found.nodes == NODES[:6]
    assert size_options(layout, engine, cluster)[0] == "--nodes=6"
    assert too_few_cpus(found, 5, NODES[:6], [8, 2, 8, 8, 8, 8], 2) is None
    assert too_few_cpus(found, 5, NODES[:6], [8, 2, 8, 7, 8, 8], 2) == ("n4", 7, 8)
    job = SlurmJob(found, cluster)
    assert job.nodes_per_engine == 2
    written = write_engine_job(run.engine(0), settings, 0, job)
    assert json.loads(written.read_text())["nodes"] == 2
    step = job.start_engine("engine 1", 1, ["python"], tmp_path / "engine.log")
    wait_for_all([step], seconds=PATIENCE_SECONDS)
    step.reap()
    # One task a node, which end together: vLLM cannot replace one of them.
    expected = "--nodelist=n5,n6 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 "
    assert expected in (started := recorded_srun.read_text())
    assert " --kill-on-bad-exit=1 " in started


def test_too_few_nodes_are_refused_with_the_number() -> None:
    cluster = ClusterSettings(ranks_per_node=2)
    with pytest.raises(UserError, match=r"1 of the 4 nodes .* submit it with --nodes=4"):
        place(NODES[:1], *sizes(8), cluster, samples=True)
    with pytest.raises(UserError, match=r"3 ranks exceed .* ranks_per_node = 2 and are"):
        place(NODES, *sizes(2, tensor=3), cluster, samples=True)


def test_too_few_cpus_of_a_node_are_found() -> None:
    assert cpus_of("64(x2),32,1(x1)") == [64, 64, 32, 1]
    assert cpus_of("") == []
    cluster = ClusterSettings(ranks_per_node=4)
    layout, engine = sizes(6, count=2, tensor=3, placement="own")
    nodes = NODES[:4]
    own = place(nodes, layout, engine, cluster, samples=True)
    assert own.engines == [(["n3"], [0, 1, 2]), (["n4"], [0, 1, 2])]
    assert too_few_cpus(own, 6, nodes, [4, 2, 3, 3], 1) is None
    assert too_few_cpus(own, 6, nodes, [], 1) is None  # where Slurm does not say
    assert too_few_cpus(own, 6, nodes, [3, 2, 3, 3], 1) == ("n1", 3, 4)
    assert too_few_cpus(own, 6, nodes, [4, 1, 3, 3], 1) == ("n2", 1, 2)
    assert too_few_cpus(own, 6, nodes, [8, 4, 6, 5], 2) == ("n4", 5, 6)
    layout, engine = sizes(4, count=2, tensor=2)
    shared = place(nodes[:1], layout, engine, cluster, samples=True)
    assert too_few_cpus(shared, 4, nodes[:1], [4], 1) is None  # they take turns
    assert too_few_cpus(shared, 4, nodes[:1], [1], 1) == ("n1", 1, 4)
    options = ["--nodes=1", "--ntasks-per-node=4", "--cpus-per-task=1"]
    assert size_options(layout, engine, cluster) == options


def test_stages_wait_for_their_inputs(run: RunDirectory, settings: RunSettings) -> None:
    stages = compile_graph(settings)
    cluster = ClusterSettings(
        account="lab",
        partition="gpu",
        gpus_per_node=8,
        array_task_throttle=2,
        kinds={"export": EXPORT},
    )
    whole = Run(run.path, settings)
    found = submissions(whole, cluster, stages, whole.states)
    commands = [each.command(["10", "11", "12", "13"]) for each in found]
    waits = [[part for part in command if "afterok" in part] for command in commands]
    assert waits == [
        [],
        ["--dependency=afterok:10"],
        ["--dependency=afterok:10:11_0:11_1"],
        ["--dependency=afterok:10:11_0:11_1:12"],
        ["--dependency=afterok:12"],
    ]
    assert all("--kill-on-invalid-dep=yes" in command for command in commands[1:])
    assert "--array=0-1%2" in commands[1]
    assert f"--comment={run.path.absolute()}/experts.sums,experts.words" in commands[1]
    assert commands[1][-3:] == [str(run.path.absolute()), "experts.sums", "experts.words"]
    for option in ("--account=lab", "--partition=gpu", "--gpus-per-node=8", "--nodes=1"):
        assert all(option in command for command in commands)
    assert "--time=0:10:00" in commands[-1]
    assert all(each.script.exists() for each in found)


def test_queued_stages_are_waited_for_and_not_submitted_again(
    run: RunDirectory, settings: RunSettings
) -> None:
    stages = compile_graph(settings)
    run.path.mkdir(parents=True)
    run.ledger.append("cold_start", "submitted", "as job 7", 0, job="7")
    queue = {"7": QueuedJob("7", "PENDING", "Priority", "0:00", "4:00:00", "")}
    states = Run(run.path, settings).states_with(queue)
    assert states["cold_start"].cause == "job 7 waits: Priority"
    first, *_ = submissions(Run(run.path, settings), ClusterSettings(), stages, states)
    assert [stage.name for stage in first.stages] == ["experts.sums", "experts.words"]
    assert first.after == ("7",)


@pytest.mark.parametrize(
    ("queue", "state", "cause"),
    [
        (None, "submitted", "as job 7"),
        ({}, "failed", "job 7 left the queue before it started"),
        ({"7": QueuedJob("7", "RUNNING", "None", "1:02", "4:00", "n3")}, "running", "on n3, 1:02"),
    ],
)
def test_ledger_and_queue_are_one_state(
    run: RunDirectory,
    settings: RunSettings,
    queue: dict[str, QueuedJob] | None,
    state: str,
    cause: str,
) -> None:
    run.path.mkdir(parents=True)
    run.ledger.append("cold_start", "submitted", "as job 7", 0, job="7")
    found = Run(run.path, settings).states_with(queue)["cold_start"]
    assert found.state == state
    assert cause in found.cause


def test_a_submission_that_slurm_refuses_leaves_those_before_it_in_the_ledger(
    run: RunDirectory, settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        '#!/bin/bash\nif [[ "$*" == *experts* ]]; then\n'
        '    echo "sbatch: error: Invalid account" >&2\n    exit 1\nfi\necho "7;cluster"\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    stages = compile_graph(settings)
    run.path.mkdir(parents=True)
    whole = Run(run.path, settings)
    jobs = submissions(whole, ClusterSettings(), stages, whole.states)
    refused = pytest.raises(UserError, match="sbatch failed: sbatch: error: Invalid account")
    with run.lock_submission() as lock, refused:
        list(submit(run, jobs, ClusterSettings(), run.cluster, lock))
    assert run.submitting.exists()  # whatever else Slurm took is looked for
    events = [(event.stage, event.state, event.job) for event in run.ledger.events()]
    assert events == [("cold_start", "submitted", "7")]


def test_the_script_of_the_commands_is_shell_that_passes_the_numbers_on(
    run: RunDirectory, settings: RunSettings
) -> None:
    stages = compile_graph(settings)
    run.path.mkdir(parents=True)
    cluster = ClusterSettings(setup=("module load cuda",), options=("--licenses=two words",))
    whole = Run(run.path, settings)
    jobs = submissions(whole, cluster, stages, whole.states)
    write_scripts(run, cluster, run.cluster, jobs)
    script = run.submission.read_text()
    assert '"--dependency=afterok:${job_0}:${job_1}_0:${job_1}_1"' in script
    assert "'--licenses=two words'" in script
    assert run.setup_script.read_text().endswith("\nmodule load cuda\n")
    assert load_cluster(run.cluster) == cluster


def test_steps_enter_one_container_root_with_its_own_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    command = ["python", "-m", "stages.main", "job.json"]
    pyxis = ContainerSettings(runtime="pyxis", image="/i.sqsh", mounts=("/a:/a", "/b:/b"))
    entering = [
        *[
            "--container-name=braid-17:no_exec",
            "--no-container-mount-home",
            "--container-mounts=/a:/a,/b:/b",
        ],
        f"--container-workdir={Path.cwd()}",
    ]
    program = ["python3", "-m", "stages.main", "job.json"]
    assert contained(pyxis, command) == [*entering, *program]
    kept = "--container-env=MASTER_PORT,NCCL_IB_HCA"
    names = ["MASTER_PORT", "NCCL_IB_HCA"]
    assert contained(pyxis, command, names) == [*entering, kept, *program]
    at_home = pyxis.model_copy(update={"mount_home": True})
    assert contained(at_home, command)[1] == "--container-mount-home"
    apptainer = ContainerSettings(
        runtime="apptainer", image="/i.sif", mounts=("/a:/a",), python="python3.11"
    )
    assert contained(apptainer, command) == [
        *["apptainer", "exec", "--nv", "--no-home", "--bind", "/a:/a"],
        *["--pwd", str(Path.cwd()), "/i.sif"],
        *["python3.11", "-m", "stages.main", "job.json"],
    ]
    at_home = apptainer.model_copy(update={"mount_home": True})
    assert "--no-home" not in contained(at_home, command)
    assert contained(None, command) == command


def test_a_cluster_s_nccl_variables_and_the_hash_seed_reach_a_container() -> None:
    environment = {"NCCL_IB_HCA": "mlx5", "NCCL_VERSION": "2.29", "NCCL_DEBUG": "", "HOME": "/"}
    assert passed_on(environment) == ["NCCL_DEBUG", "NCCL_IB_HCA"]
    assert passed_on({**environment, "PYTHONHASHSEED": "0"})[-1] == "PYTHONHASHSEED"


@pytest.fixture
def recorded_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an srun on PATH that records its arguments and APPTAINERENV; return the record."""
    program, record = tmp_path / "bin" / "srun", tmp_path / "record"
    program.parent.mkdir()
    lines = [f'echo "$*" >> {record}', f"env | grep ^APPTAINERENV_ | sort >> {record}", "true"]
    program.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return record


def test_an_image_is_unpacked_once_before_the_steps_that_enter_it(
    recorded_srun: Path, tmp_path: Path
) -> None:
    pyxis = ContainerSettings(runtime="pyxis", image="/i.sqsh")
    cluster = ClusterSettings(ranks_per_node=2, network_interface="lo", container=pyxis)
    places = place(NODES[:2], *sizes(2, count=2, placement="own"), cluster, samples=True)
    job = SlurmJob(places, cluster)
    job.prepare(tmp_path / "container.log", lambda: None)
    engine = job.start_engine("engine 0", 0, ["python", "server.py"], tmp_path / "engine.log")
    wait_for_all([engine], seconds=PATIENCE_SECONDS)
    engine.reap()
    unpacked, entered = recorded_srun.read_text().splitlines()
    assert "--nodes=2 --nodelist=n1,n2 --ntasks-per-node=1 --container-image=/i.sqsh" in unpacked
    assert unpacked.endswith(f"--container-workdir={Path.cwd()} true")
    assert all("--container-name=braid-17:no_exec" in each for each in (unpacked, entered))
    assert "--container-image" not in entered and entered.endswith("python3 server.py")


def test_an_image_that_cannot_be_unpacked_is_named(recorded_srun: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "srun"
    program.write_text("#!/bin/bash\necho 'pyxis: no such file: /i.sqsh' >&2\nexit 1\n")
    pyxis = ContainerSettings(runtime="pyxis", image="/i.sqsh")
    cluster = ClusterSettings(network_interface="lo", container=pyxis)
    job = SlurmJob(place(NODES[:1], *sizes(1), cluster, samples=True), cluster)
    with pytest.raises(UserError, match=r"(?s)container\.image: /i\.sqsh: .*pyxis: no such file"):
        job.prepare(tmp_path / "container.log", lambda: None)


def test_tasks_on_gpus_choose_their_slots_behind_srun(
    recorded_srun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    apptainer = ContainerSettings(runtime="apptainer", image="/i.sif")
    cluster = ClusterSettings(
        gpus_per_node=8, network_interface="lo", local_directory="/local", container=apptainer
    )
    layout, engine = sizes(4, count=2, tensor=2, placement="own")
    job = SlurmJob(place(NODES[:1], layout, engine, cluster, samples=True), cluster)
    assert job.on_gpus and not SlurmJob(Places([], 1, []), ClusterSettings()).on_gpus
    started = [
        job.start_engine("engine 1", 1, ["python", "-m", "server"], tmp_path / "engine.log"),
        *job.start_ranks(["python", "-m", "main"], 4, tmp_path, True),
    ]
    wait_for_all(started, seconds=PATIENCE_SECONDS)
    for step in started:
        step.reap()
    record = recorded_srun.read_text()
    caches = f"/local/braid-{os.getuid()}"
    [server] = [line for line in record.splitlines() if line.endswith(" -m server")]
    assert f"--cpus-per-task={2 * cluster.cpus_per_rank} " in server  # of its two ranks
    assert "--bind /local:/local " in server  # the caches are outside the image
    assert f"/i.sif python3 -m parallel.machine.on_gpus 6,7 {caches} -m server\n" in record
    assert f"/i.sif python3 -m parallel.machine.on_gpus rank {caches} -m main\n" in record
    assert "APPTAINERENV_NCCL_IB_HCA=mlx5" in record
    assert record.count("APPTAINERENV_PYTHONHASHSEED=7\n") == 2
    assert "APPTAINERENV_MASTER_ADDR=127.0.0.1" in record
    for name in environment_of("lo"):  # of the ranks and the engine, which meet in a refit
        assert record.count(f"APPTAINERENV_{name}=lo\n") == len(started) == 2


def test_a_loopback_address_is_refused_where_nodes_are_to_meet() -> None:
    check_reachable("127.0.1.1", ["n1"])
    check_reachable("10.0.0.7", ["n1", "n2"])
    with pytest.raises(
        UserError, match=r"null: the name of n1 means 127\.0\.1\.1 there, which the"
    ):
        check_reachable("127.0.1.1", ["n1", "n2", "n3"])


def test_nodes_without_a_common_address_stop_a_job_before_its_steps(
    recorded_srun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.slurm.steps.address_of", lambda interface: "127.0.1.1")
    cluster = ClusterSettings(ranks_per_node=1)
    job = SlurmJob(place(NODES[:2], *sizes(2), cluster, samples=False), cluster)
    with pytest.raises(UserError, match="network_interface: null"):
        job.prepare(tmp_path / "container.log", lambda: None)
    assert not recorded_srun.exists()


def test_an_interface_has_an_address_or_the_names_of_others() -> None:
    assert address_of(LOOPBACK) == "127.0.0.1"
    with pytest.raises(OSError, match=r"network interfaces of this machine: .*lo"):
        address_of("infiniband7")


def test_process_groups_use_the_named_interface() -> None:
    assert environment_of("ib0") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert environment_of("") == {}
    for asked, taken in (("ib0", "ib0"), (None, "")):
        cluster = ClusterSettings(network_interface=asked)
        assert SlurmJob(Places([], 1, []), cluster).interface == taken


@pytest.mark.parametrize("command", ["cancel", "status", "logs"])
def test_commands_about_jobs_need_no_slurm(
    command: str, braid, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    braid("run", config)
    monkeypatch.setenv("PATH", "/nowhere")
    arguments = ["small", "cold_start"] if command == "logs" else ["small"]
    code, out, _ = braid(command, *arguments)
    assert code == 0
    expected = {
        "cancel": "has no job in the queue",
        "status": " done ",
        "logs": "rank 0 of 2 starts",
    }
    assert expected[command] in out


def test_submitting_without_slurm_says_so_and_keeps_the_commands(
    braid, config: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\n")
    assert "--cluster FILE is required" in braid("submit", config)[2]
    code, _, err = braid("submit", config, "--cluster", tmp_path / "clustre.yaml")
    assert (code, "clustre.yaml: no such file; known: configs/clusters/" in err) == (1, True)
    code, _, err = braid("submit", config, "--cluster", profile)
    assert code == 1
    assert "there is no sbatch here; run this on a login node of the cluster" in err
    script = (runs / "small" / "slurm" / "submit.sh").read_text()
    assert script.count("sbatch --parsable") == 5
