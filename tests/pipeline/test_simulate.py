"""`braid simulate`: the seconds of a real model's run, and the layouts that it proposes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from parallel.engine_rules import engine_violations
from parallel.estimates.roofline.hardware import GPUS
from parallel.layout_rules import divisors, layout_violations
from parallel.machine.slots import fits_nodes
from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import load
from pipeline.estimate.layout_search import FILLED_AT_MOST, _ends, best_layouts
from pipeline.estimate.simulation import (
    Assumptions,
    sheets_of_kinds,
    simulated,
    without_sync,
    workload,
)
from pipeline.estimate.stage_memory import NodeGpus, stage_phases
from pipeline.run.graph import compile_graph
from stages.settings import RunSettings
from tests.pipeline.conftest import Braid
from tests.runs import BRAID, REPOSITORY

CONFIG = f"""
extends: {REPOSITORY}/configs/pipelines/experts-merge-from-weights.yaml
name: simulated
model:
  extends: {REPOSITORY}/configs/models/MODEL.yaml
  initial_weights: /models/nowhere
  tokenizer: /models/nowhere
layout: {{ranks: 32, tensor: 2, expert: 8}}
engine: {{count: 16, tensor: 2, max_model_tokens: 4096, max_sequences: 256}}
domains:
  chain_sum:
    extends: {REPOSITORY}/configs/domains/chain_sum.yaml
    sampling: {{prompts_per_step: 64, group_size: 32, max_response_tokens: 3840}}
    optimizer: {{algorithm: adam, learning_rate: 1.0e-6}}
    loop: {{steps: 40, micro_batch_tokens: 4096}}
stages:
  merge:
    sampling: {{prompts_per_step: 512, group_size: 1, max_response_tokens: 3840}}
    optimizer: {{algorithm: adam, learning_rate: 1.0e-6}}
    loop: {{steps: 10, micro_batch_tokens: 4096}}
  evaluate: null
