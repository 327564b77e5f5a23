"""`braid plan --memory`: which stage holds what, and the table a person reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config.validate import load
from pipeline.estimate.stage_memory import compared_with, row_tokens, stage_memory, stage_models
from pipeline.run.graph import compile_graph
from pipeline.tables import DEEPEST, indented
from pipeline.text import human
from stages.settings import RunSettings
from tests.pipeline.violations import MIXED, TRAINED, extending, with_mixed

SMALL_ROWS = "optimizer: {learning_rate: 1e-4}, loop: {steps: 3, micro_batch_tokens: 10}"
COLLECT = "{kind: sample, from: cold_start, prompts: 8, keep: {reward: 0.5}}"
COLLECTED = (
    "kind: sft, from: cold_start, data: {taken: {source: stage, stage: collect}},"
    f" sequences_per_step: 32, {SMALL_ROWS}"
)
PAIRS = (
    "kind: dpo, from: cold_start,"
    f" data: {{files: {{source: jsonl, path: pairs.jsonl, max_tokens: 90}}}}, {SMALL_ROWS}"
)

ONE_MODEL = 4 * (167_008 + 4 * 4 * 27_648)  # the dense weights and half of the experts, in fp32


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (999 << 20, "999 MiB"),
        (1000 << 20, "0.98 GiB"),
        (139 << 30, "139 GiB"),
        (12_345 << 40, "12,345 TiB"),
    ],
)
def test_bytes_are_formatted_readably(count: int, shown: str) -> None:
    assert human(count) == shown


def test_a_stage_holds_the_models_it_compares_with(config: Path) -> None:
    overrides = [
        "layout.distributed_optimizer=false",
        "domains.words.objective.kl.coefficient=0",
        "domains.sums.objective.kl.coefficient=0.1",
        "domains.sums.optimizer.algorithm=sgd",
        "stages.merge.loop.micro_batch_tokens=1024",
    ]
    settings: RunSettings = load(config, overrides)
    held = {stage.name: stage_memory(stage, settings) for stage in compile_graph(settings)}
    assert all(len(ranks) == 1 for ranks in held.values())
    fullest = {name: ranks[0] for name, ranks in held.items()}
    assert {name: rank.frozen // ONE_MODEL for name, rank in fullest.items()} == {
        "cold_start": 0,
        "experts.sums": 1,
        "experts.words": 0,
        "merge": 1,  # of two teachers, which come in turn
        "evaluate": 0,
        "export": 0,
    }
    assert fullest["experts.sums"].optimizer == ONE_MODEL
    assert fullest["experts.words"].optimizer == 2 * ONE_MODEL
    # Of 4096 and of 1024 tokens, each with a tenth more.
    assert fullest["cold_start"].activations * 1126 == fullest["merge"].activations * 4505
    assert fullest["export"].total == fullest["evaluate"].total == ONE_MODEL


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        # 1.1 of 4096; demonstrations here are generated, and short.
        ((), {"cold_start": 4505, "experts.sums": 4505, "merge": 4505}),
        (("layout={ranks: 4, context: 4}",), {"cold_start": 18_022, "merge": 18_022}),
        # A sample of the engine is never cut, on however many ranks: 2 x 2 pieces of 50.
        (
            (
                "layout={ranks: 2, context: 2}",
                "engine.max_model_tokens=198",
                "domains.sums.loop.micro_batch_tokens=32",
                "stages.merge.loop.micro_batch_tokens=64",
            ),
            {"experts.sums": 200, "merge": 200, "experts.words": 9011},
        ),
        # Nor is a demonstration: those of files are at most max_positions long unless they say so.
        (
            (
                "stages.cold_start.loop.micro_batch_tokens=10",
                "stages.cold_start.sequences_per_step=32",
                "stages.cold_start.data={rows: {source: jsonl, path: rows.jsonl}}",
            ),
            {"cold_start": 256},
        ),
        (
            (
                "stages.cold_start.loop.micro_batch_tokens=10",
                "stages.cold_start.sequences_per_step=32",
                "stages.cold_start.data={rows: {source: jsonl, path: rows.jsonl, max_tokens: 90}}",
            ),
            {"cold_start": 90},
        ),
        # No response that a stage collected is longer than the engine allows.
        (
            (
                "engine.max_model_tokens=198",
                f"stages={{collect: {COLLECT}, tuned: {{{COLLECTED}}}}}",
            ),
            {"tuned": 198},
        ),
        # The two of a pair are in one row, each in a slot of whole pieces: 2 x 4 x 12 tokens.
        (
            (
                "layout={ranks: 4, context: 4}",
                f"stages={{tuned: {{{PAIRS}}}}}",
            ),
            {"tuned": 2 * 96},
        ),
    ],
)
def test_rows_are_planned_as_the_trainer_cuts_them(
    config: Path, overrides: tuple[str, ...], rows: dict[str, int]
) -> None:
    settings: RunSettings = load(config, overrides, to_start=False)
    stages = {stage.name: stage for stage in compile_graph(settings)}
    assert {name: row_tokens(stages[name], settings) for name in rows} == rows


def test_a_critic_is_held_beside_its_policy(config: Path) -> None:
    overrides = [
        "layout.distributed_optimizer=false",
        "domains.sums.objective={advantage: {name: gae}, ratio: {name: token}}",
        MIXED,
        "stages.mixed.domains=[words]",
        "stages.mixed.objective={advantage: {name: gae}, ratio: {name: token}}",
    ]
    settings: RunSettings = load(config, overrides)
    found = {stage.name: stage_memory(stage, settings) for stage in compile_graph(settings)}
    [expert], [alone] = found["experts.sums"], found["cold_start"]
    head = 4 * (settings.model.vocabulary_size - 1) * settings.model.hidden_size
    assert expert.parameters == 2 * alone.parameters - head
    assert expert.optimizer == 2 * alone.optimizer - 2 * head
    assert found["mixed"] == found["experts.sums"]


def test_a_baseline_s_critic_and_an_average_in_fp32_are_counted(config: Path) -> None:
    overrides = [
        "layout.distributed_optimizer=false",
        "model.precision=bf16",
        "domains.sums.objective.kl={coefficient: 0.1, reference: ema}",
        "domains.words.objective.kl={coefficient: 0.1}",
        MIXED,
        "stages.mixed.domains=[words]",
        "stages.mixed.objective={advantage: {name: gae}, ratio: {name: token}}",
    ]
    settings: RunSettings = load(config, overrides)
    found = {stage.name: stage_memory(stage, settings) for stage in compile_graph(settings)}
    frozen = {name: ranks[0].frozen for name, ranks in found.items()}
    assert (frozen["experts.sums"], frozen["experts.words"]) == (ONE_MODEL, ONE_MODEL // 2)
    assert frozen["mixed"] == 0
    head = 2 * (settings.model.vocabulary_size - 1) * settings.model.hidden_size
    assert found["mixed"][0].parameters == ONE_MODEL - head


def test_the_plan_reports_what_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*overrides: str) -> str:
        assert cli.main(["plan", str(config), "--memory", *overrides]) == 0
        return capsys.readouterr().out

    whole = plan()
    assert "small: memory of the fullest rank, by stage" in whole
    assert "model: 1.05 M parameters, 388 K of them used by a token, fp32, on 2 ranks" in whole
    assert "KV cache 32.1 MiB,\n  which holds 16,416 tokens" in whole
    assert "by pipeline rank" not in whole
    assert "the rest waits" in plan("engine.kv_cache_mebibytes=16")
    several = plan("engine={count: 2, tensor: 2, kv_cache_mebibytes: 16}")
    assert "each of 2 engines, a separate process on 2 ranks: " in several
    assert "KV cache 32.0 MiB,\n  which holds 16,384 tokens" in several
    parted = plan("layout={ranks: 4, pipeline: 2}").splitlines()
    start = next(i for i, line in enumerate(parted) if line.startswith("merge, by pipeline rank"))
    assert parted[start + 2].split()[:3] == ["0", "2", "embedding"]
    assert parted[start + 3].split()[:4] == ["1", "2", "output", "layer"]


def test_the_response_log_is_of_all_steps_until_a_checkpoint(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token has two experts of four layers, 2 bytes each, and three numbers of 4 bytes."""
    overrides = [
        "domains.sums.sampling={prompts_per_step: 64, group_size: 16}",  # of 64 tokens at most
        "domains.sums.loop={steps: 6, checkpoint_every: 3}",
        "domains.words.loop.checkpoint_every=1",
        "stages.merge.loop.checkpoint_every=1",
    ]
    step = 64 * 16 * 64 * (4 * 2 * 2 + 3 * 4)
    assert (human(step), human(3 * step)) == ("1.75 MiB", "5.25 MiB")
    assert cli.main(["plan", str(config), "--memory", *overrides]) == 0
    out = capsys.readouterr().out
    assert "responses of a step of experts.sums, in rank 0's host memory: at most 1.75 MiB" in out
    assert "its response log on disk until a checkpoint: at most 5.25 MiB" in out
    overrides.append("logging.response_log=false")
    assert cli.main(["plan", str(config), "--memory", *overrides]) == 0
    assert "response log" not in capsys.readouterr().out


