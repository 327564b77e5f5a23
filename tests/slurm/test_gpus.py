"""The GPUs that the processes of a stage see, on a real Slurm whose nodes have fake ones.

slurmstepd sets CUDA_VISIBLE_DEVICES of every task of a step with GPUs, whatever srun passes on.
"""

from __future__ import annotations

import pytest

from tests.slurm.on_slurm import Braid

PROFILE = """\
ranks_per_node: 4
gpus_per_node: 4
network_interface: lo
local_directory: null
walltime: "0:10:00"
warning_seconds: 60
"""
HALF = PROFILE.replace("_node: 4", "_node: 2")
ALL = "0,1,2,3"


def seen(braid: Braid, profile: str, *overrides: str) -> tuple[list[str], list[list[str]]]:
    """Run an expert; return what its ranks see, and each engine on each of its nodes."""
    braid.write_profile(profile)
    jobs = braid.submit("--only", "cold_start", "--only", "experts.sums", *overrides)
    braid.wait_for_the_end(jobs)
    stage = braid.run / "stages" / "experts.sums"
    ranks = [path.read_text() for path in sorted((stage / "attempt_1").glob("gpus_*"))]
    engines = [
        [path.read_text() for path in sorted(directory.glob("gpus_*"))]
        for directory in sorted((stage / "engine").iterdir())
    ]
    return ranks, engines


def test_each_engine_sees_its_own_gpus_first(gpu_braid: Braid) -> None:
    ranks, engines = seen(gpu_braid, PROFILE, "engine.count=2", "engine.placement=own")
    assert ranks == [ALL, ALL]  # LOCAL_RANK chooses
    assert engines == [["2,0,1,3"], ["3,0,1,2"]]


@pytest.mark.combinations
def test_an_engine_over_two_nodes_sees_those_of_both(gpu_braid: Braid) -> None:
    ranks, engines = seen(gpu_braid, HALF, "engine.tensor=4", "engine.placement=own")
    assert ranks == ["0,1", "0,1"]
    assert engines == [["0,1", "0,1"]]


@pytest.mark.combinations
def test_slots_are_positions_among_a_job_s_gpus(gpu_braid: Braid) -> None:
    """Another job holds the first two GPUs of each node."""
    cluster = gpu_braid.cluster
    holding = ["sbatch", "--parsable", "--nodes=3", "--gpus-per-node=2", "--output=/dev/null"]
    job = cluster.call(*holding, "--wrap=sleep 600")
    cluster.wait_until(lambda: cluster.state(job) == "RUNNING")
    ranks, engines = seen(gpu_braid, HALF, "engine.count=2", "engine.placement=shared")
    assert ranks == ["2,3", "2,3"]
    assert engines == [["2,3"], ["3,2"]]


@pytest.mark.combinations
def test_gpus_that_slurm_does_not_manage_are_numbered(gpu_braid: Braid) -> None:
    unmanaged = PROFILE + "gres: false\noptions: [--exclusive]\n"
    ranks, engines = seen(gpu_braid, unmanaged, "engine.count=2", "engine.placement=own")
    assert ranks == []  # no choice is made: all are visible
    assert engines == [["2"], ["3"]]


@pytest.mark.combinations
def test_a_node_with_fewer_gpus_than_the_profile_is_named(gpu_braid: Braid) -> None:
    """A driver shows one GPU of four."""
    smi = gpu_braid.program.with_name("nvidia-smi")
    smi.write_text("#!/bin/sh\necho '0, GPU-0, NVIDIA H100, 81559, 80000, 580.65.06, 9.0'\n")
    smi.chmod(0o755)
    gpu_braid.write_profile(PROFILE)
    jobs = gpu_braid.submit("--only", "cold_start")
    cluster = gpu_braid.cluster
    cluster.wait_until(lambda: cluster.state(jobs["cold_start"]) == "FAILED")
    why = gpu_braid("why", "small", "cold_start")
    assert "has 1 visible GPU, and gpus_per_node = 4; correct the cluster's profile" in why
