"""vLLM's arguments on each device; those for a GPU through vLLM's own checks, without one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel.engine import arguments, platform
from parallel.engine.arguments import engine_arguments, own_gpus
from parallel.errors import UserError
from parallel.estimates.engine_memory import engine_memory
from parallel.machine.gpus import Gpu
from parallel.settings import EngineJob
from pipeline.report.view.next_commands import serve_command
from tests.awaiting import PATIENCE_SECONDS
from tests.engine.engine_settings import ENGINE, MODEL
from tests.pipeline.hugging_face_directories import TINY, published
from tests.tiers import tiered

GIB = 1 << 30
GPU = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 * GIB, 70 * GIB, "580.0", "9.0")
WIDE = MODEL.model_copy(
    update={"precision": "bf16", "hidden_size": 256, "head_dim": 64, "expert_hidden_size": 256}
)


def job(further: dict[str, Any] | None = None, **engine: Any) -> EngineJob:
    settings = ENGINE.model_copy(update=engine)
    job = EngineJob(model=WIDE, engine=settings, index=0, address=Path("unused"), seed=0)
    return job.model_copy(update=further or {})


GPU_JOBS = [
    job(),
    job({"sampling_mask": True}, tensor=4, expert_parallel=True, weights="fp8"),
]


def memory_of(asked: EngineJob) -> dict[str, Any]:
    """Return the memory of a job's engine on GPUs of 80 GiB, 70 GiB of them free."""
    found = engine_memory(asked.model, asked.engine, 80 * GIB, 70 * GIB)
    return {"memory": found.gpu_memory_utilization, "cache": found.kv_cache_memory_bytes}


def test_a_cpu_s_arguments_are_what_they_were() -> None:
    """They decide the bits of a run."""
    found = engine_arguments(job(), "directory", cuda=False)
    assert not found.pop("enable_expert_parallel")  # vLLM's default
    assert found.pop("kv_cache_memory_bytes") > 0
    assert found == {
        "model": "directory",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "async_scheduling": False,
        "distributed_executor_backend": "uni",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 8192,
        "scheduling_policy": "priority",
        "block_size": 32,
        "logprobs_mode": "processed_logprobs",
        "return_sampling_mask": False,
        "enable_return_routed_experts": True,
        "enable_prefix_caching": True,
        "worker_extension_cls": "parallel.engine.refit_extension.RefitExtension",
        "seed": 0,
    }


def test_only_an_fp32_head_of_a_bf16_model_overrides_vllm_s() -> None:
    precise = {"model": WIDE.model_copy(update={"head_precision": "fp32"})}
    found = engine_arguments(job(precise), "directory", cuda=False)
    assert found["hf_overrides"] == {"head_dtype": "float32"}
    exact = {"model": precise["model"].model_copy(update={"precision": "fp32"})}
    assert "hf_overrides" not in engine_arguments(job(exact), "directory", cuda=False)


