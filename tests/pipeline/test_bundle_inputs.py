"""The inputs of a bundle beside a run's own data: other stages' data, and models from outside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.files import sha256
from tests.pipeline.violations import (
    config_with_rows,  # noqa: F401 - the fixture `config`
    edited,
    edited_copy,
)

Braid = Callable[..., tuple[int, str, str]]
RIGHT = ("domains.words.rewards={right: {kind: math}}",)


def with_tuned(config: Path, source: str) -> Path:
    """Add a stage of supervised fine-tuning on a source."""
    block = f"""\
  tuned:
    kind: sft
    from: merge
    data: {{own: {source}}}
    sequences_per_step: 4
    optimizer: {{learning_rate: 1e-3}}
    loop: {{steps: 2}}
  evaluate:"""
    return edited_copy(config, ("  evaluate:", block))


def test_data_files_of_a_stage_are_copied(
    braid: Braid, config: Path, rows: Path, tmp_path: Path
) -> None:
    tuned = with_tuned(config, f"{{source: jsonl, path: {rows}, prompt: prompt, response: answer}}")
    assert braid("run", tuned, *RIGHT)[::2] == (0, "")
    assert braid("bundle", "small", "--to", tmp_path / "b")[0] == 0
    found = json.loads((tmp_path / "b/bundle.json").read_text())["inputs"]
    [own] = [each for each in found if each["key"] == "stages.tuned.data.own.path"]
    assert (own["copied"], own["readers"]) == (True, ["tuned"])
    rows.unlink()
    assert braid("run", tmp_path / "b", "--name", "again")[::2] == (0, "")


@pytest.mark.parametrize("weights", ["reference", "copy"])
def test_teachers_references_and_evaluated_models_are_inputs(
    weights: str, braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    assert braid("run", config, *RIGHT, "--name", "first")[0] == 0
    first = runs / "first/stages"
    teachers = f"stages.merge.teachers={{sums: {first}/experts.sums, words: experts.words}}"
    kl = f"domains.words.objective.kl={{reference: {first}/merge, coefficient: 0.1}}"
    models = f"stages.evaluate.models=[merge, {first}/cold_start]"
    given = (*RIGHT, teachers, kl, models, "deterministic=true")
    assert braid("run", config, *given)[0] == 0  # it warns: nothing reads experts.sums
    to = tmp_path / "b"
    assert braid("bundle", "small", "--to", to, "--weights", weights)[0] == 0
    found = [
        e for e in json.loads((to / "bundle.json").read_text())["inputs"] if "model" in e["kind"]
    ]
    assert [(e["key"], e["readers"]) for e in found] == [
        ("stages.merge.teachers.sums", ["merge"]),
        ("stages.evaluate.models.1", ["evaluate"]),
        ("domains.words.objective.kl.reference", ["experts.words"]),
    ]
    if weights == "copy":
        shutil.rmtree(first)
    code, out, err = braid("run", to, "--name", "again")
    assert code == 0 and "no stage reads the checkpoints of experts.sums" in err
    assert "the output of 5 of 6 stages equals the bundle's" in out  # results too, elsewhere


@pytest.mark.parametrize("weights", ["reference", "copy"])
def test_weighted_teachers_and_models_with_dots_in_their_names_are_checked(
    weights: str, braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    assert braid("run", config, *RIGHT, "--name", "first")[0] == 0
    first = runs / "first/stages"
    sums = f"{first}/experts.sums"
    given = (
        *RIGHT,
        f"stages.merge.teachers={{sums: {{{sums}: 0.5, experts: 0.5}}, words: experts}}",
    )
    merged = f"{{kind: merge_weights, models: {{s.1: {first}/merge, w: experts.words}}}}"
    edited(config, "  evaluate:", f"  soup: {merged}\n  evaluate:")
    assert braid("run", config, *given)[::2] == (0, "")
    to = tmp_path / "b"
    assert braid("bundle", "small", "--to", to, "--weights", weights)[0] == 0
    assert braid("plan", to, "--name", "again")[0] == 0
    roots = (
        [to / "weights/0", to / "weights/1"] if weights == "copy" else [Path(sums), first / "merge"]
    )
    keys = ("stages.merge.teachers.sums", "stages.soup.models.s.1")
    for root, key in zip(roots, keys, strict=True):
        file = root / "checkpoints/step_2/checksums.json"
        before = file.read_text()
        file.write_text('{"digest": "other", "files": {}}')
        code, _, err = braid("plan", to, "--name", "again")
        assert code == 1 and f"{key}: {root}: its content differs; restore it" in err
        file.write_text(before)
    moved = shutil.copytree(roots[0], tmp_path / "moved")
    stated = "weights/0" if weights == "copy" else sums  # as config.yaml names it
    elsewhere = f"stages.merge.teachers.sums={{{stated}: null, {moved}: 0.5}}"
    assert braid("plan", to, elsewhere, "--name", "again")[0] == 0
    shutil.rmtree(roots[0])
    missing = f"{keys[0]}: {roots[0]}: missing; restore it, or name its copy in {keys[0]}"
    assert missing in braid("plan", to, "--name", "again")[2]


def test_collected_responses_of_another_run_are_copied(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "collected.parquet").write_bytes(b"rows")
    (other / "collection.json").write_text(
        json.dumps({"digest": sha256(other / "collected.parquet")})
    )
    assert braid("run", with_tuned(config, f"{{stage: {other}}}"), *RIGHT)[::2] == (0, "")
    assert braid("bundle", "small", "--to", tmp_path / "b", "--weights", "copy")[0] == 0
    shutil.rmtree(other)
    assert braid("validate", tmp_path / "b")[0] == 0
    [copy] = (tmp_path / "b").rglob("collected.parquet")
    copy.write_bytes(b"sowr")
    err = braid("validate", tmp_path / "b")[2]
    assert "stages.tuned.data.own.stage: " in err
    assert "its content differs; restore it; tuned is the first stage that reads it" in err


def test_damaged_responses_are_neither_bundled_nor_compared(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    block = "  collect: {kind: sample, from: merge, prompts: 9, keep: {reward: 1}}\n  evaluate:"
    sampled = edited_copy(config, ("  evaluate:", block))
    given = (*RIGHT, "deterministic=true")
    assert braid("run", sampled, *given)[0] == 0  # it warns: nothing reads the responses
    assert braid("bundle", "small", "--to", tmp_path / "b")[0] == 0
    assert braid("bundle", "--check", "small", tmp_path / "b")[0] == 0
    rows = runs / "small/stages/collect/collected.parquet"
    rows.write_bytes(rows.read_bytes().replace(b"rows", b"rowz"))
    for command in (["--check", "small", tmp_path / "b"], ["small", "--to", tmp_path / "c"]):
        code, _, err = braid("bundle", *command)
        assert code == 1
        assert "collected.parquet: damaged: its SHA-256 differs from the one in collection" in err
        assert err.endswith("or rerun the stage collect\n")
    assert not (tmp_path / "c").exists()
    rows.unlink()
    err = braid("bundle", "--check", "small", tmp_path / "b")[2]
    assert "collected.parquet: no collected responses; rerun the stage collect" in err


def test_missing_demonstrations_that_no_stage_reads_are_left_out(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    gone = "domains.words.demonstrations={source: jsonl, path: /nowhere.jsonl}"
    assert braid("run", config, *RIGHT, gone)[::2] == (0, "")
    assert braid("bundle", "small", "--to", tmp_path / "b")[0] == 0
    assert braid("validate", tmp_path / "b")[0] == 0
