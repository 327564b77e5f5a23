"""A cluster's profile: what it may say, and what it asks of Slurm for each kind of stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.errors import UserError
from pipeline.config.cluster import ClusterSettings, seconds_of
from pipeline.config.read import ConfigError
from pipeline.config.validate import load, load_cluster
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.run import Run
from pipeline.slurm.submit import (
    check_engines,
    submissions,
)
from stages.settings import RunSettings
from tests.runs import REPOSITORY

Braid = Callable[..., tuple[int, str, str]]


def test_errors_of_a_profile_are_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("acount: lab\nwalltime: tomorrow\ncontainer: {runtime: docker, image: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    text = str(caught.value)
    assert 'cluster.yaml:1: acount: unknown key; did you mean "account"?' in text
    assert "cluster.yaml:2: walltime: " in text
    assert "cluster.yaml:3: container.runtime: should be 'pyxis' or 'apptainer'" in text


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("4:00:00", 14_400),
        ("1-12", 129_600),
        ("1-0:30", 88_200),
        ("2-1:02:03", 176_523),
        ("0", 0),
    ],
)
def test_walltimes_are_read_as_sbatch_reads_them(walltime: str, seconds: int) -> None:
    assert seconds_of(walltime) == seconds


def test_a_walltime_without_room_for_its_warning_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        'warning_seconds: 300\nwalltime: "0"\nkinds:\n  export: {walltime: "0:05:00"}\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    [line] = str(caught.value).splitlines()[1:]
    assert line.endswith(
        "cluster.yaml:4: kinds.export.walltime: 0:05:00 must be more than warning_seconds = 300"
    )


def test_stage_kinds_may_request_other_nodes(run: RunDirectory, settings: RunSettings) -> None:
    stages = compile_graph(settings)
    cluster = ClusterSettings.model_validate(
        {
            "partition": "big",
            "gpus_per_node": 8,
            "options": ["--exclusive"],
            "kinds": {
                "evaluate": {
                    "account": "other",
                    "partition": "small",
                    "qos": "low",
                    "constraint": "a100",
                    "memory_per_node": "90G",
                    "ranks_per_node": 1,
                    "gpus_per_node": 1,
                    "gpu_type": "a100",
                    "cpus_per_rank": 3,
                    "options": ["--nice=5"],
                },
                "export": {"gpus_per_node": 0},
            },
        }
    )
    whole = Run(run.path, settings)
    found = submissions(whole, cluster, stages, whole.states)
    options = {each.stages[0].name: each.options for each in found}
    assert {"--partition=big", "--gpus-per-node=8", "--nodes=1"} < set(options["merge"])
    assert {
        "--account=other",
        "--partition=small",
        "--qos=low",
        "--constraint=a100",
        "--mem=90G",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=a100:1",
        "--cpus-per-task=3",
    } < set(options["evaluate"])
    assert options["evaluate"][-2:] == ("--exclusive", "--nice=5")
    assert not any("gpus" in option for option in options["export"])
    large = settings.model_copy(update={"engine": settings.engine.model_copy(update={"tensor": 3})})
    cluster = ClusterSettings.model_validate({"kinds": {"evaluate": {"ranks_per_node": 2}}})
    with pytest.raises(UserError, match=r"ranks_per_node for evaluate = 2 and are no multiple"):
        check_engines(large, cluster, stages)


def test_rollouts_that_shared_gpus_cannot_sample_are_not_submitted(config: Path) -> None:
    overlap = [f"domains.{name}.rollout.max_steps_ahead=1" for name in ("sums", "words")]
    settings = load(config, overlap)
    stages = compile_graph(settings)
    check_engines(settings, ClusterSettings(), stages)  # on a CPU
    gpus = ClusterSettings(gpus_per_node=8)
    with pytest.raises(UserError) as refused:
        check_engines(settings, gpus, stages)
    for line, name in zip(str(refused.value).splitlines(), ("sums", "words"), strict=True):
        assert line.startswith(f"domains.{name}.rollout.max_steps_ahead: 1 keeps responses")
    still = [stage for stage in stages if stage.kind in ("sft", "evaluate", "export")]
    check_engines(settings, gpus, still)  # these keep nothing in flight while they compute
    check_engines(load(config), gpus, stages)
    check_engines(load(config, [*overlap, "engine.placement=own"]), gpus, stages)


def test_a_model_that_no_engine_samples_from_on_a_cpu_is_not_submitted_there(config: Path) -> None:
    settings = load(config, ["model.head_dim=16"])
    stages = compile_graph(settings)
    with pytest.raises(UserError, match=r"cannot run on a CPU: model\.head_dim = 16"):
        check_engines(settings, ClusterSettings(), stages)
    check_engines(settings, ClusterSettings(gpus_per_node=8), stages)
    check_engines(settings, ClusterSettings(), [each for each in stages if not each.needs_engine])


@pytest.mark.parametrize("command", ["validate", "plan", "submit"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "domains.sums.rollout.max_steps_ahead=1",
            "domains.sums.rollout.max_steps_ahead: 1 keeps responses",
        ),
        ("engine.tensor=4", "engine: 4 ranks exceed the cluster's ranks_per_node = 3"),
    ],
)
def test_a_profile_s_nodes_are_checked_before_the_submission(
    command: str, change: str, message: str, braid, config: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 3\ngpus_per_node: 3\n")
    code, _, err = braid(command, config, change, "--cluster", profile)
    assert code == 1 and err.startswith(f"braid: {message}")
    if command == "validate":
        out = braid(command, config, change, "--cluster", profile, "--json")[1]
        found = json.loads(out)
        assert not found["valid"] and found["errors"][0].startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "walltime: 5400",
            'walltime: must be text: "D-HH:MM:SS", "HH:MM:SS" or "MINUTES", not 5400',
        ),
        (
            "kinds: {sft: {walltime: 90}}",
            'kinds.sft.walltime: must be text: "D-HH:MM:SS", "HH:MM:SS" or "MINUTES", not 90',
        ),
        (
            "walltime: 2h",
            'walltime: must be "D-HH:MM:SS", "HH:MM:SS" or "MINUTES", not "2h"',
        ),
        (
            'walltimes: {export: "0:30:00"}',
            "walltimes: renamed to kinds: {KIND: {walltime: ...}}",
        ),
        (
            "kinds: {evaluat: {walltime: '1:00:00'}}",
            'kinds.evaluat: unknown kind; did you mean "evaluate"?',
        ),
        (
            "kinds: {zzz: {}}",
            "kinds.zzz: unknown kind; known: distill, dpo, evaluate, export, gate, ",
        ),
        (
            "warning_seconds: 65536",
            "warning_seconds: should be less than or equal to 65535, not 65536",
        ),
        (
            "ranks_per_node: 8\ngpus_per_node: 4",
            "ranks_per_node: 8 ranks need 8 GPUs, and gpus_per_node = 4; lower it to 4 or less",
        ),
        (
            "kinds: {evaluate: {gpus_per_node: 2}}",
            "kinds.evaluate.ranks_per_node: 8 ranks need 8 GPUs, and gpus_per_node = 2; lower it",
        ),
        ("local_directory: scratch", "local_directory: scratch must be an absolute path"),
        (
            "gres: false\ngpus_per_node: 8",
            "gres: false needs options: [--exclusive], since Slurm would give the same GPUs to",
        ),
        (
            "gpu_type: h100\ngpus_per_node: 8\ngres: false\noptions: [--exclusive]",
            "gpu_type: h100 cannot be requested with gres: false; use constraint",
        ),
        ("options: [--gpus=2, --tim=5]", "options.1: --time is set by Braid; see walltime"),
        ("options: [--comment=mine]", "options.0: --comment is set by Braid; it records"),
        ("options: [' --time=5']", "options.0: --time is set by Braid; see walltime"),
        (
            "options: [--exclusive, --array=0-3]",
            "options.1: --array is set by Braid; see array",
        ),
        (
            "kinds: {sft: {options: [-t60]}}",
            "kinds.sft.options.0: -t is set by Braid; see w",
        ),
        ("kinds: {sft: {wall: 1}}", 'kinds.sft.wall: unknown key; did you mean "walltime"?'),
    ],
)
def test_a_profile_s_message_says_how_to_write_it(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"restarts: 1\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    [_, line] = str(caught.value).splitlines()
    assert line.startswith(f"{path}:2: {message}")


UNCHECKED = "memory is not checked: set gpu_memory_gib in {} (79.2 for an H100 of 80 GB)"


@pytest.mark.parametrize(
    "command", [("validate",), ("plan",), ("plan", "--memory"), ("submit", "--dry-run")]
)
def test_memory_that_is_not_checked_is_said(
    command: tuple[str, ...], braid: Braid, config: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\ngpus_per_node: 2\n")
    given = (command[0], config, *command[1:], "--cluster", profile)
    code, out, err = braid(*given)
    assert code == 0 and err.splitlines().count(f"warning: {UNCHECKED.format(profile)}") == 1
    for known in ("gpu_memory_gib: 79.2\ngpus_per_node: 2\n", "gpus_per_node: 0\n"):
        profile.write_text(f"ranks_per_node: 2\n{known}")
        code, out, err = braid(*given)
        assert code == 0 and "memory is not checked" not in out + err


def test_the_example_s_memory_is_not_checked(braid: Braid, config: Path) -> None:
    example = REPOSITORY / "configs" / "clusters" / "example.yaml"
    code, out, _ = braid("validate", config, "--cluster", example, "--json")
    assert code == 0 and "memory is not checked" in json.loads(out)["warnings"][-1]


def test_mebibytes_of_a_gpu_are_refused(tmp_path: Path) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("gpus_per_node: 8\ngpu_memory_gib: 81559\n")
    with pytest.raises(ConfigError, match=r"GiB, 79\.6 for nvidia-smi's 81559 MiB, not 81559"):
        load_cluster(profile)


def test_an_interface_without_a_name_is_refused(tmp_path: Path) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text('network_interface: ""\n')
    with pytest.raises(ConfigError, match=r"network_interface: must be a name, such as ib0"):
        load_cluster(profile)
