"""`braid domain new` and `braid domain check`, from a starter to what a model's responses teach."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.commands import domain as domain_commands
from pipeline.config.read import ConfigError
from pipeline.config.validate import dump_differing, load, load_domain, load_with_domain
from stages.domains import DomainSettings
from stages.rewards.reward import RewardPoolSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.conftest import Braid
from tests.repository.test_architecture import HEAVY

REPOSITORY = Path(__file__).parents[2]
ROWS = [{"question": f"say {n}", "answer": f'{{"n": {n}}}'} for n in range(40)]
DOMAIN = """\
prompts: {{source: jsonl, path: rows.jsonl, prompt: question, answer: answer}}
rewards:
  shape: {reward}
demonstrations: {{source: jsonl, path: rows.jsonl, prompt: question, response: answer}}
optimizer: {{learning_rate: 1e-3}}
loop: {{steps: 2}}
"""
SHAPE = "{kind: json_schema, default_schema: {type: object, required: [%s]}}"


@pytest.fixture
def starters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of `braid domain new`, with the shipped `_base.yaml` in it."""
    directory = tmp_path / "configs" / "domains"
    directory.mkdir(parents=True)
    (directory / "_base.yaml").write_text((REPOSITORY / "configs/domains/_base.yaml").read_text())
    monkeypatch.setattr(domain_commands, "DIRECTORY", directory)
    return directory


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """A domain of JSON answers with one reward, and its rows."""

    def write(reward: str) -> Path:
        rows = "".join(json.dumps(row) + "\n" for row in ROWS)
        (tmp_path / "rows.jsonl").write_text(rows)
        path = tmp_path / "shapes.yaml"
        path.write_text(DOMAIN.format(reward=reward))
        return path

    return write


