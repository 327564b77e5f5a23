"""The pages that a new user meets first: complete, in short sentences, with true numbers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tools import docs

from pipeline import cli
from pipeline.config.validate import load
from pipeline.run.graph import compile_graph
from tests.repository.test_coming_from import ROWS
from tests.runs import REPOSITORY
from tests.tiers import tiered

PAGES = REPOSITORY / "docs"
NAVIGATION = re.findall(r"(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
FIRST = ("index", "install", "tutorial", "how-to/start-a-run", "troubleshooting", "faq")
WORDS = 20  # of a sentence
# What troubleshooting.md says that a command prints.
PRINTED = (
    "(out of memory?)",
    "engines and rewards",
    "gave no sign of life for",
    "log-probabilities differ from the trainer's",
    "more memory than a GPU has",
    "no stage is running",
    "where a step's seconds go",
)
SIZES = re.findall(
    r"^\| `([\w.-]+)` \| (\d+) \| `({.*?})`(?: and `(.*?)`)? \| `({.*?})`"
    r" \| ([\d,]+) \| (\d+) \| ([\d,]+) \|$",
    (PAGES / "how-to" / "size-a-run.md").read_text(),
    re.M,
)


def sentences(page: str) -> list[str]:
    """Return a page's sentences without code, tables, headings and the addresses of links."""
    text = re.sub(r"^ *```.*?^ *```$", "\n", (PAGES / f"{page}.md").read_text(), flags=re.M | re.S)
    text = re.sub(r"^(\|.*|#.*|!\[.*|\[!\[.*)$", "", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    parts = re.split(r"[.?!](?=[\s*)])|·|\n\s*(?:\n|[-*] |\d+\. )", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def test_the_home_page_names_every_page() -> None:
    home = (PAGES / "index.md").read_text()
    assert [page for page in NAVIGATION if page != "index.md" and f"({page})" not in home] == []
    assert len(NAVIGATION) == len(set(NAVIGATION)) > 50


@pytest.mark.parametrize("page", FIRST)
def test_a_beginners_page_has_short_sentences(page: str) -> None:
    assert [each for each in sentences(page) if len(each.split()) > WORDS] == []


def test_what_troubleshooting_says_is_printed() -> None:
    text = " ".join((PAGES / "troubleshooting.md").read_text().split())
    source = "".join(
        path.read_text()
        for floor in ("pipeline", "stages", "parallel")
        for path in (REPOSITORY / floor).rglob("*.py")
    )
    assert [each for each in PRINTED if each not in text or each not in source] == []


def test_every_command_has_a_task() -> None:
    text = (PAGES / "how-to" / "commands.md").read_text()
    commands = [words for words, _, _ in docs._all_commands(docs.command_parser(), "braid")]
    groups = {words for words in commands for each in commands if each.startswith(f"{words} ")}
    assert [words for words in commands if words not in groups and f"`{words}" not in text] == []


def test_the_run_of_a_test_set_is_one(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    [text] = re.findall(r"```yaml\n(.*?)```", (PAGES / "faq.md").read_text(), re.S)
    path = tmp_path / text.split()[1]
    path.write_text(text)
    [stage] = compile_graph(load(path, to_start=False))  # neither model nor rows are here
    assert stage.kind == "evaluate"


@pytest.mark.parametrize(
    ("model", "gpus", "layout", "offload", "engine", "step", "hours", "cost"),
    tiered(SIZES, SIZES[1:2]),
)
def test_a_size_is_what_init_finds(
    model: str,
    gpus: str,
    layout: str,
    offload: str,
    engine: str,
    step: str,
    hours: str,
    cost: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "math.jsonl"
    problems = ({"prompt": f"What is {index}?", "answer": "7"} for index in range(8 * ROWS))
    rows.write_text("\n".join(map(json.dumps, problems)))
    command = ["init", "--model", model, "--weights", "/models/none", "--domains", f"math={rows}"]
    command += ["--gpus", gpus, "--gpu", "h100", "--output", str(tmp_path / "mine.yaml")]
    assert cli.main([*command, "--dry-run", "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"layout: {layout}\n" in out and f"engine: {engine}\n" in out
    assert ("cpu_offload" in out) == bool(offload) and offload in out
    assert f"\n{cost} GPU hours of training" in out
    [line] = re.findall(r"^experts\.math .*$", out, re.M)
    # ... seconds of a step, tokens/s/GPU, bubble, "98 h 16 min", GPUs, GPU hours
    seconds, _, _, whole, _, minutes, _, _, _ = line.replace(",", "").split()[-9:]
    assert f"{float(seconds):,.0f}" == step
    assert f"{int(whole) + int(minutes) / 60:.0f}" == hours
