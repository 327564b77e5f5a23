"""Messages of configuration errors, word for word, and the behaviour of `extends`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.support.runs import read_run
from pipeline.config.read import ConfigError
from pipeline.config.validate import differing_keys, dump_resolved, load
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run
from stages.rewards.kinds.python import PythonReward
from tests.pipeline.violations import edited, errors

REPOSITORY = Path(__file__).parents[2]


JUDGE = (
    '{{j: {{kind: judge, base_url: "http://x", model: m, rubric: "{{response}}", '
    "api_key_file: {}}}}}"
)


def line_of(path: Path, text: str) -> int:
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize("name", ["quickstart", "smoke"])
def test_shipped_configurations_are_valid(name: str, tmp_path: Path) -> None:
    settings = load(REPOSITORY / "configs" / f"{name}.yaml")
    resolved = tmp_path / "run.yaml"
    resolved.write_text(dump_resolved(settings))
    assert load(resolved) == settings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 0", "sed: 0", 'sed: unknown key; did you mean "seed"?'),
        ("seed: 0", "seed: zero", 'seed: should be a valid integer, not "zero"'),
        ("seed: 0", "seed: true", "seed: should be a valid integer, not true"),
        ("seed: 0", "seed:", "seed: should be a valid integer, not null"),
        ("seed: 0", "seed: [1]", "seed: should be a valid integer, not [1]"),
        ("seed: 0", "seed: 0\nseed: 1", "seed: duplicate key in this mapping"),
        ("seed: 0", "seed: .inf", "seed: inf is not finite; use a finite number"),
        ("seed: 0", "layout: 2", "layout: should be a mapping of keys to values, not 2"),
        ("seed: 0", "seed: {a: 1}", "seed: should be a valid integer, not a mapping"),
        (
            "seed: 0",
            "model: {initial_weights: nowhere}",
            "model.initial_weights: no such directory: nowhere",
        ),
        ("seed: 0", "seed: 0\nx: *y", "not valid YAML: aliases are not supported"),
        ("seed: 0", "seed: 0: 1", "not valid YAML: mapping values are not allowed here"),
    ],
)
def test_an_error_is_one_line_with_its_location(
    config: Path, old: str, new: str, message: str
) -> None:
    base = config.with_name("base.yaml")
    config.rename(base)
    config.write_text(f"# a comment\nextends: base.yaml\n{old}\n")
    edited(config, old, new)
    found = errors(config)
    assert any(message in error for error in found), found
    assert all(error.startswith(("small.yaml:3: ", "small.yaml:4: ")) for error in found)


def test_a_mistyped_key_in_an_extended_file_is_reported_there(config: Path) -> None:
    domain = config.with_name("sums.yaml")
    domain.write_text("prompts: {dataset: chain_sum}\nobjective:\n  kl:\n    coeficient: 0.1\n")
    edited(config, "prompts: {dataset: chain_sum}", "extends: sums.yaml")
    message = 'objective.kl.coeficient: unknown key; did you mean "coefficient"?'
    assert errors(config) == [f"sums.yaml:4: domains.sums.{message}"]


def test_schema_errors_are_reported_together_and_hide_broken_rules(
    config: Path,
) -> None:
    edited(config, "name: small", "nam: small")
    edited(config, "expert: 2", "expert: 3")
    cold_start = "kind: sft\n    optimizer: {learning_rate: 1e-3}\n    loop: {steps: "
    edited(config, f"{cold_start}2", f"{cold_start}two")
    assert errors(config, "engine.max_model_tokens=20") == [
        "small.yaml:1: name: required key is missing",
        'small.yaml:1: nam: unknown key; did you mean "name"?',
        'small.yaml:26: stages.cold_start.loop.steps: should be a valid integer, not "two"',
    ]
    edited(config, "nam: small", "name: small")
    edited(config, "steps: two", "steps: 2")
    assert errors(config, "engine.max_model_tokens=20") == [
        "small.yaml:12: layout.expert: 3 does not divide model.experts = 8; use one of "
        "[1, 2, 4, 8]",
        "small.yaml:12: layout.expert: expert 3 does not divide layout.ranks = 2; use one of "
        "[1, 2], or a multiple of 3 as layout.ranks",
        "small.yaml:14: domains.sums.sampling.max_response_tokens: 24 leaves no room for a prompt; "
        "it must be less than engine.max_model_tokens = 20",
        "small.yaml:18: domains.words.sampling.max_response_tokens: 24 leaves no room for a "
        "prompt; it must be less than engine.max_model_tokens = 20",
        "small.yaml:28: stages.merge.sampling.max_response_tokens: 24 leaves no room for a prompt; "
        "it must be less than engine.max_model_tokens = 20",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "domains.sum.loop.steps=3",
            "domains.sum: unknown key; did you mean \"sums\"?; to add it: domains='{sum: ...}'",
        ),
        (
            "domains.sums.objective.kl.coeff=1",
            'domains.sums.objective.kl.coeff: unknown key; did you mean "coefficient"?',
        ),
        (
            "domains.sums.objective.ratio.clip=1",
            'domains.sums.objective.ratio.clip: unknown key; did you mean "clip_low"?',
        ),
        (
            "domains.sums.objective.ratio.name=tokens",
            "domains.sums.objective.ratio.name: should be 'cispo', 'geometric', 'rspo', "
            "'sequence', 'sequence_token' or 'token', not \"tokens\"; did you mean \"token\"?",
        ),
        (
            "domains.sums.objective.ratio.clip_low=-1",
            "domains.sums.objective.ratio.clip_low: should be greater than 0, not -1",
        ),
        (
            "domains.sums.objective.ratio=token",
            'domains.sums.objective.ratio: should be a mapping of keys to values, not "token"',
        ),
        ("seed=-1", "seed: should be greater than or equal to 0, not -1"),
        ("seed.low=1", "seed: should be a valid integer, not a mapping"),
        ("seed", "seed: an override must be written dotted.key=value"),
        (".seed=1", ".seed=1: an override must be written dotted.key=value"),
        ("seed=[", "seed: not a YAML value: expected the node content, but found '<stream end>'"),
    ],
)
def test_a_wrong_override_is_reported(config: Path, override: str, message: str) -> None:
    assert errors(config, override) == [f"command line: {message}"]


def test_a_mistyped_key_of_a_ratio_is_reported_at_its_line(config: Path) -> None:
    old = "prompts: {dataset: chain_sum}"
    edited(config, old, f"{old}\n    objective: {{ratio: {{name: token, clip_hi: 1}}}}")
    message = 'ratio.clip_hi: unknown key; did you mean "clip_high"?'
    assert errors(config) == [f"small.yaml:16: domains.sums.objective.{message}"]


def test_overrides_apply_to_the_file_in_order(config: Path) -> None:
    overrides = [
        "domains.sums.objective.kl.coefficient=1e-3",
        "domains.sums.prompts.config.max_terms=4",
        "stages.cold_start.optimizer.betas=[0.8, 0.9]",
        "layout={expert: 1}",
        "seed=1",
        "seed=2",
    ]
    settings = load(config, overrides)
    assert settings.domains["sums"].objective.kl.coefficient == 1e-3
    assert settings.domains["sums"].prompts.config == {"max_terms": 4}
    assert settings.stages["cold_start"].optimizer.betas == (0.8, 0.9)
    assert (settings.layout.ranks, settings.layout.expert) == (2, 1)
    assert settings.seed == 2


def test_a_mapping_of_names_to_values_replaces_the_file_s(config: Path) -> None:
    """Merged, weights of both would sum to 2; blocks and their mappings merge."""
    old = "    teachers: experts\n"
    several = "    teachers:\n      sums: {cold_start: 0.5, experts: 0.5}\n      words: experts\n"
    edited(config, old, f"{several}    domain_weights: {{sums: 2}}\n")
    edited(config, "{dataset: chain_sum}", "{dataset: chain_sum, config: {min_terms: 2}}")
    overrides = [
        "stages.merge.teachers.sums={experts: 1}",
        "stages={merge: {domain_weights: {words: 3}}, export: null}",
        "domains.sums={prompts: {config: {max_terms: 5}}, rewards: {brief: {kind: format, "
        "pattern: a}}}",
    ]
    settings = load(config, overrides)
    merge = settings.stages["merge"]
    assert merge.teachers == {"sums": {"experts": 1}, "words": "experts"}
    assert merge.domain_weights == {"words": 3}
    assert "export" not in settings.stages
    assert settings.domains["sums"].prompts.config == {"max_terms": 5}
    assert settings.domains["sums"].optimizer.learning_rate == 1e-3
    whole = load(config, ["stages.merge.teachers={sums: cold_start, words: experts}"])
    assert whole.stages["merge"].teachers == {"sums": "cold_start", "words": "experts"}
    edit = load(config, ["stages.merge.teachers.sums={cold_start: null, experts.sums: 0.5}"])
    assert edit.stages["merge"].teachers["sums"] == {"experts": 0.5, "experts.sums": 0.5}


def test_extends_merges_mappings_and_replaces_lists(config: Path) -> None:
    directory = config.parent / "domains"
    directory.mkdir()
    (directory / "_base.yaml").write_text("optimizer: {learning_rate: 1, betas: [0.1, 0.2]}\n")
    (directory / "sums.yaml").write_text(
        "extends: _base.yaml\nprompts: {config: {min_terms: 1, max_terms: 1}}\n"
    )
    edited(
        config,
        "prompts: {dataset: chain_sum}\n    optimizer: {learning_rate: 1e-3}",
        "extends: domains/sums.yaml\n    prompts: {dataset: chain_sum, config: {max_terms: 2}}\n"
        "    optimizer: {betas: [0.3, 0.4]}",
    )
    sums = load(config).domains["sums"]
    assert sums.prompts.config == {"min_terms": 1, "max_terms": 2}
    assert sums.optimizer.learning_rate == 1
    assert sums.optimizer.betas == (0.3, 0.4)


def test_a_mistyped_choice_hides_no_mistyped_key(config: Path) -> None:
    edited(
        config,
        "prompts: {dataset: chain_sum}",
        "prompts: {dataset: chain_sum}\n    objective:\n      ratio:\n        name: gpso\n"
        "        clip_hihg: 1\n        cap: 2\n    rewards: {a: {kind: mth, boxt: true}}",
    )
    found = errors(config, "stages.merge.loop.stepz=3")
    assert [error.partition(": should")[0] for error in found] == [
        'command line: stages.merge.loop.stepz: unknown key; did you mean "steps"?',
        "small.yaml:18: domains.sums.objective.ratio.name",
        "small.yaml:19: domains.sums.objective.ratio.clip_hihg: unknown key; did you mean "
        '"clip_high"?',
        "small.yaml:21: domains.sums.rewards.a.kind",
        'small.yaml:21: domains.sums.rewards.a.boxt: unknown key; did you mean "boxed"?',
    ]


def test_a_changed_source_names_the_keys_that_no_longer_fit(config: Path) -> None:
    """The file that states them is right by itself; null drops them."""
    domain, rows = config.with_name("sums.yaml"), config.with_name("rows.jsonl")
    domain.write_text("prompts:\n  source: reasoning_gym\n  dataset: chain_sum\n  config: {}\n")
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    changed = "prompts: {source: jsonl, path: rows.jsonl, answer: answer}"
    edited(
        config,
        "prompts: {dataset: chain_sum}",
        f"extends: sums.yaml\n    rewards: {{right: {{kind: math}}}}\n    {changed}",
    )
    key = "domains.sums.prompts"
    fix = "to null, or extend another file, such as domains/_base.yaml"
    assert errors(config) == [
        f"small.yaml:17: {key}.source: jsonl has no key {name}, which sums.yaml:{line} states; set "
        f"{key}.{name} {fix}"
        for name, line in (("dataset", 3), ("config", 4))
    ]
    given = f"{key}.config=null"
    [error] = errors(config, given)
    assert error.startswith(f"small.yaml:17: {key}.source: jsonl has no key dataset")
    edited(config, changed, changed.replace("}", ", dataset: null}"))
    pairs = f"source: jsonl, path: {rows}, prompt: prompt, response: answer"
    shown = f"domains.sums.demonstrations={{{pairs}}}"
    assert load(config, [given, shown]).domains["sums"].prompts.source == "jsonl"
    assert errors(config, given, shown, "stages.cold_start.kind=import") == [
        f"command line: stages.cold_start.kind: import has no key {name}, which small.yaml:{line} "
        f"states; set stages.cold_start.{name} to null"
        for name, line in (("optimizer", 27), ("loop", 28))
    ]


def test_files_that_extend_each_other_are_an_error(config: Path) -> None:
    config.with_name("other.yaml").write_text("seed: 1\nextends: small.yaml\n")
    edited(config, "name: small", "name: small\nextends: other.yaml")
    assert [error.replace(f"{config.parent}/", "") for error in errors(config)] == [
        "other.yaml:2: extends: small.yaml extends itself through this line"
    ]


def test_a_misspelt_kind_is_named(config: Path) -> None:
    edited(config, "    kind: sft", "    knd: sft")
    found = errors(config)
    assert [each.partition(": ")[2] for each in found] == [
        "stages.cold_start.kind: required key is missing",
        'stages.cold_start.knd: unknown key; did you mean "kind"?',
    ]


@pytest.mark.parametrize("above", ["", "configs/"])
def test_a_shipped_file_that_is_not_beside_the_run_is_named(above: str, config: Path) -> None:
    text = config.read_text().replace("    kind: distill\n", "")  # the template's
    config.write_text(f"extends: {above}pipelines/experts-merge.yaml\n{text}")
    shipped = Path(__file__).parents[2] / "configs" / "pipelines" / "experts-merge.yaml"
    assert errors(config) == [
        f"small.yaml:1: extends: no such file: {above}pipelines/experts-merge.yaml; a path is"
        f" relative to the file that it is in; Braid's own: {shipped}"
    ]


def test_a_long_chain_of_extends_is_an_error(config: Path) -> None:
    for number in range(200):
        below = config.with_name(f"c{number}.yaml")
        below.write_text(f"extends: c{number + 1}.yaml\n")
    config.with_name("c200.yaml").write_text("seed: 1\n")
    edited(config, "name: small", "name: small\nextends: c0.yaml")
    assert errors(config) == ["c30.yaml:1: extends: a chain of more than 32 files; extend fewer"]


def test_reports_of_one_cycle_of_extends_are_limited(config: Path) -> None:
    for number in range(4):
        entries = "".join(f"k{key}: {{extends: c{(number + 1) % 4}.yaml}}\n" for key in range(10))
        config.with_name(f"c{number}.yaml").write_text(entries)
    edited(config, "name: small", "name: small\nextends: c0.yaml")
    found = [error for error in errors(config) if "extends itself" in error]
    assert len(found) == 1000


def test_missing_files_are_reported_with_the_other_errors(config: Path) -> None:
    edited(config, "prompts: {dataset: chain_sum}", "extends: none.yaml")
    edited(config, "steps: 2", "steps: two")
    assert errors(config) == [
        "small.yaml:15: domains.sums.extends: no such file: none.yaml",
        'small.yaml:17: domains.sums.loop.steps: should be a valid integer, not "two"',
    ]
    assert errors(config.with_name("absent.yaml"), "seed=1") == [
        "absent.yaml: cannot be read: No such file or directory"
    ]


def test_a_missing_file_that_may_say_the_kind_of_a_block_is_the_only_error(config: Path) -> None:
    prompts = "extends: none.yaml\n    prompts: {path: a.jsonl}"
    edited(config, "prompts: {dataset: chain_sum}", prompts)
    missing = "small.yaml:15: domains.sums.extends: no such file: none.yaml"
    assert errors(config) == [missing]
    edited(config, "{path: a.jsonl}", "{source: jsonl, pth: a.jsonl}")
    wrong = 'small.yaml:16: domains.sums.prompts.pth: unknown key; did you mean "path"?'
    assert errors(config) == [missing, wrong]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.tokenizer", "{}"),
        ("model.initial_weights", "{}"),
        ("domains.sums.demonstrations.path", "{{source: jsonl, path: {}}}"),
        ("domains.sums.rewards.j.api_key_file", JUDGE),
    ],
)
def test_an_unreadable_path_is_an_error_of_its_key(config: Path, key: str, value: str) -> None:
    block = key.removesuffix(".path").removesuffix(".j.api_key_file")
    [error] = errors(config, f"{block}={value.format('x' * 300)}")
    assert error.startswith(f"command line: {key}: ")
    assert error.endswith("x cannot be read: File name too long")


def test_initial_weights_are_relative_to_the_file_that_names_them(
    config: Path, start: Path
) -> None:
    models = config.parent / "models"
    models.mkdir()
    start.rename(models / "start")
    (models / "tiny.yaml").write_text("initial_weights: start\n")
    edited(config, "model:\n", "model:\n  extends: models/tiny.yaml\n")
    assert load(config).model.initial_weights == models / "start"


def test_a_run_is_readable_where_it_could_not_start(config: Path) -> None:
    settings = load(config)
    model = settings.model.model_copy(update={"initial_weights": Path("/removed")})
    words = settings.domains["words"].model_copy(
        update={"rewards": {"own": PythonReward(function="elsewhere:score")}}
    )
    domains = {**settings.domains, "words": words}
    elsewhere = settings.model_copy(update={"model": model, "domains": domains})
    config.write_text(dump_resolved(elsewhere))
    assert load(config, to_start=False) == elsewhere
    assert len(errors(config)) == 2


def test_differing_keys_name_both_values(config: Path) -> None:
    changed = load(config, ["seed=3", "domains.sums.prompts.config.max_terms=3"])
    assert differing_keys(load(config), changed) == {
        "seed": (0, 3),
        "domains.sums.prompts.config": ({}, None),
        "domains.sums.prompts.config.max_terms": (None, 3),
    }


def test_a_runs_settings_are_those_of_run_yaml(config: Path, run: RunDirectory) -> None:
    settings = load(config)
    Run(run.path, settings).write_settings()
    assert read_run(run).settings == settings
    assert load(run.settings_file) == settings
    edited = run.settings_file.read_text().replace("seed: 0", "seed: 7")
    run.settings_file.write_text(edited)
    assert read_run(run).settings.seed == 7
    run.settings_file.write_text("nam: small\n")
    with pytest.raises(ConfigError, match="did you mean"):
        read_run(run)


def test_a_configuration_above_the_working_directory_has_absolute_paths(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages are compared with run.yaml: `..` in one of the two would make every one stale."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    rows = "{source: jsonl, path: rows.jsonl, answer: answer}"
    edited(config, "{dataset: spell_backward}", rows)
    edited(config, "kind: sft\n", "kind: sft\n    domains: [sums]\n")
    graded = ["domains.words.rewards={right: {kind: math}}"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    above = load(Path("..") / config.relative_to(tmp_path), graded, to_start=False)
    assert above == load(config, graded, to_start=False)