"""
ASSUMED = Assumptions(GPUS["h100"], per_node=8, filled=0.6, imbalance=1.0)
SHIPPED = (
    "quickstart",
    *(f"recipes/{name}-small" for name in ("dapo", "merge", "r1", "ultra", "v4", "zero")),
)
SMALL = 16  # GPUs of a brute-force search


def config(directory: Path, model: str = "qwen3-30b-a3b") -> Path:
    path = directory / "simulated.yaml"
    path.write_text(CONFIG.replace("MODEL", model))
    return path


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RunSettings:
    return load(config(tmp_path_factory.mktemp("simulate")), to_start=False)


def total(settings: RunSettings) -> float:
    stages = [each for each in compile_graph(settings) if each.steps]
    return sum(without_sync(each, settings, ASSUMED).duration for each in stages)


def asked(braid: Braid, path: Path, *more: str) -> dict[str, Any]:
    code, out, err = braid("simulate", path, "--gpu", "h100", "--json", *more)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_nothing_of_the_run_needs_to_exist(braid: Braid, runs: Path, tmp_path: Path) -> None:
    path = config(tmp_path)
    code, out, err = braid("simulate", path, "--gpu", "h100")
    assert code == 0, err
    assert "experts.chain_sum" in out and "GPU hours" in out and "KV cache" in out
    found = asked(braid, path)
    stage = found["stages"]["experts.chain_sum"]
    seconds = stage["seconds"]
    parts = (seconds[name] for name in ("rollout", "logprobs", "train", "weight_sync", "other"))
    assert sum(parts) == pytest.approx(seconds["total"])
    assert stage["duration"] == pytest.approx(40 * seconds["total"])
    assert not [*runs.glob("*")]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_kind_of_stage_that_trains(name: str, braid: Braid) -> None:
    path = REPOSITORY / "configs" / f"{name}.yaml"
    found = asked(braid, path)["stages"]
    stages = compile_graph(load(path, to_start=False))
    assert [*found] == [each.name for each in stages if each.steps]
    for stage in stages:
        if stage.steps:
            seconds = found[stage.name]["seconds"]
            assert seconds["train"] > 0
            assert (seconds["rollout"] > 0) == stage.needs_engine


@pytest.mark.parametrize(
    ("changes", "phase", "grows"),
    [
        (("--imbalance", "2"), "train", True),
        (("--filled", "0.9"), "rollout", True),
        (("layout.recompute=full",), "train", True),
        (("layout.expert=32",), "train", True),  # over the network
        (("engine.count=8",), "rollout", True),
        (("layout.ranks=64",), "train", False),
    ],
)
def test_a_phase_follows_its_cause(
    changes: tuple[str, ...], phase: str, grows: bool, braid: Braid, tmp_path: Path
) -> None:
    path = config(tmp_path)

    def seconds(*more: str) -> float:
        return float(asked(braid, path, *more)["stages"]["experts.chain_sum"]["seconds"][phase])

    assert (seconds(*changes) > seconds()) == grows


@pytest.mark.parametrize(
    ("objective", "updates", "passes"),
    [
        ("{}", 1, 0),  # the pass with the gradients gives pi_old
        ("{}", 2, 1),
        ("{scaling: edge}", 1, 1),  # the entropies come first
        ("{ratio: {name: rspo}, correction: {name: none}}", 1, 1),  # as the routers' scores do
        ("{kl: {coefficient: 0.1}}", 1, 1),  # the reference
        ("{kl: {coefficient: 0.1}}", 2, 2),
    ],
)
def test_pi_old_costs_a_pass_only_where_it_is_computed(
    objective: str, updates: int, passes: int, tmp_path: Path
) -> None:
    domain = "domains.chain_sum"
    given = (f"{domain}.objective={objective}", f"{domain}.updates_per_rollout={updates}")
    settings = load(config(tmp_path), given, to_start=False)
    [expert] = [stage for stage in compile_graph(settings) if stage.kind == "grpo"]
    assert workload(expert, settings, ASSUMED).passes == passes


@pytest.mark.combinations
def test_the_search_is_as_good_as_brute_force(settings: RunSettings) -> None:
    """Over all pipelines' chunks and tensor-parallel experts too, which the search leaves out."""
    stages = [each for each in compile_graph(settings) if each.steps]
    [best, *_] = best_layouts(stages, settings, SMALL, ASSUMED, 1)
    node = NodeGpus(8, int(FILLED_AT_MOST * ASSUMED.gpu.memory_bytes))
    least = float("inf")
    model, sizes = settings.model, divisors(SMALL)
    fleets = [
        settings.engine.model_copy(update={"count": SMALL // tensor, "tensor": tensor})
        for tensor in sizes
    ]
    fleets = [
        each
        for each in fleets
        if fits_nodes(each, 8) and not any(engine_violations(model, each.tensor, False, 1))
    ]
    for tensor, context, pipeline, virtual, expert, expert_tensor, recompute in product(
        *(sizes, sizes, sizes, (1, 2), sizes, (1, 2), ("none", "full"))
    ):
        layout = settings.layout.model_copy(
            update={
                **{"ranks": SMALL, "tensor": tensor, "context": context, "pipeline": pipeline},
                **{"virtual_pipeline": virtual, "expert": expert, "recompute": recompute},
                "expert_tensor": expert_tensor,
            }
        )
        if layout_violations(model, layout):
            continue
        for fleet in fleets:
            changed = settings.model_copy(update={"layout": layout, "engine": fleet})
            if (seconds := total(changed)) >= least:
                continue
            phases = [phase for stage in stages for phase in stage_phases(stage, changed, node)]
            if all(phase.total + phase.reserve <= node.gpu_bytes for phase in phases):
                least = seconds
    assert best.seconds <= 1.1 * least
    assert best.seconds == pytest.approx(total(best.settings))


def test_the_search_counts_every_domain(settings: RunSettings) -> None:
    """Domains with the same steps are timed once."""
    [domain] = settings.domains.values()
    both = settings.model_copy(update={"domains": {"one": domain, "other": domain}})
    [best] = best_layouts(compile_graph(both), both, SMALL, ASSUMED, 1)
    assert best.seconds == pytest.approx(total(best.settings))


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("qwen3-30b-a3b", 32),
        ("mixtral-8x7b", 16),
        ("gpt-oss-20b", 16),
        ("glm-4.5-air", 64),
        ("qwen3-235b-a22b", 256),
        ("deepseek-v3", 512),
    ],
)
def test_what_the_search_proposes_is_valid(
    model: str, gpus: int, braid: Braid, tmp_path: Path
) -> None:
    path = config(tmp_path, model)
    layouts = asked(braid, path, "--search", str(gpus))["layouts"]
    assert [each["duration"] for each in layouts] == sorted(each["duration"] for each in layouts)
    for each in layouts:
        changed = load(path, each["overrides"], to_start=False)
        assert changed.layout.ranks == gpus
        assert simulated(compile_graph(changed), changed, ASSUMED)


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "given"),
    [
        (
            *("qwen3-30b-a3b", 32, "h100"),
            "layout.pipeline=2 layout.virtual_pipeline=2 layout.recompute=selective "
            "layout.recompute_modules=[moe_act] engine.count=8 engine.data=2",
        ),
        # The fastest engines have one rank, which cannot share the experts with others.
        (
            *("gpt-oss-20b", 8, "h100"),
            "layout.ranks=8 layout.expert=1 engine.count=4 engine.expert_parallel=true",
        ),
        # The family's own rule: tensor parallelism splits the key heads of delta nets.
        (
            *("qwen3.5-35b-a3b", 16, "h200"),
            "layout.ranks=16 layout.expert=1 layout.tensor=1 engine.tensor=1 "
            "model.architecture.linear_num_key_heads=1",
        ),
    ],
)
def test_overrides_replace_all_that_the_search_chooses(
    model: str, gpus: int, gpu: str, given: str, tmp_path: Path
) -> None:
    path, assumed = config(tmp_path, model), replace(ASSUMED, gpu=GPUS[gpu])
    asked = load(path, given.split(), to_start=False)
    found = best_layouts(compile_graph(asked), asked, gpus, assumed, 16)
    assert found
    for each in found:
        changed = load(path, [*given.split(), *each.overrides], to_start=False)
        assert (changed.layout, changed.engine) == (each.settings.layout, each.settings.engine)


