"""Stages that need more memory than a GPU has are refused, with settings that would fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.errors import UserError
from parallel.estimates.engine_memory import GIB, engine_memory
from parallel.estimates.phases import engine_gpu_bytes
from parallel.machine.slots import MachineGpus
from parallel.settings import EngineJob, ModelSettings
from pipeline.config.validate import load, load_cluster
from pipeline.estimate.capacity import changed_settings, check_capacity, training_changes
from pipeline.estimate.memory import memory_report
from pipeline.estimate.stage_memory import NodeGpus, gpus_here, gpus_of, stage_phases
from pipeline.launch.launcher import write_engine_job
from pipeline.launch.placement import ThisMachine
from pipeline.run.graph import compile_graph
from stages.directory import EngineDirectory
from stages.settings import RunSettings
from tests.layouts.real_models import DEEPSEEK_V3, GLM_AIR
from tests.parallel.fake_nvidia_smi import GPU_LINES, put_nvidia_smi
from tests.runs import REPOSITORY

Braid = Callable[..., tuple[int, str, str]]
CASES = Path(__file__).parent / "memory_cases"
H100 = CASES / "h100.yaml"
PAGE = REPOSITORY / "docs" / "explanation" / "memory.md"
EXACT = (
    "domains.math.optimizer.precision_aware=false",
    "stages.merge.optimizer.precision_aware=false",
)
TOO_MUCH = ("layout.tensor=1", *EXACT)

GLM_REFUSED = [
    "experts.math: weight sync needs 136.30 GiB of each GPU, 57.10 GiB more than its 79.20 "
    "(engine weights 99.54, trainer weights 26.59, trainer process 5.00, engine process 3.00,"
    " staging 2.18); set engine.tensor=8 engine.count=1",
    "merge: update needs 193.38 GiB of each GPU, 114.18 GiB more than its 79.20 (optimizer "
    "state 99.58, gradients 53.17, trainer weights 26.59, trainer process 5.00, activations "
    "4.40, engine process 3.00, dispatch and fragments 1.35, frozen model 0.29); set "
    "layout.ranks=32 layout.expert=32",
]
DEEPSEEK_REFUSED = [
    "experts.math: weight sync needs 330.28 GiB of each GPU, 251.08 GiB more than its 79.20 "
    "(trainer weights 161.66, engine weights 157.92, trainer process 5.00, engine process "
    "3.00, staging 2.71); set engine.tensor=32 engine.count=1 layout.ranks=64 "
    "layout.expert=64",
    "merge: update needs 1,443.25 GiB of each GPU, 1,364.05 GiB more than its 79.20 "
    "(optimizer state 941.73, gradients 323.32, trainer weights 161.66, activations 5.92, "
    "trainer process 5.00, engine process 3.00, dispatch and fragments 2.18, frozen model "
    "0.43); set domains.math.optimizer.cpu_offload=1.0 "
    "stages.merge.optimizer.cpu_offload=1.0 layout.ranks=128 layout.expert=128",
]


def qwen(*overrides: str) -> RunSettings:
    return load(CASES / "qwen3_30b_a3b.yaml", overrides, to_start=False)


def with_model(settings: RunSettings, model: ModelSettings) -> RunSettings:
    """Return the settings with another model, whose files are elsewhere."""
    files = {"tokenizer": "/models/other", "initial_weights": "/models/other"}
    return settings.model_copy(update={"model": model.model_copy(update=files)})


def refused(settings: RunSettings, profile: Path = H100) -> list[str]:
    """Return the lines that refuse the settings on the profile's GPUs."""
    stages = compile_graph(settings)
    try:
        check_capacity(settings, stages, gpus_of(load_cluster(profile)))
    except UserError as error:
        title, *lines = str(error).splitlines()
        assert title == "more memory than a GPU has:"
        return lines
    return []


def advised(lines: list[str]) -> list[str]:
    """Return the overrides that a refusal advises."""
    return [each for line in lines for each in line.rpartition("; set ")[2].split()]


@pytest.mark.parametrize(
    "engines", ["{count: 8}", "{count: 4, tensor: 2}", "{count: 2, tensor: 4}"]
)
def test_a_model_of_30_b_fits_on_one_node_of_eight_gpus_of_80_gb(engines: str) -> None:
    assert refused(qwen(f"engine={engines[:-1]}, max_model_tokens: 8192}}")) == []


