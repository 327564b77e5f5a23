"""The documentation is current, has no dead link, and names nothing that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import docs

from pipeline.cli import command_parser
from tests.repository.test_how_to_pages import blocks
from tests.runs import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md"))
ROOTS = "configs|docs|benchmarks|pipeline|stages|parallel|tests|tools|slurm|requirements"


def test_the_reference_is_what_the_declarations_say() -> None:
    pages = docs.pages()
    stale = [path.name for path, text in pages.items() if path.read_text() != text]
    assert stale == [], "run `make docs`"
    assert sorted(docs.REFERENCE.iterdir()) == sorted(pages)


def test_the_order_of_commands_does_not_depend_on_who_imports_first() -> None:
    program = "import pipeline.commands.submit\nfrom pipeline.cli import command_parser\n"
    program += "print(command_parser().format_help(), end='')"
    found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True)
    assert found.stdout.decode() == command_parser().format_help(), found.stderr


def test_every_key_has_a_meaning() -> None:
    unexplained = [
        f"{model.__name__}.{name}"
        for _, models in docs._blocks()
        for model in models
        for name, field in model.model_fields.items()
        if name not in docs.CHOSEN_BY
        and not docs.meaning(name, model)
        and not docs._models(field.annotation)
    ]
    assert unexplained == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    built = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        # Links may lead elsewhere; nothing is fetched to show a page.
        assert not re.search(
            r"(<script[^>]*src|<link[^>]*stylesheet[^>]*href)=.?https?:", page.read_text()
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_path_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    named = re.findall(rf"(?<![\w./-])((?:{ROOTS})/[\w./-]*\w)", text)
    made = ("configs/clusters/mine.yaml", "configs/domains/geometry.yaml", "slurm/submit.sh")
    made += ("stages/STAGE", "stages/kinds/NAME", "stages/gates.NAME", "slurm/NAME.sbatch")
    made += (
        "configs/domains/NAME.yaml",
        "configs/try_geometry.yaml",
        *(f"configs/{name}.yaml" for name in ("verl-gspo", "slime-grpo", "nemo-rl-grpo")),
        "configs/test-set.yaml",
        "configs/prime-rl-shape.yaml",
        "stages/evaluate/solved",
        "stages/export/",
    )
    examples = [path for _, path, _ in blocks()]
    made += (*examples, *(path.removeprefix("tests/") for path in examples))
    missing = [
        path
        for path in dict.fromkeys(named)
        if not path.startswith(made)
        and not [*REPOSITORY.glob(f"{path}*"), *REPOSITORY.glob(f"tests/{path}*")]
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_every_link_of_the_front_pages_leads_to_a_file(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_every_command_and_option_that_is_named_exists() -> None:
    found = {
        words: command for words, command, _ in docs._all_commands(docs.command_parser(), "braid")
    }
    options = {
        words: {text for action in command._actions for text in action.option_strings}
        for words, command in found.items()
    }
    named = 0
    for page in PAGES:
        for line in re.split(r"\n|`", page.read_text()):
            if match := re.match(r"\s*braid ([a-z]+(?: (?:new|check|override))?)\b(.*)", line):
                words, rest = f"braid {match[1]}", match[2].partition("#")[0]
                if any(each.startswith(f"{words} ") for each in found) or words == "braid hello":
                    continue  # `braid domain` in a sentence
                assert words in found, f"{page.name}: {line}"
                given = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest))
                assert given <= options[words], f"{page.name}: {line}"
                named += 1
    assert named > 50