def test_the_search_proposes_layouts_with_a_problem_for_every_rank(
    braid: Braid, tmp_path: Path
) -> None:
    path = config(tmp_path, "gpt-oss-20b")
    path.write_text(path.read_text().replace("  evaluate: null\n", ""))
    given = ["evaluation.problems=4", "layout.tensor=8"]
    layouts = asked(braid, path, "--search", "32", *given)["layouts"]
    assert len(layouts) == 5
    for each in layouts:
        assert load(path, [*given, *each["overrides"]], to_start=False).layout.data <= 4


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (
            "deepseek-v3",
            ("--gpu", "h100", "--search", "8"),
            "no valid layout of 8 GPUs fits",
        ),
        ("qwen3-30b-a3b", ("--gpu", "h10"), "no GPU h10 is known"),
        ("qwen3-30b-a3b", (), "name the GPU: --gpu h100"),
        ("qwen3-30b-a3b", ("--gpu", "h100", "--filled", "2"), "2 is no share from above 0 to 1"),
        ("qwen3-30b-a3b", ("--gpu", "h100", "--imbalance", "0.5"), "no ratio from 1 to 1000"),
    ],
)
def test_what_cannot_be_simulated(
    model: str, options: tuple[str, ...], said: str, braid: Braid, tmp_path: Path
) -> None:
    code, _, err = braid("simulate", config(tmp_path, model), *options)
    assert code and said in err


def test_a_terminal_shows_the_tables_in_color(tmp_path: Path) -> None:
    """Escaped, the codes of their headings would be shown as text."""
    mine, theirs = pty.openpty()
    command = [*BRAID, "simulate", str(config(tmp_path)), "--gpu", "h100"]
    plain = {"NO_COLOR": "", "TERM": "xterm"}
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=theirs, env={**os.environ, **plain}
    ) as child:
        os.close(theirs)
        shown = _all(mine)
    assert child.returncode == 0
    assert b"\x1b[1mstage\x1b[0m" in shown and b"\\x1b" not in shown