def test_a_layout_that_cannot_fit_is_refused_by_component() -> None:
    assert refused(qwen(*TOO_MUCH)) == [
        "merge: update needs 92.62 GiB of each GPU, 13.42 GiB more than its 79.20 (optimizer state "
        "42.65, gradients 19.24, activations 9.73, trainer weights 9.62, trainer process 5.00, "
        "engine process 3.00, dispatch and fragments 2.79, frozen model 0.58); set "
        "domains.math.optimizer.cpu_offload=0.5 stages.merge.optimizer.cpu_offload=0.5"
    ]


def test_the_numerics_of_adam_are_the_last_setting_of_training_to_change() -> None:
    """Recompute, smaller micro-batches, Adam's state on the host, and then its precision."""
    settings = qwen(*EXACT)
    stages = {stage.name: stage for stage in compile_graph(settings)}
    changes = [*training_changes([stages["merge"]], settings, [{"layout.tensor": 8}])]
    assert [key for change in changes for key in change] == [
        "stages.merge.optimizer.cpu_offload",
        "stages.merge.optimizer.cpu_offload",
        "layout.tensor",
        "stages.merge.optimizer.precision_aware",
    ]
    slow = qwen(*EXACT, "stages.merge.optimizer.betas=[0.9, 0.999]")
    changes = [*training_changes([stages["merge"]], slow, [])]
    assert "stages.merge.optimizer.precision_aware" not in changes[-1]
    large = "domains.math.loop.micro_batch_tokens=32768"
    lines = refused(qwen(*EXACT, large, "layout.recompute=none"))
    assert "layout.recompute=full" in advised(lines)
    lines = refused(qwen("domains.math.loop.micro_batch_tokens=400000"))
    assert [each.partition("=")[0] for each in advised(lines)] == [
        "domains.math.loop.micro_batch_tokens"
    ]


def test_no_advised_micro_batch_is_shorter_than_a_sequence() -> None:
    """Half of 3001 tokens on four devices are one less than a sequence of 6001."""
    settings = qwen(*EXACT)
    stages = {stage.name: stage for stage in compile_graph(settings)}
    key = "stages.merge.loop.micro_batch_tokens"
    for longest, advised_tokens in ((6001, []), (6000, [1500])):
        change = {"engine.max_model_tokens": longest, "layout.context": 4, key: 3001}
        changed = changed_settings(settings, change)
        changes = training_changes([stages["merge"]], changed, [])
        assert [change[key] for change in changes if key in change] == advised_tokens


def test_an_optimizer_state_on_the_host_is_not_advised_to_sgd() -> None:
    plain = tuple(
        f"stages.merge.optimizer.{each}" for each in ("algorithm=sgd", "precision_aware=false")
    )
    settings = qwen(*plain)
    stages = {stage.name: stage for stage in compile_graph(settings)}
    assert not [*training_changes([stages["merge"]], settings, [])]


def test_fewer_sequences_are_advised_where_their_logits_do_not_fit() -> None:
    given = ("engine.max_sequences=1000000", "engine.max_model_tokens=40960")
    [line] = refused(qwen(*given))
    assert advised([line]) == ["engine.max_sequences=16384"]
    assert refused(qwen(*given, *advised([line]))) == []
    cache = refused(qwen("engine.kv_cache_mebibytes=60000"))
    assert "max_sequences" not in cache[0]


def test_an_engine_that_cannot_fit_is_refused_by_component() -> None:
    assert refused(qwen("engine.kv_cache_mebibytes=60000")) == [
        "experts.math: generate needs 97.37 GiB of each GPU, 18.17 GiB more than its 79.20 (KV "
        "cache 58.59, engine weights 28.45, trainer process 5.00, engine process 3.00, engine "
        "workspace 1.33, reserve 1.00); set engine.kv_cache_mebibytes=null"
    ]


def test_glm_air_does_not_fit_on_eight_gpus() -> None:
    settings = with_model(qwen(), GLM_AIR)
    assert refused(settings) == GLM_REFUSED


def test_deepseek_v3_does_not_fit_on_eight_gpus_but_on_128() -> None:
    settings = qwen("engine={count: 1, tensor: 8, max_model_tokens: 8192}", *EXACT)
    settings = with_model(settings, DEEPSEEK_V3)
    assert refused(settings) == DEEPSEEK_REFUSED