def test_a_starter_is_accepted_as_it_is_and_looked_at_without_torch(
    braid: Braid, starters: Path
) -> None:
    code, out, err = braid("domain", "new", "mine")
    path = starters / "mine.yaml"
    assert (code, err) == (0, "")
    assert out == f"wrote {path}; check it with: braid domain check {path}\n"
    program = (
        "import json, sys\n"
        "from pipeline.cli import main\n"
        f"code = main(['domain', 'check', {str(path)!r}, '--prompts', '2'])\n"
        "print(json.dumps([code, *sys.modules]))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    *lines, last = found.stdout.splitlines()
    code, *loaded = json.loads(last)
    assert (code, found.stderr) == (0, "")
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    shown = "\n".join(lines)
    assert "    dataset: chain_sum\n" in shown
    assert "prompts: reasoning-gym's chain_sum, without end; 2000 sampled\n" in shown
    assert "demonstrations: generated, 4000 in a run; 2000 checked\n" in shown
    assert "2. 'c" in shown
    assert "3. 'c" not in shown
    assert lines[-1] == f"{path} is valid, and its rewards tell right from wrong on these prompts"


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_a_starter_for_files_names_exactly_what_to_fill_in(
    braid: Braid, starters: Path, tmp_path: Path, source: str
) -> None:
    assert braid("domain", "new", "mine", "--source", source)[0] == 0
    path = starters / "mine.yaml"
    code, _, err = braid("domain", "check", path)
    lines = path.read_text().splitlines()
    places = [number for number, line in enumerate(lines, 1) if "FILL IN" in line]
    assert code == 1
    assert err == (
        "braid: 2 configuration errors:\n"
        f"{path}:{places[0]}: domains.mine.prompts.path: no such file: "
        f"{tmp_path}/data/mine.{source}\n"
        f"{path}:{places[1]}: domains.mine.demonstrations.path: no such file: "
        f"{tmp_path}/data/mine_demonstrations.{source}\n"
    )


def test_a_starter_overwrites_nothing_and_needs_a_name(braid: Braid, starters: Path) -> None:
    path = starters / "mine.yaml"
    path.write_text("my own")
    assert braid("domain", "new", "mine")[2] == (
        f"braid: {path} exists already; it was not changed\n"
    )
    assert path.read_text() == "my own"
    code, _, err = braid("domain", "new", "../mine")
    assert (code, err) == (
        1,
        "braid: '../mine' is not a domain's name: use 1 to 100 letters, digits, _ and -\n",
    )


def test_every_error_of_a_file_is_reported_at_once_as_in_a_run(tmp_path: Path) -> None:
    path = tmp_path / "sums.yaml"
    path.write_text(
        "prompts: {dataset: chain_sum, sourse: jsonl}\n"
        "rewards:\n"
        "  a: {kind: mth}\n"
        "  b: {kind: python, function: 'nowhere:f'}\n"
        "sampling: {group_size: 1, max_response_tokens: 4096}\n"
        "optimizer: {learning_rate: 1e-3, warmup_steps: 9}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_domain(path, RewardPoolSettings())
    found = [str(each).removeprefix(f"{tmp_path}/") for each in caught.value.violations]
    mistyped = 'sums.yaml:1: domains.sums.prompts.sourse: unknown key; did you mean "source"?'
    assert mistyped in found
    assert "sums.yaml:1: domains.sums.loop: required key is missing" in found
    assert any(each.startswith("sums.yaml:3: domains.sums.rewards.a.kind: sho") for each in found)


def test_rules_that_need_a_run_are_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "sums.yaml"
    text = "prompts: {dataset: chain_sum}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 2}\n"
    path.write_text(f"{text}sampling: {{max_response_tokens: 4096}}\n")
    assert load_domain(path, RewardPoolSettings()).sampling.max_response_tokens == 4096
    path.write_text(f"{text}sampling: {{group_size: 1}}\n")
    with pytest.raises(ConfigError, match="a group of one has no advantage"):
        load_domain(path, RewardPoolSettings())


def test_what_differs_from_the_defaults_says_what_each_block_is() -> None:
    stated: dict[str, Any] = {
        "prompts": {"source": "reasoning_gym", "dataset": "chain_sum"},
        "rewards": {
            "right": {"kind": "math"},
            "brief": {"kind": "overlong", "max_tokens": 9, "buffer_tokens": 3, "weight": 0.5},
        },
        "objective": {"ratio": {"name": "cispo"}, "kl": {"coefficient": 0.5}},
        "optimizer": {"learning_rate": 0.001, "betas": [0.9, 0.99]},
        "loop": {"steps": 2},
    }
    settings = DomainSettings.model_validate(
        {**stated, "sampling": {"group_size": 8}, "updates_per_rollout": 1}
    )
    assert yaml.safe_load(dump_differing(settings)) == stated


def test_a_tokenizer_that_cannot_read_the_prompts_is_one_message(
    braid: Braid, written: Callable[[str], Path]
) -> None:
    code, _, err = braid("domain", "check", written(SHAPE % "n"))
    assert code == 1
    assert re.search(r"no policy can write the reference '\{.*' of .*\.jsonl:\d+: ", err)
    assert err.endswith("name the model's tokenizer: --tokenizer DIRECTORY\n")


def test_rewards_without_reference_answers_are_untested_and_lengths_are_in_characters(
    braid: Braid, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"say {n}"}) + "\n" for n in range(40)))
    domain = tmp_path / "said.yaml"
    domain.write_text(
        "prompts: {source: jsonl, path: rows.jsonl, prompt: question, answer: null}\n"
        "rewards: {brief: {kind: overlong, max_tokens: 9, buffer_tokens: 3}}\n"
        "optimizer: {learning_rate: 1e-3}\nloop: {steps: 2}\n"
    )
    code, out, err = braid("domain", "check", domain)
    assert (code, err) == (0, "")
    assert "  characters of a prompt, by percentile: 5 (0 %)" in out
    assert "engine.max_model_tokens" not in out
    untested = "a right answer earns more than a wrong one is untested, without reference answers"
    assert out.splitlines()[-1].endswith(f"said.yaml is valid; whether {untested}: said")


def test_a_models_responses_are_shown_for_what_they_teach(
    braid: Braid, config: Path, tmp_path: Path, runs: Path
) -> None:
    assert braid("run", config)[0] == 0
    domain = tmp_path / "other.yaml"
    domain.write_text(
        "prompts:\n  dataset: number_sorting\n"
        "  config: {max_numbers: 4, max_value: 9, min_value: 0, max_decimals: 0, min_decimals: 0}\n"
        "optimizer: {learning_rate: 1e-3}\nloop: {steps: 1}\n"
    )
    asked = ("--run", "small", "--stage", "merge", "--samples", 4, "--prompts", 1)
    code, out, err = braid("domain", "check", domain, *asked)
    assert (code, err) == (0, "")
    assert [line.split()[:4] for line in out.splitlines() if "12-3" in line] == [
        ["'12-3='", "'<9>9'", earned, earned] for earned in ("1", "0", "1")
    ]
    assert "12 responses to 3 prompts\n" in out
    assert (
        "zero-variance groups, which teach nothing: 67 %\n    all right: 33 %; all wrong: 33 %\n"
        in out
    )
    assert "truncated at sampling.max_response_tokens: 58 %\n" in out
    assert "reward/exact: 0.4167 on average" in out
    [results] = runs.glob("small/previews/*/results.json")
    assert json.loads(results.read_text())["parent"].endswith("merge/checkpoints/step_2")


