"""`braid audit` agrees with a real run of every stage kind, without default settings."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from stages.audit import recorded
from stages.audit.evaluation import evaluation_rows
from stages.audit.recorded import NotAuditable, read_run
from stages.audit.rows import change
from stages.audit.stage_audit import audit_step
from stages.sampling.sample_files import read_samples, write_samples
from tests.audit.effects import STEPS, block_key, block_of
from tests.awaiting import PATIENCE_SECONDS
from tests.runs import REPOSITORY, braid
from tests.warm_runs import command

SAMPLES = Path("stages", "experts.chain_sum", "rollouts", "step_000003.parquet")
# Metrics that some expert's step must log, and the bounds of their values.
METRIC_BOUNDS = {
    "clip_fraction": (0.01, 0.99),
    "masked_sequences": (0.01, 0.99),
    "correction": (0.01, 0.95),
    "drift_mean": (0.01, math.inf),
    "kl": (0.01, math.inf),
    "full_entropy": (0.01, math.inf),
    "length_exponent": (-math.inf, -0.01),
}


@pytest.fixture(scope="module")
def audited(odd: Path) -> dict[str, dict[str, Any]]:
    """Return the result of `braid audit` of every stage."""
    # In this process, whose torch has one thread: with two the same audit takes five times the CPU.
    code, printed, progress = command(odd.parent, "audit", "odd", "--json")
    assert code == 0, progress
    return {audit["stage"]: audit for audit in json.loads(printed)}


def test_every_stage_agrees_with_its_files(audited: dict[str, dict[str, Any]]) -> None:
    assert audited.keys() == {*STEPS, "collect", "evaluate"}
    for stage, audit in audited.items():
        assert audit["refused"] is None, audit
        assert audit["step"] == STEPS.get(stage)
        assert audit["notes"] == []
        differing = [row for row in audit["rows"] if not row["agrees"]]
        assert not differing
    names = {row["quantity"] for row in audited["experts.chain_sum"]["rows"]}
    assert {"loss", "advantages", "kl", "gradient_norm", "weights", "exp_avg"} <= names
    answers = {row["quantity"] for row in audited["evaluate"]["rows"]}
    assert {f"{stage} on chain_sum: log p" for stage in STEPS} <= answers


def test_audited_quantities_are_not_zero(odd: Path, audited: dict[str, dict[str, Any]]) -> None:
    rows = {
        (row["quantity"], stage): row["run"]
        for stage, audit in audited.items()
        for row in audit["rows"]
    }
    for quantity, (low, high) in METRIC_BOUNDS.items():
        values = [value for (name, _), value in rows.items() if name == quantity]
        assert any(low < value < high for value in values), (quantity, values)
    settings = read_run(odd).settings
    for stage in STEPS:  # gradients are clipped in all of them
        clip = block_of(settings, block_key(stage))["optimizer"]["clip_norm"]
        assert rows["gradient_norm", stage] > clip, stage


def test_a_tampered_file_differs(copied: Path, tmp_path: Path) -> None:
    samples = read_samples(copied / SAMPLES)
    samples[0]["reward_parts"]["brief"] += 0.25
    write_samples(copied / SAMPLES, samples)
    process = braid(tmp_path, "audit", "odd", "experts.chain_sum")
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "braid: the audit differs from the run: experts.chain_sum: " in printed
    assert "DIFFERS by more than 1e-05" in printed


@pytest.mark.parametrize("updates", [{0}, {1}, {0, 1}])
def test_a_step_without_learned_tokens_is_audited(copied: Path, updates: set[int]) -> None:
    """Updates of truncated responses only are compared, and differ from the metrics."""
    samples = read_samples(copied / SAMPLES)
    for sample in samples:
        if sample["update"] in updates:
            sample.update(finish_reason="length", learned=[])
    write_samples(copied / SAMPLES, samples)
    rows = {row.quantity: row for row in audit_step(read_run(copied), "experts.chain_sum", 3).rows}
    assert rows["learned tokens"].agrees
    assert not rows["loss"].agrees
    assert ("ratio" in rows) == (updates != {0, 1})
    assert all(math.isfinite(row.audit) for row in rows.values())


DAMAGE = {
    "experts.chain_sum/rollouts/step_000003.parquet": ("", "{}", "PAR1", "PAR1\xffPAR1"),
    "experts.chain_sum/metrics.jsonl": ("[]\n", "\xff" * 9999),
    "experts.chain_sum/checkpoints/step_2/state.json": ("[]",),
    "experts.chain_sum/manifest.json": ("[]", '{"parents": [1]}', '{"parents": null}', "null"),
    "evaluate/models/cold_start.json": ("[]", '{"chain_sum": null}'),
}


@pytest.mark.parametrize("file", DAMAGE)
def test_a_damaged_file_is_named(copied: Path, file: str) -> None:
    run, path = read_run(copied), copied / "stages" / file
    stage = file.partition("/")[0]
    for content in DAMAGE[file]:
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(NotAuditable) as caught:
            if stage == "evaluate":
                evaluation_rows(run, stage)
            else:
                audit_step(run, stage, 3)
        assert path.name in str(caught.value), content
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("field", ["reward", "prompt_tokens", "logprobs", "advantage", "learned"])
def test_a_sample_with_a_field_of_another_type_is_named(
    odd: Path, tmp_path: Path, field: str
) -> None:
    path = tmp_path / SAMPLES.name
    whole = parquet.read_table(odd / SAMPLES)
    place = whole.column_names.index(field)
    for value in ("x", {"x": 1}, [None], [[]], math.nan):
        column = pyarrow.array([value] * whole.num_rows)
        parquet.write_table(whole.set_column(place, field, column), path)
        with pytest.raises(NotAuditable, match=re.escape(path.name)):
            recorded.samples(path)


def test_a_pipe_in_place_of_a_file_does_not_block(odd: Path, tmp_path: Path) -> None:
    path = shutil.copy(odd / SAMPLES, tmp_path / SAMPLES.name)
    os.mkfifo(path.with_suffix(".npz"))
    with pytest.raises(OSError, match="not a regular file"):
        recorded.samples(path)


def test_a_tiny_step_is_compared_beyond_the_rounding_of_fp32() -> None:
    before = {"weight": torch.full((1000,), 0.5, dtype=torch.float64)}
    moved = {"weight": before["weight"] + 1e-6}
    rounded = {"weight": moved["weight"].float().double()}
    assert change("weights", before, rounded, moved, 1e-5).agrees
    assert not change("weights", before, moved, {"weight": before["weight"] + 2e-6}, 1e-5).agrees
    assert not change("weights", before, before, moved, 1e-5).agrees


def test_a_refusal_names_the_missing_setting(copied: Path) -> None:
    run = read_run(copied)
    with pytest.raises(NotAuditable, match=r"no checkpoint of step 1, .*checkpoint_every=1"):
        audit_step(run, "cold_start", 2)
    samples = copied / SAMPLES
    arrays = samples.with_suffix(".npz")
    whole = arrays.read_bytes()
    arrays.write_bytes(whole[:100])
    with pytest.raises(NotAuditable, match=r"step_000003\.npz is damaged: BadZipFile"):
        audit_step(run, "experts.chain_sum", 3)
    arrays.unlink()
    with pytest.raises(NotAuditable, match=r"routes were not written: set logging\.auditable=true"):
        audit_step(run, "experts.chain_sum", 3)
    samples.write_text("{")
    with pytest.raises(NotAuditable, match=r"step_000003\.parquet is damaged: ArrowInvalid"):
        audit_step(run, "experts.chain_sum", 3)
    samples.unlink()
    with pytest.raises(NotAuditable, match=r"no samples at .*; rerun the step"):
        audit_step(run, "experts.chain_sum", 3)


def test_audit_and_product_share_no_arithmetic() -> None:
    """The audit imports only its own modules and the file formats."""
    allowed = {"parallel.files", "parallel.checkpoint.reader", "parallel.errors"}
    for path in (REPOSITORY / "stages" / "audit").glob("*.py"):
        for name in _imported(path):
            if name.split(".")[0] in ("stages", "parallel", "pipeline"):
                assert name.startswith("stages.audit") or name in allowed, (path, name)
    for path in [*(REPOSITORY / "stages").rglob("*.py"), *(REPOSITORY / "parallel").rglob("*.py")]:
        if path.parent.name != "audit":
            assert not any(name.startswith("stages.audit") for name in _imported(path)), path


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield node.module
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module in ("stages", "parallel", "pipeline")
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