@pytest.mark.parametrize(
    "given",
    [
        TOO_MUCH,
        ("engine.kv_cache_mebibytes=60000",),
        ("layout={ranks: 4, tensor: 4, expert: 4, recompute: full}", "engine.placement=own"),
        ("layout={ranks: 4, tensor: 4, expert: 4}", "engine.count=2", *EXACT),
        ("domains.math.loop.micro_batch_tokens=400000", "layout.recompute=none"),
        # Engines on more GPUs than have ranks, and few samples for many data-parallel ranks.
        ("layout={ranks: 4, tensor: 4, expert: 4, recompute: full}", "engine.count=4", *EXACT),
        (*TOO_MUCH, "domains.math.sampling={prompts_per_step: 4, max_response_tokens: 6144}"),
        ("domains.math.loop.micro_batch_tokens=100000000",),
    ],
)
def test_what_is_advised_fits(given: tuple[str, ...]) -> None:
    lines = refused(qwen(*given))
    assert lines and refused(qwen(*given, *advised(lines))) == []


@pytest.mark.parametrize("large", ["math", "code"])
def test_every_domain_is_compared_with_the_gpus(large: str) -> None:
    """Experts differ in their loops and optimizers, whichever is trained first."""
    settings = qwen()
    [small] = settings.domains.values()
    loop = small.loop.model_copy(update={"micro_batch_tokens": 400_000})
    domains = dict.fromkeys(("math", "code"), small)
    domains[large] = small.model_copy(update={"loop": loop})
    [line] = refused(settings.model_copy(update={"domains": domains}))
    assert line.startswith(f"experts.{large}: update needs ")


@pytest.mark.parametrize("last", [10, 38])
def test_the_teachers_heads_are_on_the_last_stage_of_the_pipeline(last: int) -> None:
    """The stage with more layers needs most, and is shown."""
    layout = f"layout={{ranks: 8, tensor: 2, pipeline: 2, last_stage_layers: {last}, expert: 4}}"
    settings = qwen(layout)
    [merge] = [stage for stage in compile_graph(settings) if stage.kind == "distill"]
    update = next(
        each
        for each in stage_phases(merge, settings, NodeGpus(8, 80 << 30))
        if each.phase == "update"
    )
    assert ("frozen model" in update.gpu) == (last > 24)


def test_the_updates_of_a_step_are_its_domain_s() -> None:
    """Between two of them the optimizer's state stays on the GPU beside a frozen model."""
    for count in (1, 2):
        settings = qwen(f"domains.math.updates_per_rollout={count}")
        [expert] = [stage for stage in compile_graph(settings) if stage.kind == "grpo"]
        phases = stage_phases(expert, settings, NodeGpus(8, 80 << 30))
        gpu = next(each.gpu for each in phases if each.phase == "log-probabilities")
        assert ("optimizer state" in gpu) == (count > 1)


def test_full_recomputation_is_advised_without_modules() -> None:
    layout = "layout={ranks: 8, tensor: 4, expert: 8, recompute: selective, recompute_modules: "
    lines = refused(qwen(f"{layout}[layernorm]}}", "domains.math.loop.micro_batch_tokens=40000"))
    assert advised(lines) == ["layout.recompute=full", "layout.recompute_modules=[]"]


def test_engines_stay_on_gpus_of_the_node_without_ranks() -> None:
    layout = "layout={ranks: 4, tensor: 4, expert: 4, recompute: full}"
    awake, _ = refused(qwen(layout, "engine.kv_cache_mebibytes=60000"))
    assert advised([awake]) == ["engine.kv_cache_mebibytes=null"]


def test_nothing_is_advised_where_nothing_fits(tmp_path: Path) -> None:
    profile = tmp_path / "small.yaml"
    profile.write_text("gpus_per_node: 8\ngpu_memory_gib: 6\n")
    lines = refused(qwen(), profile)
    assert len(lines) == 2
    assert all(
        line.endswith("; no two settings and no layout of 1,024 ranks make it fit; use larger GPUs")
        for line in lines
    )


@pytest.mark.parametrize("placement", ["shared", "own"])
def test_what_fits_is_what_an_engine_starts_in(placement: str) -> None:
    """The cache's size is where the refusal of a job and that of an engine meet."""
    total, layout = round(79.2 * GIB), qwen().layout
    refusals = 0
    for cache in range(40_000, 48_000, 250):
        settings = qwen(f"engine.kv_cache_mebibytes={cache}", f"engine.placement={placement}")
        allowed = engine_gpu_bytes(layout, settings.engine, [total] * 8)
        try:
            engine_memory(settings.model, settings.engine, total, total, allowed)
            starts = True
        except UserError:
            starts, refusals = False, refusals + 1
        assert starts == (refused(settings) == []), cache
    assert 0 < refusals < 32