def _all(descriptor: int) -> bytes:
    """Return what a terminal shows until its last writer is gone."""
    found = b""
    with suppress(OSError):  # Linux says so at its end
        while part := os.read(descriptor, 65536):
            found += part
    os.close(descriptor)
    return found


def test_memory_is_what_the_profile_states(braid: Braid, tmp_path: Path) -> None:
    path, profile = config(tmp_path), tmp_path / "cluster.yaml"
    profile.write_text("gpus_per_node: 8\ngpu_type: h100\ngpu_memory_gib: 20\n")
    code, out, err = braid("simulate", path, "--cluster", profile)
    assert code == 1
    assert "a GPU has 20.00" in out
    assert "more than its 20.00" in err


PROFILE = "gpus_per_node: 8\ngpu_type: h100\ngpu_memory_gib: 79.2\n"


def test_only_kinds_that_train_need_known_gpus() -> None:
    kinds = {"evaluate": {"gpu_type": "l40s"}, "grpo": {"gpu_type": "h200"}}
    profile = ClusterSettings.model_validate({"gpu_type": "h100", "kinds": kinds})
    assert sheets_of_kinds("h100", profile) == {"grpo": GPUS["h200"]}


def test_memory_of_a_kind_is_what_the_profile_states(braid: Braid, tmp_path: Path) -> None:
    """As `braid submit` with this profile checks it: 20 GiB for distillation alone."""
    path, profile = config(tmp_path), tmp_path / "cluster.yaml"
    profile.write_text(f"{PROFILE}kinds: {{distill: {{gpu_memory_gib: 20}}}}\n")
    code, out, err = braid("simulate", path, "--cluster", profile)
    assert code == 1
    assert "merge: GiB on a GPU in each phase of a step; a GPU has 20.00" in out
    assert "merge: " in err and "more than its 20.00" in err
    assert "experts.chain_sum" not in err


@pytest.mark.parametrize(("kind", "gib"), [("distill", 32), ("evaluate", 24)])
def test_the_search_fits_the_memory_of_each_kind(
    kind: str, gib: int, braid: Braid, tmp_path: Path
) -> None:
    """An evaluation does not train, and is searched for where its GPUs have memory of their own."""
    path, profile = config(tmp_path), tmp_path / "cluster.yaml"
    path.write_text(path.read_text().replace("  evaluate: null\n", ""))
    own = NodeGpus(8, int(FILLED_AT_MOST * (gib << 30)))

    def fits(settings: RunSettings) -> bool:
        [stage, *_] = [each for each in compile_graph(settings) if each.kind == kind]
        phases = stage_phases(stage, settings, own)
        return all(phase.total + phase.reserve <= own.gpu_bytes for phase in phases)

    found = []
    for kinds in ("", f"kinds: {{{kind}: {{gpu_memory_gib: {gib}}}}}\n"):
        profile.write_text(PROFILE + kinds)
        layouts = asked(braid, path, "--cluster", str(profile), "--search", "32")["layouts"]
        found.append([fits(load(path, each["overrides"], to_start=False)) for each in layouts])
    usual, fitted = found
    assert fitted and all(fitted) and not all(usual)


def test_more_gpus_than_are_searched(braid: Braid, tmp_path: Path) -> None:
    code, _, err = braid("simulate", config(tmp_path), "--gpu", "h100", "--search", 100_000)
    assert (code, err) == (
        1,
        "braid: --search 100000: layouts are searched for at most 1,024 GPUs\n",
    )


@pytest.mark.parametrize(
    ("layers", "pipeline", "ends"),
    [
        (48, 4, (None, None)),
        (61, 2, (None, None)),
        (94, 4, (23, 23)),
        (61, 8, (7, 6)),  # the head is on the last
        (9, 8, (2, 1)),
    ],
)
def test_the_last_stage_has_no_more_layers_than_the_first(
    layers: int, pipeline: int, ends: tuple[int | None, int | None]
) -> None:
    assert tuple(_ends(layers, pipeline).values()) == ends