def test_a_domain_that_does_not_fit_a_run_is_refused(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    assert braid("run", config)[0] == 0
    domain = tmp_path / "long.yaml"
    domain.write_text(
        "prompts: {dataset: chain_sum}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 1}\n"
        "sampling: {max_response_tokens: 4096}\n"
    )
    code, _, err = braid("domain", "check", domain, "--run", "small", "--stage", "cold_start")
    assert code == 1
    assert f"{domain}:4: domains.long.sampling.max_response_tokens: 4096 leaves no room" in err


def test_a_domain_is_checked_with_a_run_whose_stages_name_its_domains(
    config: Path, tmp_path: Path
) -> None:
    text = config.read_text().replace("teachers: experts", "teachers: {sums: experts.sums}")
    text = text.replace("from: cold_start\n", "from: cold_start\n    domains: [sums]\n")
    config.write_text(text.replace("for_each: domain}", "for_each: domain, domains: [sums]}"))
    domain = tmp_path / "other.yaml"
    domain.write_text(
        "prompts: {dataset: number_sorting}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 1}\n"
        "objective: {kl: {coefficient: 0.1, reference: cold_start}}\n"
    )
    assert load(config).stages.keys() == {"cold_start", "experts", "merge", "evaluate", "export"}
    settings = load_with_domain(config, domain, samples=3)
    assert settings.domains.keys() == {"other"}
    assert settings.domains["other"].sampling.group_size == 3
    domain.write_text(domain.read_text() + "sampling: {max_response_tokens: 4096}\n")
    with pytest.raises(ConfigError, match=r"other\.sampling\.max_response_tokens: 4096 leaves"):
        load_with_domain(config, domain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "3"], "--stage and --samples need --run"),
        (["--run", "small"], "--run needs --stage, and excludes --tokenizer"),
        (["--run", "small", "--stage", "a", "--tokenizer", "b"], "--run needs --stage, and"),
        (["--run", "small", "--stage", "a"], "no run small in"),
    ],
)
def test_options_that_need_each_other(braid: Braid, arguments: list[str], message: str) -> None:
    code, _, err = braid("domain", "check", "any.yaml", *arguments)
    assert (code, message in err) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_stopped_leaves_nothing(
    written: Callable[[str], Path], tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "pipeline.cli", "domain", "check", written(SHAPE % "n")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
    ) as check:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not list(temporary.glob("*/job.json")):
            assert time.monotonic() < deadline and check.poll() is None
            time.sleep(0.01)
        check.send_signal(number)
        said = check.communicate(timeout=PATIENCE_SECONDS)[1]
    assert list(temporary.iterdir()) == []
    assert (check.returncode, said) == (128 + number, f"braid: stopped by {number.name}\n")


def test_the_domains_of_a_run_are_checked_with_its_file(
    braid: Braid, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """A domain that the run alone completes has no file of its own to name."""
    path = written(SHAPE % "n")
    run = tmp_path / "run.yaml"
    run.write_text(
        f"extends: {REPOSITORY}/configs/quickstart.yaml\n"
        f"domains: {{shapes: {{extends: {path}}}, chain_sum: null, number_sorting: null}}\n"
        "model: {max_positions: 512}\n"
    )
    code, out, err = braid("domain", "check", run, "--domain", "shapes", "--domain", "words")
    assert (code, err) == (1, f"braid: {run}: no domain words; known: spell_backward, shapes\n")
    code, out, err = braid("domain", "check", run, "--domain", "spell_backward", "--prompts", "1")
    assert (code, err) == (0, "")
    assert "\ndomain spell_backward\n" in out and "domain shapes" not in out
    assert braid("domain", "check", path, "--domain", "shapes")[2] == (
        f"braid: {path} is one domain; --domain needs a run's file\n"
    )


def test_the_runs_directory_may_follow_the_action(braid: Braid, runs: Path, tmp_path: Path) -> None:
    asked = ("any.yaml", "--run", "a", "--stage", "merge")
    elsewhere = tmp_path / "elsewhere"
    assert f"no run a in {runs};" in braid("domain", "check", *asked)[2]
    code, _, err = braid("domain", "check", *asked, "--runs-dir", elsewhere)
    assert (code, f"no run a in {elsewhere};" in err) == (1, True)


def test_an_action_is_needed(braid: Braid) -> None:
    assert braid("domain")[0] == 2
    assert braid("domain", "check", "any.yaml", "--prompts", "0")[0] == 2