def test_no_engine_is_advised_whose_members_fill_no_node(tmp_path: Path) -> None:
    """A member of 16 ranks, which divide the 32 heads, would be on two nodes."""
    profile = tmp_path / "small.yaml"
    profile.write_text("gpus_per_node: 8\ngpu_memory_gib: 8\n")
    lines = refused(qwen("engine={count: 1, tensor: 4, data: 2, max_model_tokens: 8192}"), profile)
    assert len(lines) == 2
    assert all(line.startswith(("experts.math: ", "merge: ")) for line in lines)


def test_the_page_on_memory_has_the_table_and_the_refusal() -> None:
    """After a change: `python -m tests.pipeline.test_capacity` writes them."""
    assert page() == PAGE.read_text()


def page() -> str:
    """Return the page on memory with its two outputs as they are now."""
    gpus = gpus_of(load_cluster(H100))
    lines = "\n".join(memory_report(qwen(), gpus)).rstrip().splitlines()
    table = "\n".join(line.rstrip() for line in lines)
    said = "\n".join(["braid: more memory than a GPU has:", *refused(qwen(*TOO_MUCH))])
    parts = PAGE.read_text().split("```\n")
    parts[3], parts[5] = f"{table}\n", f"{said}\n"
    return "```\n".join(parts)


