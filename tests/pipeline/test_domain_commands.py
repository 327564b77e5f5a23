"""`braid domain new` and `braid domain check`, from a starter to what a model's responses teach."""

from __future__ import annotations

import json
import os
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
from pipeline.commands.domain import binned, demonstrated, described, errors, notes, previewed
from pipeline.config.read import ConfigError
from pipeline.config.validate import dump_differing, load, load_domain, load_with_domain
from stages.domains import DomainSettings
from stages.rewards.reward import RewardPoolSettings
from tests.repository.test_architecture import HEAVY

Braid = Callable[..., tuple[int, str, str]]

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
    assert "no policy can write the reference" in err
    assert err.endswith("name the model's tokenizer: --tokenizer DIRECTORY\n")


def test_a_models_responses_are_shown_for_what_they_teach(
    braid: Braid, config: Path, tmp_path: Path, runs: Path
) -> None:
    assert braid("run", config)[0] == 0
    domain = tmp_path / "other.yaml"
    domain.write_text(
        "prompts: {dataset: number_sorting}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 1}\n"
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
        deadline = time.monotonic() + 60
        while not list(temporary.glob("*/job.json")):
            assert time.monotonic() < deadline and check.poll() is None
            time.sleep(0.01)
        check.send_signal(number)
        said = check.communicate(timeout=60)[1]
    assert list(temporary.iterdir()) == []
    assert (check.returncode, said) == (128 + number, f"braid: stopped by {number.name}\n")


def test_the_runs_directory_may_follow_the_action(braid: Braid, runs: Path, tmp_path: Path) -> None:
    asked = ("any.yaml", "--run", "a", "--stage", "merge")
    elsewhere = tmp_path / "elsewhere"
    assert f"no run a in {runs};" in braid("domain", "check", *asked)[2]
    code, _, err = braid("domain", "check", *asked, "--runs-dir", elsewhere)
    assert (code, f"no run a in {elsewhere};" in err) == (1, True)


def test_an_action_is_needed(braid: Braid) -> None:
    assert braid("domain")[0] == 2
    assert braid("domain", "check", "any.yaml", "--prompts", "0")[0] == 2


# What is said of the scores


def settings(**rewards: Any) -> DomainSettings:
    return DomainSettings.model_validate(
        {
            "prompts": {"dataset": "chain_sum"},
            "rewards": rewards,
            "optimizer": {"learning_rate": 1},
            "loop": {"steps": 1},
        }
    )


def prompt(
    failure: str | None = None, watch_failures: tuple[str, ...] = (), **scores: float
) -> dict[str, Any]:
    """Return a prompt at which the reward `right` gave these scores."""
    return {
        "prompt": "1+1=",
        "answer": "2",
        "tokens": 4,
        "responses": [
            {
                "what": what,
                "text": what,
                "parts": {"right": score},
                "reward": score,
                "failure": failure,
                "watch_failures": watch_failures,
            }
            for what, score in scores.items()
        ],
    }


RIGHT = {"right": {"kind": "math"}}


@pytest.mark.parametrize(
    ("scores", "fault"),
    [
        ({"reference": 1.0, "empty": 0.0, "garbage": 0.0}, None),
        ({"reference": 0.5, "empty": 0.0, "garbage": 0.0}, None),
        ({"reference": 0.0, "empty": 0.0, "garbage": 0.0}, "the reference scores 0, no more"),
        ({"reference": 1.0, "empty": 1.0, "garbage": 0.0}, "the reference scores 1, no more"),
        ({"empty": 1.0, "garbage": 0.0}, "the empty response scores 1 on every prompt"),
        ({"empty": 0.0, "garbage": 1.0}, "the garbage response scores 1 on every prompt"),
        ({"empty": 0.0, "garbage": 0.0}, None),
    ],
)
def test_right_must_score_above_wrong(scores: dict[str, float], fault: str | None) -> None:
    found = list(errors("sums", settings(**RIGHT), [prompt(**scores)] * 2))
    assert len(found) == (fault is not None)
    assert not found or found[0].startswith(f"domains.sums.rewards.right: {fault}")


def test_what_judges_no_answer_may_give_what_it_likes_where_the_sum_is_right() -> None:
    watched = settings(right={"kind": "math", "weight": 0}, form={"kind": "format", "pattern": "x"})
    assert not list(errors("sums", watched, [prompt(reference=1.0, empty=0.0)]))
    [fault] = errors("sums", watched, [prompt(reference=0.0, empty=0.0)] * 2)
    assert fault.startswith(
        "domains.sums.rewards: none of them judges the answer, and the reference earns 0, no more"
    )
    assert fault.endswith("named with them: exact: {kind: reasoning_gym}")


def test_one_reward_of_several_may_be_met_by_a_wrong_response() -> None:
    auxiliary = prompt(reference=1.0, empty=1.0)
    for response, reward in zip(auxiliary["responses"], (1.2, 0.2), strict=True):
        response["reward"] = reward
    assert not list(errors("sums", settings(**RIGHT), [auxiliary]))
    [note] = notes("sums", settings(**RIGHT), [auxiliary])
    assert note.startswith("domains.sums.rewards.right: by itself it does not tell right from wro")


def test_a_reward_that_fails_is_an_error() -> None:
    failed = prompt(failure="domains.sums.rewards.right: raised KeyError('x')", empty=0.0)
    [found] = errors("sums", settings(**RIGHT), [failed, failed])
    assert found.startswith("a reward failed on 2 responses, which then have none; domains.sums.re")


def test_a_reward_that_only_watches_and_fails_is_noted() -> None:
    found = [prompt(watch_failures=("it hung",), reference=1.0, empty=0.0)]
    assert not list(errors("sums", settings(**RIGHT), found))
    assert list(notes("sums", settings(**RIGHT), found)) == [
        "rewards of weight 0 failed on 2 responses, which keep the others' rewards; the first: it "
        "hung"
    ]


def test_what_was_not_tried_is_noted() -> None:
    whole = {"reference": 1.0, "empty": 0.0}
    assert list(notes("sums", settings(**RIGHT), [prompt(**whole)])) == []
    [partly] = notes("sums", settings(**RIGHT), [prompt(reference=0.5, empty=0.0)])
    assert "the reference scores 0.5 on 1 of 1 prompts, and evaluation counts only 1" in partly
    [untried] = notes("sums", settings(**RIGHT), [prompt(empty=0.0)])
    assert untried.startswith("there are no reference answers")
    form = settings(form={"kind": "format", "pattern": "x"})
    assert next(iter(notes("sums", form, [prompt(**whole)]))).startswith("no reward judges")


def test_counts_are_reported() -> None:
    lengths = {
        "rows": 100,
        "bad": 0,
        "duplicates": 4,
        "prompts": 96,
        "held_out": 19,
        "for_gates": 5,
        "too_long": 0,
        "tokens": {"0": 5, "100": 12},
    }
    assert list(described(settings(**RIGHT), lengths)) == [
        "prompts: reasoning-gym's chain_sum, without end; 100 sampled",
        "  4 repeated, 0 unusable: 72 to train on, 19 held out, 5 for gates; 0 of all are too long",
        "  tokens of a prompt, by percentile: 5 (0 %), 12 (100 %)",
        "  the longest prompt and sampling.max_response_tokens = 24 are 36 tokens; "
        "engine.max_model_tokens must allow them",
    ]


def test_the_demonstrations_are_described() -> None:
    report = {
        "rows": 2000,
        "bad": 0,
        "duplicates": 3,
        "held_out": 4,
        "usable": 1993,
        "limit": 40,
        "too_long": 5,
        "tokens": {"0": 5, "100": 41},
        "learned": 0.375,
        "examples": [("1+1=", "<2>2")],
    }
    assert list(demonstrated(settings(**RIGHT), report)) == [
        "demonstrations: generated, 4000 in a run; 2000 checked",
        "  3 repeated, 0 unusable: 1993 to learn from, 4 whose prompts are held out",
        "  5 of these are too long: more than 40 tokens",
        "  tokens of a demonstration, by percentile: 5 (0 %), 41 (100 %)",
        "  38 % of tokens are trained on: the assistant's",
        "  '1+1=' is answered '<2>2'",
    ]
    lines = list(demonstrated(settings(**RIGHT), {**report, "limit": None}))
    assert lines[2].endswith("are too long: count them with --run")
    assert list(demonstrated(settings(**RIGHT), None)) == [
        "demonstrations: none; a run with a cold start needs them from files"
    ]


def test_a_distribution_counts_every_value_once() -> None:
    assert binned([1.0, 0.0, 1.0]) == {"0": 1, "1": 2}
    many = [n / 100 for n in range(101)]
    counts = binned(many)
    assert next(iter(counts)) == "0 to 0.1"
    assert list(counts)[-1] == "0.9 to 1"
    assert sum(counts.values()) == len(many)
    assert set(counts.values()) <= {9, 10, 11}  # edges are rounded


def test_a_sample_without_a_reward_is_in_no_distribution() -> None:
    lost = {"prompt": "1+1=", "response": "2", "reward": None, "parts": {}}
    lost |= {"solved": False, "finished": True, "tokens": 1}
    found = {"groups": [[lost]], "failures": ["it hung"], "watch_failures": ["it raised"]}
    assert list(previewed(found))[-2:] == [
        "  without a reward: 100 %; the first: it hung",
        "  a reward of weight 0 failed 1 times; the first: it raised",
    ]


def test_rows_that_a_reward_cannot_use_are_counted_and_three_are_named(
    braid: Braid, tmp_path: Path
) -> None:
    """Only a library knows what a schema is, and `braid validate` loads none."""
    schemas = [{}, *[{"type": "objekt"}] * 6, {}]
    rows = [{"prompt": f"say {n}", "schema": each} for n, each in enumerate(schemas)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "prompts: {source: jsonl, path: rows.jsonl, held_out_fraction: 0.001}\n"
        "rewards: {v: {kind: json_schema}}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 2}\n"
    )
    code, out, _ = braid("domain", "check", path)
    said = " ".join(out.split())
    assert code == 1
    assert "domains.shapes.prompts: rewards cannot use 6 of 8 rows: " in said
    for line in (2, 3, 4):
        assert (
            f"{tmp_path / 'rows.jsonl'}:{line}: reward v: not a JSON schema: 'objekt' is " in said
        )
    assert f"{tmp_path / 'rows.jsonl'}:5: " not in said
    assert "; and 3 more; fix the rows, or remove them" in said


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
