"""`braid status` reads the stages as they were compiled, and only while they would be so again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.report.columns import Cell, table
from pipeline.run import compiled, resolved
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from stages.settings import RunSettings

REPOSITORY = Path(__file__).parents[2]
MIXED = "mixed={optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"


def test_what_is_read_is_what_would_be_compiled(run: RunDirectory, config: Path) -> None:
    settings = load(config, ["rounds=2", MIXED])
    resolved.write(run, settings)
    found = compiled.read(run)
    assert found is not None
    assert found.stages == compile_graph(settings)
    assert found.layout == settings.layout.model_dump()
    assert found == resolved.compile_anew(run)


def test_an_edited_run_yaml_is_compiled_anew(run: RunDirectory, settings: RunSettings) -> None:
    resolved.write(run, settings)
    run.settings.write_text(run.settings.read_text().replace("seed: 0", "seed: 7"))
    assert compiled.read(run) is None
    assert resolved.compile_anew(run).stages[0].reads["seed"] == 7


def test_other_code_compiles_anew(
    run: RunDirectory, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved.write(run, settings)
    monkeypatch.setattr(compiled, "_code", lambda: b"another version")
    assert compiled.read(run) is None


@pytest.mark.parametrize("name", [".stages.json", ".run.json"])
def test_no_flipped_bit_is_believed(run: RunDirectory, settings: RunSettings, name: str) -> None:
    resolved.write(run, settings)
    path = run.path / name
    whole = path.read_bytes()
    for position in range(0, len(whole) - 1, 97):
        path.write_bytes(flipped(whole, position))
        assert compiled.read(run) in (None, resolved.compile_anew(run)), position
        assert resolved.read(run) == settings, position


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]


def test_every_settings_module_counts_as_what_compiles() -> None:
    program = "import sys, stages.settings, pipeline.run.graph\nprint(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    modules = {name for name in found.stdout.split() if name.startswith(("parallel.", "stages."))}
    paths = {REPOSITORY / f"{name.replace('.', '/')}.py" for name in modules}
    assert {path for path in paths if path.exists()} <= set(compiled.sources())


def test_the_status_of_a_run_builds_no_settings(run: RunDirectory, settings: RunSettings) -> None:
    resolved.write(run, settings)
    arguments = ["status", "small", "--runs-dir", str(run.path.parent)]
    program = (
        "import json, sys\n"
        "from pipeline.cli import main\n"
        f"assert main({arguments!r}) == 0\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(found.stdout.splitlines()[-1])}
    assert not loaded & {"pydantic", "rich", "yaml", "torch"}


def test_columns_are_aligned_and_coloured_on_a_terminal_only() -> None:
    rows = [("merge", Cell("done", "green"), "fin\nish\x1b[2Jed"), ("a", Cell("stale"), "")]
    plain = "title\nstage  state  note\nmerge  done   fin\\nish\\x1b[2Jed\na      stale"
    assert table("title", ("stage", "state", "note"), rows, coloured=False) == plain
    coloured = table("title", ("stage", "state", "note"), rows, coloured=True)
    assert "merge  \x1b[32mdone\x1b[0m   fin\\nish" in coloured
