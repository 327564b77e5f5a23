"""Keys under other names: those of former versions and those of other projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import schema
from pipeline.config.validate import load
from stages.settings import RunSettings
from tests.pipeline.violations import edited, errors
from tests.runs import REPOSITORY


def test_a_renamed_key_is_reported_at_its_line(config: Path) -> None:
    edited(
        config, "prompts: {dataset: chain_sum}", "prompts: {dataset: chain_sum}\n    reward: a:b"
    )
    [error] = errors(config)
    assert error.startswith("small.yaml:16: domains.sums.reward: renamed to rewards: {NAME: ")


def test_the_former_key_of_domains_names_the_new_one(config: Path) -> None:
    config = edited(config, "\ndomains:\n", "\nexperts:\n")
    assert errors(config) == ["small.yaml:13: experts: renamed to domains"]
    config = edited(config, "\nexperts:\n", "\ndomains:\n")
    old = ("experts.sums.loop.steps=3", "experts.words.loop.steps=3", "experts={}")
    for override in old:
        assert errors(config, override) == ["command line: experts: renamed to domains"]
    assert errors(config, *old) == ["command line: experts: renamed to domains"]
    child = config.with_name("child.yaml")
    child.write_text("extends: small.yaml\nexperts: {sums: {loop: {steps: 3}}}\n")
    assert errors(child) == ["child.yaml:2: experts: renamed to domains"]


# What a file says of its stages in place of `stages`, before these were blocks.
FORMER = """\
cold_start:
  optimizer: {learning_rate: 1e-3}
  loop: {steps: 2}
merge:
  optimizer: {learning_rate: 1e-3}
  loop: {steps: 2}
mixed:
  optimizer: {learning_rate: 1e-3}
  loop: {steps: 2}
rounds: 2
"""


def test_a_file_of_the_former_keys_says_the_new_form_of_each(config: Path) -> None:
    domains, _, _ = config.read_text().partition("stages:\n")
    config.write_text(f"{domains}{FORMER}")
    edited(config, "loop: {steps: 2}\n", "loop: {steps: 2}\n    from: cold_start\n    gate: {}\n")
    template = "extends: pipelines/experts-merge.yaml has it"
    assert errors(config) == [
        "small.yaml:1: stages: required key is missing",
        "small.yaml:18: domains.sums.from: renamed to stages.NAME.from, the stage that a stage "
        "starts from",
        "small.yaml:19: domains.sums.gate: renamed to stages.NAME.gate, of the stage that it "
        "gates: gate: {domains: [DOMAIN]}",
        f"small.yaml:24: cold_start: renamed to stages.cold_start, with kind: sft; {template}. "
        "Without one, extend pipelines/experts-merge-from-weights.yaml",
        f"small.yaml:27: merge: renamed to stages.merge, with kind: distill; {template}. Without "
        "one: stages: {merge: null, export: null}",
        "small.yaml:30: mixed: renamed to stages.mixed, with kind: grpo, from: cold_start and its "
        "own optimizer and loop",
        "small.yaml:33: rounds: renamed to blocks of stages for each round, as in "
        "configs/pipelines/two-rounds.yaml",
    ]


@pytest.mark.parametrize("former", ["cold_start=null", "cold_start.loop.steps=3", "merge=null"])
def test_an_override_of_a_former_key_says_its_new_form(config: Path, former: str) -> None:
    [error] = errors(config, former)
    name = former.partition("=")[0].partition(".")[0]
    assert error.startswith(f"command line: {name}: renamed to stages.{name}, with kind: ")


@pytest.mark.parametrize("template", ["experts-merge", "experts-merge-from-weights"])
def test_what_the_messages_of_former_keys_advise_is_valid(
    config: Path, template: str, start: Path
) -> None:
    domains, _, _ = config.read_text().partition("stages:\n")
    optimizer = "{optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"
    cold = f"  cold_start: {optimizer}\n" if template == "experts-merge" else ""
    path = REPOSITORY / "configs" / "pipelines" / f"{template}.yaml"
    config.write_text(f"extends: {path}\n{domains}stages:\n{cold}  merge: {optimizer}\n")
    given = [] if cold else [f"model.initial_weights={start}"]
    load(config, given, to_start=False)
    load(config, [*given, "stages={merge: null, export: null}"], to_start=False)


@pytest.mark.parametrize("name", schema.ALIASES)
def test_every_alias_means_a_key(name: str) -> None:
    """`optimizer` and `loop` are blocks of every stage that trains."""
    key = tuple(schema.ALIASES[name].split("."))
    at = ("stages", "cold_start", *key) if key[0] in ("optimizer", "loop") else key
    assert key[-1] in schema.fields(schema.type_at(RunSettings, at[:-1]))
    assert name not in schema.fields(schema.type_at(RunSettings, at[:-1]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.tensor_parallel_size=2", 'did you mean "tensor"?'),
        ("engine.tp=2", 'did you mean "tensor"?'),
        ("model.tensor_parallel_size=2", 'did you mean "engine.tensor"?'),
        ("model.num_hidden_layers=2", 'did you mean "layers"?'),
        ("layout.tensor_model_parallel_size=2", 'did you mean "tensor"?'),
        ("pp=2", 'did you mean "layout.pipeline"?'),
        ("stages.cold_start.optimizer.lr=1", 'did you mean "learning_rate"?'),
        ("stages.cold_start.micro_batch_size=1", 'did you mean "loop.micro_batch_tokens"?'),
        (
            "engine.gpu_memory_utilization=0.9",
            'did you mean "kv_cache_mebibytes"? (it is computed where null)',
        ),
        (
            "layout.sequence_parallel=true",
            'did you mean "tensor"? (sequence parallelism is on wherever tensor > 1)',
        ),
    ],
)
def test_a_key_s_name_in_other_projects_is_understood(
    config: Path, override: str, said: str
) -> None:
    [found] = errors(config, override)
    assert found.endswith(f"unknown key; {said}")


def test_an_alias_in_a_file_is_understood_as_on_the_command_line(config: Path) -> None:
    edited(config, "  layers: 4", "  num_hidden_layers: 4")
    assert 'model.num_hidden_layers: unknown key; did you mean "layers"?' in "".join(errors(config))
