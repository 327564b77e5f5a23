"""The command answers without the packages that take seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipeline.config.validate import dump_resolved
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.lineage import write_manifest
from pipeline.run.run import Run
from stages.settings import RunSettings
from tests.repository.test_architecture import HEAVY
from tests.runs import REPOSITORY


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "configs/quickstart.yaml"],
        ["validate", "configs/quickstart.yaml"],
        ["plan", "configs/quickstart.yaml", "--memory"],
        ["status"],
        ["status", "small"],
        ["compare", "small"],
        ["run", "--help"],
    ],
)
def test_the_command_answers_without_torch(
    arguments: list[str], run: RunDirectory, settings: RunSettings
) -> None:
    run.path.mkdir(parents=True)
    run.settings_file.write_text(dump_resolved(settings))
    for stage in compile_graph(settings):
        write_manifest(run.stage(stage.name), Run(run.path, settings).lineage(stage))
        run.ledger.append(stage.name, "done", "finished", 1)
    program = (
        "import json, sys\n"
        "from pipeline.cli import main\n"
        "try:\n"
        f"    main({[*arguments, '--runs-dir', str(run.path.parent)]!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(found.stdout.splitlines()[-1])}
    assert "pipeline" in loaded
    assert not loaded & HEAVY


def test_outside_of_its_environment_the_command_says_so() -> None:
    found = subprocess.run(
        [sys.executable, "-S", "-m", "pipeline.cli", "plan", "configs/quickstart.yaml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, "")
    [line] = found.stderr.splitlines()
    assert line.startswith(f"braid: {sys.executable} has no package ")
    assert line.endswith("with: source .venv/bin/activate")
