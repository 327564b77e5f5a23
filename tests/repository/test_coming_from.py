"""The pages for users of other stacks: their recipes are valid, and give what the pages print.

A page's YAML is written where it says, in a copy of configs/; its Python converts a few rows of the
other project's form; then the page's commands are run and their output compared with the page's.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from pipeline import cli
from tests.pipeline.hugging_face_directories import published
from tests.runs import REPOSITORY

PAGES = REPOSITORY / "docs" / "coming-from"
CONVERTED = sorted(page.stem for page in PAGES.glob("*.md") if "```yaml" in page.read_text())
ROWS = 2000
# Of keys that the reference lists below a name that the user chooses.
WORDS = {"NAME", "SOURCE", "FILE"}


def blocks(page: str, language: str) -> list[str]:
    """Return a page's blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.S)


def write_rows() -> None:
    """Write rows as other projects have them, in the working directory."""
    problems = [f"What is {index} + 4?" for index in range(ROWS)]
    answers = [str(index + 4) for index in range(ROWS)]
    nested = [{"ground_truth": answer, "style": "rule"} for answer in answers]
    prompts = [[{"role": "user", "content": problem}] for problem in problems]
    table = arrow.table({"prompt": prompts, "reward_model": nested, "data_source": answers})
    parquet.write_table(table, "train.parquet")
    solved = zip(problems, answers, strict=True)
    lines = [json.dumps({"problem": each, "expected_answer": answer}) for each, answer in solved]
    Path("train_1M.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("page", CONVERTED)
def test_a_converted_recipe_is_valid_and_gives_what_the_page_prints(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "configs", "configs")
    [text] = blocks(page, "yaml")
    path = Path(text.split()[1])
    [commands] = [block for block in blocks(page, "bash") if str(path) in block]
    valid, simulated = blocks(page, "text")

    # Nothing of the run needs to exist for a simulation.
    path.write_text(text)
    validate, simulate = (line.split()[1:] for line in commands.splitlines())
    assert cli.main(simulate) == 0
    assert simulated in capsys.readouterr().out

    # Its model and rows, as small as the checks of a start allow.
    write_rows()
    [model] = set(re.findall(r"/models/\S+", text))
    [rows] = re.findall(r"/data/[\w./-]+", text)
    path.write_text(text.replace(model, str(tmp_path / "model")).replace("/data/", f"{tmp_path}/"))
    file = tmp_path / rows.removeprefix("/data/")
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        label = re.findall(r"answer: (\w+)", text)[0]
        contents = [{"prompt": f"What is {index}?", label: "7"} for index in range(ROWS)]
        file.write_text("\n".join(json.dumps(row) for row in contents))
    published(tmp_path / "model", re.findall(r"extends: models/(\S+)\.yaml", text)[0])
    assert cli.main(validate) == 0, capsys.readouterr()
    assert capsys.readouterr().out == valid


@pytest.mark.parametrize("page", sorted(page.stem for page in PAGES.glob("*.md")))
def test_every_key_of_braid_that_a_table_names_exists(page: str) -> None:
    reference = "".join(each.read_text() for each in (REPOSITORY / "docs/reference").glob("*.md"))
    names = set(re.findall(r"^\| `(\w+)` \|", reference, re.M))
    names |= set(re.findall(r"^#+ `(?:\w+\.)*(\w+)", reference, re.M))
    names |= set(re.findall(r"^#+ `\w+: \{(\w+):", reference, re.M))
    unknown = []
    for row in re.findall(r"^\|(.*)\|$", (PAGES / f"{page}.md").read_text(), re.M):
        cells = re.split(r"(?<!\\)\|", row)
        for key in re.findall(r"`([a-z_]+(?:\.\w+)+)", cells[1]):
            unknown += [f"{key}: {word}" for word in key.split(".") if word not in names | WORDS]
    assert unknown == []
