"""`braid init --sft`: a run that fine-tunes the checkpoint before its experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.run.graph import compile_graph
from tests.pipeline.conftest import Braid
from tests.pipeline.hugging_face_directories import TINY, published, rows

CHATS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": "2"}]}
    for n in range(40)
]
PAIRS = [{"question": f"{n} + 1?", "solution": f"{n + 1}"} for n in range(40)]
NAMED = ("demonstrations.prompt=question", "demonstrations.response=solution")


def options(directory: Path, *domains: str) -> list[object]:
    """Return the options of a tiny model and of domains with rows."""
    files = [f"{name}={rows(directory / f'{name}.jsonl', name)}" for name in domains]
    weights = published(directory / "model", TINY)
    return ["--model", weights, "--domains", *files, "--output", directory / "mine.yaml"]


def demonstrations(directory: Path, lines: list[dict[str, object]]) -> Path:
    path = directory / "demonstrations.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("domains", [("math",), ("math", "json")])
def test_experts_grow_from_the_fine_tuned_model(
    domains: tuple[str, ...], braid: Braid, tmp_path: Path
) -> None:
    sft = demonstrations(tmp_path, CHATS)
    code, _, err = braid("init", *options(tmp_path, *domains), "--sft", sft)
    assert code == 0, err
    settings = load(tmp_path / "mine.yaml", to_start=True)
    parents = {stage.name: stage.parent for stage in compile_graph(settings)}
    assert parents["cold_start"] == "initial"  # which is measured too
    assert all(parents[f"experts.{name}"] == "cold_start" for name in domains)
    assert ("merge" in parents) == (len(domains) > 1)
    assert braid("validate", tmp_path / "mine.yaml")[0] == 0


def test_its_columns_may_have_other_names(braid: Braid, tmp_path: Path) -> None:
    given = [*options(tmp_path, "math"), "--sft", demonstrations(tmp_path, PAIRS)]
    code, _, err = braid("init", *given)
    assert code == 1
    assert f"--columns {' '.join(NAMED)} (braid init)" in err
    assert not (tmp_path / "mine.yaml").exists()
    code, _, err = braid("init", *given, "--columns", *NAMED)
    assert code == 0, err


def test_a_budget_cuts_the_steps_of_every_stage(braid: Braid, tmp_path: Path) -> None:
    sft = demonstrations(tmp_path, CHATS)
    gpus = ["--sft", sft, "--gpus", 8, "--gpu", "h100", "--json"]
    code, out, err = braid("init", *options(tmp_path, "math", "json"), *gpus)
    assert code == 0, err
    whole = json.loads(out)
    budget = ["--budget", whole["gpu_hours"] / 2, "--force"]
    code, out, err = braid("init", *options(tmp_path, "math", "json"), *gpus, *budget)
    assert code == 0, err
    steps = json.loads(out)["steps"]
    assert steps.keys() == whole["steps"].keys()
    assert all(0.3 < steps[name] / whole["steps"][name] < 0.7 for name in steps)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--columns", "demonstrations.prompt=question"], "needs --sft ROWS"),
        (["--sft", "nowhere.jsonl"], "--sft nowhere.jsonl: no such file"),
    ],
)
def test_demonstrations_that_are_not_there(
    more: list[str], message: str, braid: Braid, tmp_path: Path
) -> None:
    code, _, err = braid("init", *options(tmp_path, "math"), *more)
    assert code == 1
    assert message in err