def test_a_node_of_one_rank_has_one_rank(tmp_path: Path) -> None:
    profile = tmp_path / "one.yaml"
    profile.write_text("ranks_per_node: 1\ngpus_per_node: 1\ngpu_memory_gib: 79.2\n")
    settings = qwen("engine={count: 8, tensor: 1, max_model_tokens: 8192}")
    lines = "\n".join(memory_report(settings, gpus_of(load_cluster(profile))))
    assert "1 rank of a node" in lines


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile whose GPUs hold no more than a CUDA context."""
    path = tmp_path / "cluster.yaml"
    path.write_text("ranks_per_node: 2\ngpus_per_node: 2\ngpu_memory_gib: 0.5\n")
    return path


@pytest.mark.parametrize("command", ["validate", "plan", "submit"])
def test_commands_refuse_it_before_anything_is_written(
    command: str, braid: Braid, config: Path, profile: Path, runs: Path
) -> None:
    code, _, err = braid(command, config, "--cluster", profile)
    assert code == 1
    assert err.startswith("braid: more memory than a GPU has:\nexperts.")
    assert not runs.exists()


def test_validate_reports_it_as_errors_in_json(braid: Braid, config: Path, profile: Path) -> None:
    code, out, err = braid("validate", config, "--cluster", profile, "--json")
    found = json.loads(out)
    assert (code, found["valid"]) == (1, False)
    assert err == f"braid: more memory than a GPU has:\n{chr(10).join(found['errors'])}\n"


def test_the_plan_shows_the_phases_before_it_refuses(
    braid: Braid, config: Path, profile: Path
) -> None:
    code, out, err = braid("plan", config, "--memory", "--cluster", profile)
    assert code == 1 and "more memory than a GPU has" in err
    assert "GiB on a GPU in each phase of a step; a GPU has 0.50" in out
    assert "log-probabilities" in out


def test_run_and_resume_compare_with_this_machine_s_gpus(
    braid: Braid, config: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = "{}, GPU-{}, NVIDIA H100 80GB HBM3, {}, 100, 580.65.06, 9.0"
    sizes = "\n".join(line.format(index, index, size) for index, size in enumerate((900, 81559)))
    put_nvidia_smi(monkeypatch, tmp_path, sizes)
    code, _, err = braid("run", config)
    assert code == 1 and "more than its 0.88 (" in err  # 900 MiB, the smaller one
    said = "braid run is refused on this machine: more memory than a GPU has:\nexperts."
    for command in (("validate",), ("plan",), ("plan", "--memory")):
        code, out, err = braid(command[0], config, *command[1:])  # it may be for a cluster
        assert code == 0 and said in out + err
    assert not runs.exists()
    code, _, err = braid("run", config, "--only", "cold_start", "--dry-run")
    assert code == 1 and "\ncold_start: update needs " in err
    put_nvidia_smi(monkeypatch, tmp_path, sizes.replace("900", "81559"))
    assert braid("run", config)[0] == 0
    put_nvidia_smi(monkeypatch, tmp_path, sizes)
    code, _, err = braid("resume", "small", "--from", "merge")
    assert code == 1 and "more memory than a GPU has:\nmerge: " in err
    assert braid("resume", "small")[0] == 0  # all is done
    assert braid("run", config, "--dry-run")[0] == 0
    assert braid("plan", config)[0] == 0
    forked = ("--name", "other", "--fork", "small", "--dry-run")
    assert braid("run", config, *forked)[0] == 0
    put_nvidia_smi(monkeypatch, tmp_path, sizes.replace("81559", "900"))
    code, _, err = braid("evaluate", "small")
    assert code == 1 and "\nevaluate: generate needs " in err
    sums = tmp_path / "sums.yaml"
    sums.write_text(
        "prompts: {dataset: chain_sum}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 2}\n"
    )
    code, _, err = braid("domain", "check", sums, "--run", "small", "--stage", "cold_start")
    assert code == 1 and "\npreview: generate needs " in err
    assert not (runs / "small" / "evaluations").exists()


def test_an_engine_s_job_says_what_it_may_use_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    directory = EngineDirectory(tmp_path / "engine")
    directory.path.mkdir()

    def allowed(*overrides: str) -> int | None:
        settings = qwen(*overrides)
        placement = ThisMachine(settings.engine, gpus=MachineGpus([], []) if on_gpus else None)
        path = write_engine_job(directory, settings, 0, placement)
        return EngineJob.model_validate_json(path.read_text()).gpu_memory_bytes

    put_nvidia_smi(monkeypatch, tmp_path)  # four GPUs of 81,559 MiB
    on_gpus = False
    assert allowed() is None
    on_gpus = True
    # A launcher beside a container may have a torch for CPUs.
    monkeypatch.setattr("parallel.machine.gpus.built_for_cpu", lambda: True)
    # The trainer's context and communicators, and contexts of the three other engine ranks.
    assert allowed() == (81_559 << 20) - (1 << 30) - 4 * (1 << 29)
    assert allowed("engine.placement=own") is None


def test_gpus_that_are_not_known_refuse_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "cluster.yaml"
    for text in ("gpus_per_node: 8\n", "gpu_memory_gib: 1\n"):
        profile.write_text(text)
        assert refused(qwen(*TOO_MUCH), profile) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here(qwen())("grpo") is None
    put_nvidia_smi(monkeypatch, tmp_path, "NVIDIA-SMI has failed: no driver", 9)  # a login node
    assert gpus_here(qwen())("grpo") is None


def test_gpus_that_no_rank_and_no_engine_uses_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = GPU_LINES.splitlines()
    lines[1] = lines[1].replace("81559", "16384")
    put_nvidia_smi(monkeypatch, tmp_path, "\n".join(lines))
    large, small = 81_559 << 20, 16_384 << 20
    one = qwen(
        "layout.ranks=1", "layout.tensor=1", "layout.expert=1", "engine.count=1", "engine.tensor=1"
    )
    assert gpus_here(one)("grpo") == NodeGpus(4, large)
    assert gpus_here(one, parallel=2)("grpo") == NodeGpus(2, large)
    assert gpus_here(one, parallel=4)("grpo") == NodeGpus(1, small)
    assert gpus_here(qwen())("grpo") == NodeGpus(4, small)


def test_a_kind_may_have_other_gpus(tmp_path: Path) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text(
        "gpus_per_node: 8\ngpu_memory_gib: 79.2\nkinds: {distill: {gpu_memory_gib: 141}}\n"
    )
    [line] = refused(qwen(*TOO_MUCH), profile)
    assert line.startswith("experts.math: update needs 92.04 GiB of each GPU, ")
    assert gpus_of(load_cluster(profile))("distill") == NodeGpus(8, 141 << 30)
    profile.write_text("ranks_per_node: 4\ngpus_per_node: 8\ngpu_memory_gib: 141\n")
    assert gpus_of(load_cluster(profile))("distill") == NodeGpus(4, 141 << 30)
    profile.write_text("gpus_per_node: 8\ngpu_memory_gib: 0\n")
    with pytest.raises(UserError, match=r"cluster\.yaml:2: gpu_memory_gib: should be greater"):
        load_cluster(profile)


if __name__ == "__main__":
    PAGE.write_text(page())
