"""The files that pages of docs/how-to tell a contributor to write, in a copy of the repository.

A block of code whose first line is `# PATH` is a new file; a block of `diff` changes the file that
its first line names. The copy then passes the tests: those of the registries in `make test`, and
all of the unit tests in `make test-all`. A new model family is not tried: every family is compared
with a model of transformers that Braid would have to have.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import REPOSITORY

PAGES = ("command", "objective", "reward", "stage-kind")
BLOCK = re.compile(
    r"^( *)```(python|diff)\n *# ((?:[\w-]+/)+[\w-]+\.(?:py|md))\n(.*?)^ *```$", re.M | re.S
)
# After them the pages name no further step but `make docs` and `make golden`.
WRITERS = (
    "tools.docs",
    "tests.pipeline.test_golden_messages",
    "tests.pipeline.test_shipped_pipelines",
)
VENDORED = ("pipeline/report/page/web/vendor", "tests/vendor", "tests/browser/vendor")
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")
# It adds the same examples to a copy of its own.
ADDS_TOO = "tests/stages/objectives/test_registry.py"
CONFIG = """\
extends: {smoke}
domains:
  chain_sum:
    objective: {{advantage: {{name: half}}, ratio: {{name: spo, width: 0.1}}}}
    rewards: {{even: {{kind: palindrome}}}}
stages:
  sharper: {{kind: sharpen, from: cold_start, factor: 3}}
"""
REGISTRIES = (
    "tests/audit/test_effects.py::test_every_setting_is_tried_or_has_a_test",
    "tests/audit/test_formulas.py",
    "tests/audit/test_unknown_formulas.py",
    "tests/pipeline/test_cli.py",
    "tests/pipeline/test_graph.py",
    "tests/pipeline/test_hello.py",
    "tests/pipeline/test_objective_settings.py",
    "tests/pipeline/test_sharpen.py",
    "tests/pipeline/test_trust.py",
    "tests/repository/test_docs.py",
    "tests/repository/test_language.py",
    "tests/repository/test_site_pages.py::test_every_command_has_a_task",
    "tests/repository/test_traits.py",
    "tests/stages/objectives",
    "tests/stages/test_palindrome.py",
    "tests/stages/test_reward_kinds.py",
)
UNITS = ("audit", "parallel", "pipeline", "repository", "stages")


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield the language, the path and the text of every block that names a file."""
    for page in PAGES:
        text = (REPOSITORY / "docs" / "how-to" / f"{page}.md").read_text()
        for indent, language, path, block in BLOCK.findall(text):
            yield language, path, textwrap.dedent(f"{block}") if indent else block


def apply(directory: Path, language: str, path: str, block: str) -> None:
    """Write a page's block into a copy, as its reader would."""
    file = directory / path
    if language == "python":
        assert not file.exists(), f"{path} exists: rename the page's example, there and here"
        file.parent.mkdir(exist_ok=True)
        if path.startswith("stages/kinds/"):
            (file.parent / "__init__.py").touch()
        file.write_text(block)
        return
    lines = block.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text()
    assert text.count(before) == 1, f"{path} has no such lines:\n{before}"
    file.write_text(text.replace(before, after))


def run(directory: Path, *command: str) -> str:
    """Run a Python program in the copy, with the copy's modules; return its output."""
    environment = os.environ | {"PYTHONPATH": str(directory)}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-6000:]
    return finished.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that has what the pages add."""
    directory = tmp_path_factory.mktemp("copy") / "braid"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, directory / name)
    for vendored in VENDORED:  # git has none of it; `make install` fetches it
        if (REPOSITORY / vendored).is_dir():
            (directory / vendored).symlink_to(REPOSITORY / vendored)
    for language, path, block in blocks():
        apply(directory, language, path, block)
    for git in (["init", "-q"], ["add", "-A"]):  # the lints read the files that git has
        subprocess.run(["git", *git], cwd=directory, check=True)
    for writer in WRITERS:
        run(directory, writer)
    return directory


def test_what_the_pages_add_is_chosen_by_a_configuration(copy: Path, tmp_path: Path) -> None:
    config = tmp_path / "added.yaml"
    config.write_text(CONFIG.format(smoke=copy / "configs" / "smoke.yaml"))
    plan = run(copy, "pipeline.cli", "plan", str(config), "--runs-dir", str(tmp_path))
    assert re.search(r"sharper\W+sharpen\W+cold_start", plan)
    assert "count the finished stages of a run" in run(copy, "pipeline.cli", "--help")


def test_what_the_pages_add_passes_the_registries_tests(copy: Path) -> None:
    run(copy, *PYTEST, f"--ignore={ADDS_TOO}", *REGISTRIES)


@pytest.mark.combinations
@pytest.mark.parametrize("unit", UNITS)
def test_what_the_pages_add_passes_every_unit_test(copy: Path, unit: str) -> None:
    ignored = (f"--ignore={path}" for path in (ADDS_TOO, Path(__file__).relative_to(REPOSITORY)))
    run(copy, *PYTEST, *ignored, f"tests/{unit}")
