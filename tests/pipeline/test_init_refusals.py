"""`braid init` of wrong options and unusual inputs: one message, and no file replaced."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from parallel.estimates.roofline.hardware import GIB, GPUS
from pipeline.commands.support.init_inputs import write_files
from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import load, load_cluster
from pipeline.estimate.capacity import MOST_RANKS
from pipeline.estimate.simulation import data_sheet
from tests.pipeline.conftest import Braid
from tests.pipeline.hugging_face_directories import rows
from tests.pipeline.test_init import given, refused, said

ON_GPUS = ("--gpus", "32", "--gpu", "h100")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("name", ["mine.yaml", "mine.cluster.yaml"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_only_a_regular_file_is_replaced(
    name: str, kind: str, braid: Braid, tmp_path: Path
) -> None:
    options, path = given(tmp_path, "qwen3-30b-a3b", ("math",)), tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere.yaml")
    before = path.lstat()
    message = f"{path} is not a regular file; choose another --output\n"
    refused(braid, tmp_path, [*options, *ON_GPUS, "--force"], message)
    assert path.lstat() == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_that_appears_while_it_thinks_is_kept(kind: str, tmp_path: Path) -> None:
    run, profile, theirs = (
        tmp_path / name for name in ("mine.yaml", "mine.cluster.yaml", "theirs")
    )
    theirs.write_text("theirs")
    profile.symlink_to(theirs) if kind == "link" else profile.write_text("theirs")
    texts = {run: "run", profile: "profile"}
    with pytest.raises(UserError, match="was created in the meantime, and nothing is written"):
        write_files(texts, force=False)
    assert (run.exists(), profile.read_text(), theirs.read_text()) == (False, "theirs", "theirs")
    write_files(texts, force=True)
    assert (run.read_text(), profile.read_text(), theirs.read_text()) == (
        "run",
        "profile",
        "theirs",
    )


def test_a_directory_that_takes_no_file(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    message = "--output: cannot write in /proc/self: No such file or directory\n"
    refused(braid, tmp_path, [*options, "--output", "/proc/self/mine.yaml"], message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--gpus", "12", "--gpu", "h100"), "--gpus 12: no multiple of the 8 GPUs of a node; "),
        (("--gpus", "8"), "name the GPU: --gpu h100"),
        (("--gpus", "8", "--gpu", "h10"), "no GPU h10 is known"),
        (("--cluster", "mine.cluster.yaml"), "this run's profile would replace it"),
        (("--budget", "5"), "--budget needs --gpus N"),
        (("--ranks", "2", *ON_GPUS), "--ranks 2: these are of a run on CPU cores; --gpus 32 has a"),
        (("--weights", "model"), "--weights model: is for a model by name; --model "),
        (("--domains", "maths=model"), 'no domain maths that reads rows; did you mean "math"?'),
        (("--domains", "math"), "write NAME=ROWS"),
        (("--domains", "math=model", "math:json=model"), "math named twice"),
        (("--model", "qwen4"), "--model qwen4: no such directory, and none of deepseek-v3, "),
        (("--output", "nowhere/mine.yaml"), "--output: no such directory: "),
        (("--name", "a name"), "--name a name: a run's name has letters, digits, "),
        (("--domains", "a.b:math=math.jsonl"), "--domains a.b:math=math.jsonl: a domain's name "),
        (("--domains", "../x:math=math.jsonl"), "must be 1 to 100 letters, digits, _ or -"),
        (("--domains", "math=~nouser/x.jsonl"), "--domains math=~nouser/x.jsonl: no such user: "),
        (("--model", "~nouser/x"), "--model ~nouser/x: no such user: ~nouser\n"),
        (("--gpus", str(MOST_RANKS + 8), "--gpu", "h100"), f"--gpus {MOST_RANKS + 8}: layouts are"),
    ],
)
def test_options_that_are_wrong(
    more: tuple[str, ...],
    message: str,
    braid: Braid,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = given(tmp_path, "tiny", ("math",))
    monkeypatch.chdir(tmp_path)
    refused(braid, tmp_path, [*options, *more], message)


def commands(found: dict[str, Any], name: str) -> list[str]:
    [line] = [each for each in found["commands"] if each.startswith(f"braid {name} ")]
    return shlex.split(line)[2:]


def test_the_printed_simulate_runs(braid: Braid, tmp_path: Path) -> None:
    """With a profile that names the GPU, and paths that a shell would split."""
    directory = tmp_path / "a directory"
    directory.mkdir()
    own = directory / "cluster.yaml"
    own.write_text("gpus_per_node: 8\ngpu_type: h100\ngpu_memory_gib: 79.2\n")
    options = given(directory, "qwen3-30b-a3b", ("math",))
    found = said(braid, *options, "--gpus", 8, "--cluster", own)
    run, profile = directory / "mine.yaml", directory / "mine.cluster.yaml"
    arguments = commands(found, "simulate")
    assert arguments == [str(run), "--cluster", str(profile)]
    code, _, err = braid("simulate", *arguments)
    assert code == 0, err


def test_a_new_profile_has_the_gpu_s_type_and_rows_are_counted(
    braid: Braid, tmp_path: Path
) -> None:
    options = given(tmp_path, "qwen3-30b-a3b", ("math",))
    with (tmp_path / "math.jsonl").open("a") as file:
        file.write('{"prompt": "question 1", "answer": "1"}\n' * 2)
    found = said(braid, *options, "--gpus", 8, "--gpu", "h100")
    profile = tmp_path / "mine.cluster.yaml"
    assert load_cluster(profile).gpu_type == "h100"
    code, _, err = braid("simulate", tmp_path / "mine.yaml", "--cluster", profile)
    assert code == 0, err
    rows = found["rows"]["math"]
    uses = ("trained", "held_out", "for_gates", "repeated", "unusable")
    assert rows["rows"] == 62 == sum(rows[each] for each in uses)
    assert rows["repeated"] == 2
    settings = load(tmp_path / "mine.yaml").domains["math"]
    used = settings.loop.steps * settings.sampling.prompts_per_step / rows["trained"]
    assert rows["passes"] == pytest.approx(used, abs=0.01)
    written = (tmp_path / "mine.yaml").read_text()
    assert f"62 rows: {rows['trained']} to train on, " in written
    assert f"2 repeated; each trained on {used:,.1f} times" in written
    [note] = [each for each in found["notes"] if "training rows" in each]
    assert f"use each of its {rows['trained']} training rows {used:,.1f} times" in note


def test_the_memory_of_a_gpu_is_the_profile_s() -> None:
    stated = ClusterSettings(gpu_type="h100", gpu_memory_gib=70)
    assert data_sheet("h100", None) == GPUS["h100"]
    assert data_sheet("h100", ClusterSettings()) == GPUS["h100"]
    assert data_sheet(None, stated) == replace(GPUS["h100"], memory_bytes=70 * GIB)


@pytest.mark.parametrize("option", ["--cluster", "--domains"])
def test_a_run_does_not_replace_what_it_is_of(option: str, braid: Braid, tmp_path: Path) -> None:
    options, own = given(tmp_path, "tiny", ("math",)), tmp_path / "mine.yaml"
    own.write_text("ranks_per_node: 1\n")
    more = [option, str(own) if option == "--cluster" else f"math={own}", "--force"]
    message = f"{option} {own}: this run's file would replace it\n"
    refused(braid, tmp_path, [*options, *more], message)
    assert own.read_text() == "ranks_per_node: 1\n"


def renamed(directory: Path, **columns: str) -> None:
    """Write rows of mathematics whose columns have other names."""
    path = rows(directory / "math.jsonl", "math")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    given = [{columns.get(key, key): value for key, value in each.items()} for each in found]
    path.write_text("".join(json.dumps(each) + "\n" for each in given))


def test_rows_with_other_columns(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    renamed(tmp_path, prompt="question", answer="solution")
    fix = (
        "math.jsonl: no row has a column 'answer'; columns: 'question', 'solution'; name the "
        "columns: --columns math.prompt=question math.answer=solution (braid init), or "
        "domains.math.prompts: {prompt: question, answer: solution}\n"
    )
    refused(braid, tmp_path, options, fix)
    with (tmp_path / "math.jsonl").open("a") as file:
        file.write("[]\n")  # one row that is wrong in another way
    some = fix.replace("no row has a column", "60 of the first 61 rows lack the column")
    refused(braid, tmp_path, options, some)
    renamed(tmp_path, prompt="question", answer="solution")
    found = said(braid, *options, "--columns", "prompt=question", "answer=solution")
    assert found["rows"]["math"]["repeated"] == 0
    prompts = load(tmp_path / "mine.yaml").domains["math"].prompts
    assert (prompts.prompt, prompts.answer) == ("question", "solution")
    code, _, err = braid("init", *options, "--columns", "question")
    assert code == 2
    assert "question is not KEY=COLUMN or DOMAIN.KEY=COLUMN; keys: prompt, answer, tools, " in err


@pytest.mark.parametrize("kept", [("config.json",), ("config.json", *TOKENIZER)])
def test_a_dry_run_needs_no_weights(kept: tuple[str, ...], braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    whole = said(braid, *options, "--dry-run")
    for path in (tmp_path / "model").iterdir():
        if path.name not in kept:
            path.unlink()
    message = "; download the weights, or convert other formats"
    refused(braid, tmp_path, options, message)
    planned = said(braid, *options, "--dry-run")
    assert planned["notes"][0].startswith("weights are not checked: ")
    scored = "tokenizer.json" in kept
    assert scored == (planned["rows"] == whole["rows"])
    assert scored != any("answers are not scored" in each for each in planned["notes"])
    assert planned["layout"] == whole["layout"]


def test_an_error_names_no_line_of_a_file_that_nobody_has(braid: Braid, tmp_path: Path) -> None:
    options = given(tmp_path, "tiny", ("math",))
    refused(
        *(braid, tmp_path, [*options, "--ranks", "1000000"]),
        "configuration error",
        "\nevaluation.problems: ",
    )
