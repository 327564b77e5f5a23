"""The setup of `deterministic: true` for CUDA, before torch and vLLM are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel.machine import determinism
from parallel.model import bridge
from parallel.settings import LayoutSettings
from pipeline.config.validate import load
from pipeline.launch.launcher import write_engine_job
from pipeline.launch.placement import ThisMachine
from stages.directory import EngineDirectory
from stages.settings import RunSettings, StageJob
from tests.fake_engines import MODEL

REPOSITORY = Path(__file__).parents[2]
NAMES = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO")
FAKE_TORCH = f"""
import json, os
print(json.dumps({{name: os.environ.get(name) for name in {NAMES}}}))
os._exit(0)
"""


def run_settings(deterministic: bool) -> RunSettings:
    overrides = [f"deterministic={str(deterministic).lower()}"]
    return load(REPOSITORY / "configs" / "quickstart.yaml", overrides)


def environment_at_torch_import(
    directory: Path, deterministic: bool, **given: str
) -> dict[str, str | None]:
    """Return a rank's variables at the moment when it first imports torch."""
    job = StageJob(
        kind="sft",
        stage="cold_start",
        block="cold_start",
        directory=directory,
        attempt=1,
        settings=run_settings(deterministic),
    )
    (directory / "job.json").write_text(job.model_dump_json())
    (directory / "torch.py").write_text(FAKE_TORCH)
    ambient = {name: value for name, value in os.environ.items() if name not in NAMES}
    path = os.pathsep.join((str(directory), str(REPOSITORY)))
    found = subprocess.run(
        [sys.executable, "-m", "stages.main", str(directory / "job.json")],
        cwd=directory,
        env=ambient | given | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout)


@pytest.mark.parametrize(
    ("users", "nccl"),
    [({}, "^NVLS"), ({"NCCL_ALGO": "Ring"}, "Ring"), ({"NCCL_ALGO": "NVLS"}, "^NVLS")],
)
def test_a_deterministic_rank_is_set_up_before_it_imports_torch(
    users: dict[str, str], nccl: str, tmp_path: Path
) -> None:
    """A user's algorithm is kept if it is deterministic."""
    assert environment_at_torch_import(tmp_path, True, **users) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": nccl,
    }


def test_a_user_s_variables_do_not_change_a_deterministic_rank(tmp_path: Path) -> None:
    """Such as those of a container's image."""
    users = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    plain = environment_at_torch_import(tmp_path, True)
    assert environment_at_torch_import(tmp_path, True, **users) == plain


def test_another_rank_has_its_environment_as_it_was(tmp_path: Path) -> None:
    assert environment_at_torch_import(tmp_path, False) == dict.fromkeys(NAMES)


@pytest.mark.parametrize(
    ("deterministic", "gpus", "expected"),
    [(True, ["a GPU"], {"VLLM_BATCH_INVARIANT": "1"}), (True, [], {}), (False, ["a GPU"], {})],
)
def test_a_deterministic_engine_on_gpus_is_batch_invariant(
    deterministic: bool, gpus: list[str], expected: dict[str, str]
) -> None:
    with mock.patch.object(determinism, "usable_gpus", return_value=gpus):
        assert determinism.engine_environment(deterministic) == expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_engine_job_says_whether_the_run_is_deterministic(
    deterministic: bool, tmp_path: Path
) -> None:
    directory, settings = EngineDirectory(tmp_path), run_settings(deterministic)
    job = write_engine_job(directory, settings, 0, ThisMachine(settings.engine))
    assert json.loads(job.read_text())["deterministic"] is deterministic


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_megatron_is_deterministic_on_gpus_only(where: str, deterministic: bool) -> None:
    """On a CPU every operation of a model is deterministic, and bits stay as they were."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with mock.patch.object(bridge, "device", return_value=torch.device(where)):
            built = bridge.build_bridge(MODEL, LayoutSettings())
    finally:
        torch.use_deterministic_algorithms(before)
    assert built.config.deterministic_mode is (deterministic and where == "cuda")


def test_a_rank_finds_the_ninja_beside_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch looks on PATH for it, which has the environment only where that is activated."""
    environment = tmp_path / "bin"
    environment.mkdir()
    (environment / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        determinism.set_up_rank(deterministic=False)
        assert os.environ["PATH"] == f"{tmp_path}:{environment}"