def test_the_references_of_all_domains_are_held(config: Path) -> None:
    """Each domain of a stage has its own penalty: the first one's does not speak for the others."""
    first = f"stages={{first: {{kind: sft, {TRAINED[1:]}}}"

    def held(*penalties: str) -> tuple[int, int]:
        kl = [
            f"domains.{name}.objective.kl={{coefficient: 0.1, reference: {each}}}"
            for name, each in zip(("sums", "words"), penalties, strict=True)
            if each
        ]
        settings = load(config, [first, MIXED, *kl])
        [stage] = [each for each in compile_graph(settings) if each.name == "mixed"]
        return compared_with(stage, settings)

    assert held("", "") == (0, 0)
    assert held("", "first") == held("first", "") == held("first", "first") == (1, 0)
    assert held("first", "parent") == (2, 0)
    assert held("cold_start", "parent") == (1, 0)
    assert held("parent", "ema") == (1, 1)


def test_frozen_models_are_counted_on_the_host_and_their_heads_on_the_last_rank(
    config: Path,
) -> None:
    kl = "domains.{}.objective.kl={{coefficient: 0.1, reference: {}, estimator: full}}"
    penalties = (kl.format("sums", "parent"), kl.format("words", "ema"))
    settings = load(config, [MIXED, *penalties, "layout.pipeline=2", "layout.ranks=4"])
    [stage] = [each for each in compile_graph(settings) if each.name == "mixed"]
    first, last = stage_models(stage, settings)
    assert (first.heads, last.heads > 0) == (0, True)
    for models in (first, last):
        assert models.frozen_models == 2
        assert 2 * models.frozen == models.policy.frozen > 0