@pytest.fixture(scope="module")
def accepted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The configurations that vLLM makes of three jobs on a GPU of a compute capability.

    The last job is a member of a larger engine. One process imports vLLM for all of them, and takes
    the member last, whose place it adds to the environment.
    """
    meeting = tmp_path_factory.mktemp("members") / "members.json"
    meeting.write_text('["10.0.0.7", 29600]')
    member = {"member": 1, "meeting": meeting}
    jobs = [*GPU_JOBS, job(member, placement="own", tensor=2, data=4, expert_parallel=True)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.cuda_platform", request.param],
        input="".join(each.model_dump_json() + "\n" for each in jobs),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("configured ")]
    return [json.loads(line.partition(" ")[2]) for line in lines]


# Hopper, Blackwell
@pytest.mark.parametrize("accepted", tiered(["9.0", "10.0"], ["9.0"]), indirect=True)
def test_vllm_accepts_a_gpu_s_arguments(accepted: list[dict[str, Any]]) -> None:
    """Only the driver's answers to vLLM's own CUDA platform are invented."""
    plain, quantized, _ = accepted
    assert plain == {
        "runner": "V2",
        "async_scheduling": True,
        "chunked_prefill": True,
        "batched_tokens": 8192,
        "compilation": "VLLM_COMPILE",
        "graphs": "FULL_AND_PIECEWISE",
        "captured": True,
        "block_size": 16,
        "experts": "triton",
        "expert_parallel": False,
        "executor": "uni",
        "placement": "linear",
        "quantization": None,
        "mask": False,
        **memory_of(GPU_JOBS[0]),
        "sleeps": True,
        "routes": True,
    }
    assert quantized == plain | {
        **memory_of(GPU_JOBS[1]),
        "expert_parallel": True,
        "executor": "mp",
        "quantization": "OnlineQuantizationConfig",
        "mask": True,
    }


@pytest.mark.parametrize("accepted", ["9.0"], indirect=True)
def test_vllm_accepts_a_member_of_a_larger_engine(accepted: list[dict[str, Any]]) -> None:
    """All members meet at the port that the first published, and each uses its own GPUs."""
    *_, member = accepted
    expected = {"members": 4, "member": 1, "first_gpu": 0, "port": 29600, "expert_parallel": True}
    assert expected.items() <= member.items()
    assert member["executor"] == "mp"


def test_a_gpu_s_memory_is_what_is_free_or_what_the_launcher_grants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first GPUs that the process sees are the engine's; it only maps the others."""
    fuller = Gpu(1, "GPU-1", GPU.name, GPU.total_bytes, 50 * GIB, "580.0", "9.0")
    full = Gpu(2, "GPU-2", GPU.name, GPU.total_bytes, 0, "580.0", "9.0")
    monkeypatch.setattr(arguments, "visible_gpus", lambda: [GPU, fuller, full])
    for asked, free in (
        (job(tensor=2, kv_cache_mebibytes=9), 50 * GIB),
        (job({"gpu_memory_bytes": 20 * GIB}), 70 * GIB),
    ):
        expected = engine_memory(WIDE, asked.engine, 80 * GIB, free, asked.gpu_memory_bytes)
        found = engine_arguments(asked, "directory", cuda=True)
        assert found["gpu_memory_utilization"] == expected.gpu_memory_utilization
        assert found["kv_cache_memory_bytes"] == expected.kv_cache_memory_bytes
    with pytest.raises(UserError, match=r"exceed the 0\.50 GiB that it may use"):
        engine_arguments(job({"gpu_memory_bytes": GIB // 2}), "directory", cuda=True)
    monkeypatch.setattr(arguments, "visible_gpus", list)
    with pytest.raises(UserError, match="sees no GPU; check CUDA_VISIBLE_DEVICES"):
        engine_arguments(job(), "directory", cuda=True)


def test_a_node_of_a_larger_engine_uses_its_part_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On each of its nodes the engine has the same number of ranks."""
    there = [Gpu(each, f"GPU-{each}", GPU.name, 80 * GIB, each, "", "") for each in range(8)]
    monkeypatch.setattr(arguments, "visible_gpus", lambda: there)
    for nodes, used in ((1, 4), (2, 2), (4, 1)):
        assert own_gpus(job({"nodes": nodes}, tensor=4)) == there[:used]


def test_an_engine_that_shares_gpus_can_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", lambda: [GPU])
    for placement in ("shared", "own"):
        found = engine_arguments(job(placement=placement), "directory", cuda=True)
        assert found["enable_sleep_mode"] == (placement == "shared")


@pytest.mark.parametrize("setting", [{"weights": "fp8"}, {"tensor": 2, "expert_parallel": True}])
def test_a_cpu_s_engine_refuses_what_only_a_gpu_can(setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="needs a GPU, and this engine runs on a CPU"):
        engine_arguments(job(**setting), "directory", cuda=False)


def test_compilation_is_off_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the device that the engine runs on, whatever torch its launcher has."""
    assert platform.process_environment(on_gpus=False)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in platform.process_environment(on_gpus=True)
    for file, for_cpu, found in (("none", False, False), ("", True, False), ("", False, True)):
        monkeypatch.setattr(platform, "GPU_FILE", tmp_path / file)
        monkeypatch.setattr(platform, "built_for_cpu", lambda for_cpu=for_cpu: for_cpu)
        assert platform.has_gpus() == found


def test_vllm_serves_a_model_by_the_command_that_a_run_ends_with(tmp_path: Path) -> None:
    """The parser of vLLM takes `vllm serve PATH`, and finds the model that is there."""
    weights = published(tmp_path / "hugging face", TINY)
    config = json.loads((weights / "config.json").read_text())
    exported = {**config, "architectures": ["Qwen3MoeForCausalLM"]}  # as an export has it
    (weights / "config.json").write_text(json.dumps(exported))
    program = (
        "import sys\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm.entrypoints.cli.serve import ServeSubcommand\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser, command = FlexibleArgumentParser(), ServeSubcommand()\n"
        "command.subparser_init(parser.add_subparsers(dest='subparser'))\n"
        "arguments = parser.parse_args(sys.argv[1:])\n"
        "command.validate(arguments)\n"
        "arguments.model = arguments.model_tag\n"
        "print(*AsyncEngineArgs.from_cli_args(arguments).create_model_config().architectures)\n"
    )
    vllm, *words = shlex.split(serve_command(weights))
    assert vllm == "vllm"
    served = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert served.returncode == 0, served.stderr
    assert served.stdout.splitlines()[-1] == "Qwen3MoeForCausalLM"
