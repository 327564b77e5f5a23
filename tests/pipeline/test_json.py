"""The `--json` option: standard output is one JSON document of the documented shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.commands import doctor
from pipeline.commands.support.registry import COMMANDS

Braid = Callable[..., tuple[int, str, str]]

RUN_KEYS = {"run", "running", "stages", "results"}
STATE_KEYS = {"state", "cause", "attempts", "step", "job"}
STAGE_KEYS = STATE_KEYS | {"name", "kind", "needs", "steps", "minutes"}
WHY_KEYS = STATE_KEYS | {
    *("stage", "checkpoint", "inputs", "after", "code", "versions", "events"),
}
COMPARE_KEYS = {
    *("run", "start", "problems", "experts", "models", "undefined", "stages", "notes"),
}
# Each command, its exit code and the keys of its document; CONFIG and PROFILE are files.
DOCUMENTS = [
    ("validate CONFIG", 0, {"valid", "stages", "domains", "warnings"}),
    ("validate CONFIG sed=1", 1, {"valid", "errors"}),
    ("plan CONFIG", 0, {*RUN_KEYS, "edit"}),
    ("plan CONFIG --memory", 0, {"stages"}),
    ("status", 0, {"runs"}),
    ("status small", 0, RUN_KEYS),
    ("why small merge", 0, WHY_KEYS),
    ("compare small", 0, COMPARE_KEYS),
    ("diff small other", 0, {"settings", "stages"}),
    ("doctor", 0, {"errors", "sections"}),
    ("resume small", 0, RUN_KEYS),
    ("run CONFIG", 0, RUN_KEYS),
    ("evaluate small --stage merge", 0, {"models", "results"}),
    ("submit CONFIG --name new --cluster PROFILE --dry-run", 0, {"run", "commands", "note"}),
    ("submit CONFIG --name new --cluster PROFILE --prepare", 0, {"run", "script"}),
]


@pytest.fixture
def two_runs(braid: Braid, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished runs `small` and `other`, on a machine without Slurm."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(doctor, "probe", dict)
    monkeypatch.setattr(doctor, "sections", lambda *_: [("packages", [])])
    assert braid("run", config)[0] == 0
    assert braid("run", config, "--name", "other", "seed=1")[0] == 0


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(("line", "exit_code", "keys"), DOCUMENTS, ids=[d[0] for d in DOCUMENTS])
def test_standard_output_is_one_json_document(
    braid: Braid, config: Path, tmp_path: Path, line: str, exit_code: int, keys: set[str]
) -> None:
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\n")
    files = {"CONFIG": config, "PROFILE": profile}
    code, out, _ = braid(*(files.get(word, word) for word in line.split()), "--json")
    found = json.loads(out)
    assert (code, found.keys()) == (exit_code, keys)
    command = line.partition(" ")[0]
    details = COMMANDS[command].details
    assert "JSON" in details
    if command == "plan" and "edit" in keys:
        assert '"edit"' in details
        assert all(each.keys() == STAGE_KEYS | {"next", "seconds_left"} for each in found["stages"])
    elif keys != RUN_KEYS:  # documented by `status` alone
        assert all(f'"{key}"' in details for key in keys)
    else:
        assert all(each.keys() == STAGE_KEYS for each in found["stages"])
        documented = COMMANDS["status"].details
        assert all(f'"{key}"' in documented for key in RUN_KEYS | STAGE_KEYS)


def test_every_command_with_json_documents_its_shape() -> None:
    for name, command in COMMANDS.items():
        names = [name for each in command.arguments for name in getattr(each, "names", ())]
        assert "--json" not in names or "JSON" in command.details, name


def test_a_dry_submission_lists_the_command_of_each_job(
    braid: Braid, config: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    profile = tmp_path / "cluster.yaml"
    profile.write_text("ranks_per_node: 2\n")
    given = ("submit", config, "--cluster", profile, "--dry-run")
    found = json.loads(braid(*given, "--json")[1])
    script = braid(*given)[1]
    assert [each["stages"] for each in found["commands"]] == [
        ["cold_start"],
        ["experts.sums", "experts.words"],
        ["merge"],
        ["evaluate"],
        ["export"],
    ]
    assert all(f"=$({each['command']})\n" in script for each in found["commands"])
    assert found["run"] == f"{runs}/small"
    assert not runs.exists()


def test_a_dry_run_lists_its_plan_and_the_command_of_each_process(
    braid: Braid, config: Path, runs: Path
) -> None:
    given = ("run", config, "--dry-run", "--only", "cold_start", "--only", "merge")
    code, out, _ = braid(*given[:3], "--json")
    found = json.loads(out)
    assert (code, found.keys()) == (0, RUN_KEYS | {"commands"})
    assert all(each.keys() == STAGE_KEYS | {"next", "seconds_left"} for each in found["stages"])
    assert list(found["commands"]["ranks"]) == [each["name"] for each in found["stages"]]
    shown = braid(*given[:3])[1]
    engines, ranks = found["commands"]["engines"], found["commands"]["ranks"].values()
    assert engines
    assert all(f"engine {number}: {line}\n" in shown for number, line in enumerate(engines))
    assert all(f"\n  {line}\n" in shown for line in ranks)
    left_out = json.loads(braid(*given[:5], "--json")[1])
    assert list(left_out["commands"]["ranks"]) == ["cold_start"]
    assert left_out["commands"]["engines"] == []
    assert not runs.exists()


def test_the_resolved_settings_are_json(braid: Braid, config: Path) -> None:
    found = json.loads(braid("validate", config, "--resolved", "--json")[1])
    assert found == yaml.safe_load(braid("validate", config, "--resolved")[1])


@pytest.mark.parametrize("other", ["--json", "--memory"])
def test_a_drawing_excludes_other_formats(braid: Braid, config: Path, other: str) -> None:
    assert braid("plan", config, "--dot", other) == (
        1,
        "",
        "braid: --dot prints the graph for Graphviz; it excludes --json and --memory\n",
    )