def test_a_later_round_needs_as_much_as_the_first(config: Path) -> None:
    extending(config, "two-rounds", "cold_start", "merge", "merge_2")
    settings = load(config)
    held = {stage.name: stage_memory(stage, settings) for stage in compile_graph(settings)}
    for name in ("experts.sums", "experts.words", "merge"):
        assert held[f"round_2.{name}"] == held[name]


def test_many_rounds_are_indented_to_a_bound(config: Path) -> None:
    """Every round is deeper than the one before: 1000 of them took `plan --memory` two minutes."""
    experts = "{kind: grpo, from: MERGE, for_each: domain, as: 'round_N.experts.{domain}'}"
    merge = (
        "{kind: distill, from: MERGE, teachers: experts_N,"
        " optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"
    )
    rounds = [
        f"{name}_{number}: {block}".replace(
            "MERGE", f"merge_{number - 1}" if number > 2 else "merge"
        ).replace("_N", f"_{number}")
        for number in range(2, 101)
        for name, block in (("experts", experts), ("merge", merge))
    ]
    stages = compile_graph(load(config, [f"stages={{{', '.join(rounds)}}}"]))
    names = indented(stages)
    assert len(names) > 300
    assert max(len(name) - len(name.lstrip()) for name in names.values()) == 2 * DEEPEST


def test_references_that_several_domains_name_are_counted_once(config: Path) -> None:
    with_mixed(config)

    def counted(sums: str, words: str) -> tuple[int, int]:
        of = {"sums": sums, "words": words}
        kls = [f"domains.{name}.objective.kl={{{kl}}}" for name, kl in of.items()]
        # The experts have another objective: merge, a reference here, starts from them.
        settings = load(config, [*kls, "stages.experts.objective={entropy_bonus: 0}"])
        stages = {stage.name: stage for stage in compile_graph(settings)}
        return compared_with(stages["mixed"], settings)

    free, parent = "coefficient: 0", "coefficient: 0.1"
    slow = f"{parent}, reference: ema, ema_decay: 0.99"
    fast = f"{parent}, reference: ema, ema_decay: 0.5"
    assert counted(free, free) == (0, 0)
    assert counted(free, parent) == counted(parent, f"{parent}, estimator: k2") == (1, 0)
    assert counted(parent, f"{parent}, reference: cold_start") == (1, 0)
    assert counted(parent, f"{parent}, reference: merge") == (2, 0)
    assert counted(slow, f"{slow}, estimator: k2") == (0, 1)
    assert counted(slow, fast) == (0, 2)
    assert counted(parent, fast) == (1, 1)
