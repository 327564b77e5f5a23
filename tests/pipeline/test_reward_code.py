"""The code of Python rewards: an input of the stages that grade with it, and of bundles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.violations import config_with_rows  # noqa: F401 - the fixture `config`

Braid = Callable[..., tuple[int, str, str]]


@pytest.fixture
def graded(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A reward of the working directory that imports a helper."""
    here = tmp_path / "here"
    (here / "helpers").mkdir(parents=True)
    (here / "helpers/__init__.py").write_text("")
    (here / "helpers/lengths.py").write_text("LONGEST = 9\n")
    (here / "unused.py").write_text("")
    own = here / "own_rewards.py"
    own.write_text(
        "from helpers import lengths\n\n\ndef short(problem, response):\n    return 1.0\n"
    )
    monkeypatch.chdir(here)
    reward = "domains.words.rewards={right: {kind: math}, own: {kind: python, function: 'own_rewards:short'}}"  # noqa: E501
    return reward, here


def test_the_code_of_a_reward_is_an_input(
    graded: tuple[str, Path], braid: Braid, config: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    reward, here = graded
    assert braid("run", config, reward, "deterministic=true")[::2] == (0, "")
    to = tmp_path / "b"
    assert braid("bundle", "small", "--to", to)[0] == 0
    [found] = [
        e for e in json.loads((to / "bundle.json").read_text())["inputs"] if e["kind"] == "code"
    ]
    assert (found["key"], found["path"]) == ("domains.words.rewards.own.path", "code/0")
    assert found["readers"] == ["experts.words", "evaluate"]
    files = {str(path.relative_to(to / "code/0")) for path in (to / "code/0").rglob("*.py")}
    assert files == {"own_rewards.py", "helpers/__init__.py", "helpers/lengths.py"}
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(here)
    code, out, err = braid("run", to, "--name", "again")
    assert (code, err) == (0, "")
    assert "the output of 5 of 6 stages equals" in out
    (to / "code/0/helpers/lengths.py").write_text("LONGEST = 8\n")
    code, _, err = braid("run", to, "--name", "third")
    assert code == 1
    assert "domains.words.rewards.own.path: b/code/0: its content differs" in err
    assert "experts.words is the first stage that reads it" in err


def test_a_changed_reward_makes_the_stages_stale_that_grade_with_it(
    graded: tuple[str, Path], braid: Braid, config: Path, runs: Path
) -> None:
    reward, here = graded
    assert braid("run", config, reward)[::2] == (0, "")
    (here / "unused.py").write_text("changed = True\n")
    assert braid("status")[1] == "small: 6 done\n"
    (here / "helpers/lengths.py").write_text("LONGEST = 8\n")
    _, out, _ = braid("status", "small", "--json")
    states = {each["name"]: each for each in json.loads(out)["stages"]}
    cause = "the files of domains.words.rewards.own.function changed"
    assert states["experts.words"]["cause"] == states["evaluate"]["cause"].split("; ")[0] == cause
    assert states["cold_start"]["state"] == states["experts.sums"]["state"] == "done"


def test_a_run_of_before_is_not_stale_for_want_of_the_digest_of_its_rewards(
    graded: tuple[str, Path], braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, graded[0])[::2] == (0, "")
    for manifest in (runs / "small/stages").glob("*/manifest.json"):
        found = json.loads(manifest.read_text())
        found["files"].pop("domains.words.rewards.own.function", None)
        found["settings"].pop("domains.words.rewards.own.path", None)
        manifest.write_text(json.dumps(found))
    assert braid("status")[1] == "small: 6 done\n"


def test_the_module_of_an_installed_package_is_named_and_not_copied(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    reward = "domains.words.rewards={own: {kind: python, function: 'operator:eq'}}"
    assert braid("run", config, reward)[::2] == (0, "")
    to = tmp_path / "b"
    assert braid("bundle", "small", "--to", to)[0] == 0
    [found] = [
        e for e in json.loads((to / "bundle.json").read_text())["inputs"] if e["kind"] == "code"
    ]
    assert (found["function"], found["copied"]) == ("operator:eq", False)
    assert not (to / "code").exists()
    index = to / "bundle.json"
    index.write_text(index.read_text().replace(found["digest"], "0" * 64))
    assert "rewards.own.path: operator:eq: its content differs" in braid("validate", to)[2]
