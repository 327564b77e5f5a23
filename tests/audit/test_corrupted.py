"""The audits of sampled data, of preference pairs and of unlike objectives see a changed value."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from stages.audit.collection import collection_rows
from stages.audit.recorded import NotAuditable, RecordedRun, read_run
from stages.audit.stage_audit import audit_step
from stages.sampling.sample_files import read_samples, samples_file, write_samples

Row = dict[str, Any]
PART, LINES = "drawn/part_000001.parquet", "metrics.jsonl"
pytestmark = pytest.mark.usefixtures("read_once")


def differing(rows: Any) -> set[str]:
    return {row.quantity for row in rows if not row.agrees}


# What a stage sampled.


def change_rows(path: Path, change: Callable[[list[Row]], None]) -> None:
    table = parquet.read_table(path)
    rows = table.to_pylist()
    change(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), path)


def field(name: str, value: Any) -> Callable[[list[Row]], None]:
    return lambda rows: rows[0].update({name: value})


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        (PART, field("reward", 7.0), {"rewards", "metrics: reward"}),
        (PART, field("tokens", 1), {"chain_sum: wrong tokens"}),
        (PART, field("seed", 1), {"chain_sum: wrong seeds"}),
        (PART, field("response", ""), {"chain_sum: wrong verdicts", "chain_sum: empty"}),
        (PART, field("dropped", "script"), {"chain_sum: wrong verdicts", "metrics: kept"}),
        (PART, lambda rows: rows.pop(), {"chain_sum: wrong responses to a prompt", "drawn"}),
        ("collected.parquet", lambda rows: rows.pop(), {"collected.parquet: digest"}),
        (
            "collected.parquet",
            lambda rows: rows.reverse(),
            {"collected.parquet: other rows than were kept"},
        ),
        ("collected.parquet", field("model", "x"), {"collected.parquet: rows of another model"}),
    ],
)
def test_a_changed_response_differs(
    copied: Path, file: str, change: Callable[[list[Row]], None], expected: set[str]
) -> None:
    change_rows(copied / "stages" / "collect" / file, change)
    assert expected <= differing(collection_rows(read_run(copied), "collect"))


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"per_prompt": 2}, "per_prompt"),
        ({"choose": "best"}, "wrong verdicts"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"finished": True}, "truncated"),
        ({"reward": 0.9}, "reward"),
        ({"script": {"allowed": ["Han"], "max_other": 0.0}}, "script"),
        ({"duplicates": True, "per_prompt": None}, "wrong verdicts"),
    ],
)
def test_another_filter_keeps_other_responses(
    odd: Path, keep: dict[str, Any], expected: str
) -> None:
    run = read_run(odd)
    assert not differing(collection_rows(run, "collect"))
    settings = copy.deepcopy(run.settings)
    settings["stages"]["collect"]["keep"].update(keep)
    differences = differing(collection_rows(RecordedRun(odd, settings), "collect"))
    assert any(name.endswith(f": {expected}") for name in differences), differences


def test_changed_counts_and_metrics_differ(copied: Path) -> None:
    directory = copied / "stages" / "collect"
    collection = json.loads((directory / "collection.json").read_text())
    collection["rows"] += 1
    collection["domains"]["spell_backward"]["kept"] -= 1
    (directory / "collection.json").write_text(json.dumps(collection))
    lines = (directory / LINES).read_text().splitlines()
    changed = json.loads(lines[1]) | {"response_tokens": 1.5}
    (directory / LINES).write_text("\n".join([lines[0], json.dumps(changed), *lines[2:]]))
    differences = differing(collection_rows(read_run(copied), "collect"))
    assert differences == {
        "collected.parquet: rows",
        "spell_backward: kept",
        "metrics: response_tokens",
    }
    (directory / LINES).write_text("\n".join(lines[1:]))
    assert "metrics: lines" in differing(collection_rows(read_run(copied), "collect"))
    (directory / PART).write_bytes(b"PAR1")
    with pytest.raises(NotAuditable, match=r"part_000001\.parquet is damaged"):
        collection_rows(read_run(copied), "collect")
    shutil.rmtree(directory / "drawn")
    with pytest.raises(NotAuditable, match=r"no parts at .*drawn: what collect drew is gone"):
        collection_rows(read_run(copied), "collect")


# Preference pairs.


def test_a_changed_reference_differs(copied: Path) -> None:
    path = copied / "stages" / "tuned" / "reference.npz"
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    sample, *_ = read_samples(samples_file(copied / "stages" / "tuned" / "samples", 3))
    arrays[f"source/{sample['domain']}"][sample["row"], 0] += 0.01
    np.savez(path, **arrays)
    rows = audit_step(read_run(copied), "tuned", 3).rows
    assert differing(rows) == {"reference log p"}
    path.unlink()
    with pytest.raises(NotAuditable, match=r"no .*reference\.npz"):
        audit_step(read_run(copied), "tuned", 3)


def test_changed_pairs_and_metrics_of_them_differ(copied: Path) -> None:
    path = samples_file(copied / "stages" / "tuned" / "samples", 3)
    samples = read_samples(path)
    write_samples(path, [*samples[1::-1], *samples[2:]])
    differences = differing(audit_step(read_run(copied), "tuned", 3).rows)
    assert {"reference log p", "loss", "reward_margin", "gradient_norm"} <= differences
    write_samples(path, samples[1:])
    with pytest.raises(NotAuditable, match="are not pairs of a chosen and a rejected"):
        audit_step(read_run(copied), "tuned", 3)
    write_samples(path, samples)
    logged = copied / "stages" / "tuned" / LINES
    text = [json.loads(line) for line in logged.read_text().splitlines()]
    text[2]["reward_chosen"] += 0.1
    logged.write_text("\n".join(map(json.dumps, text)))
    assert differing(audit_step(read_run(copied), "tuned", 3).rows) == {"reward_chosen"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta", 0.41), ("label_smoothing", 0.12), ("logprobs", "sum"), ("name", "ipo")],
)
def test_another_loss_of_pairs_differs(odd: Path, key: str, value: Any) -> None:
    run = read_run(odd)
    settings = copy.deepcopy(run.settings)
    settings["stages"]["tuned"]["loss"][key] = value
    assert "loss" in differing(audit_step(RecordedRun(odd, settings), "tuned", 3).rows)


# Unlike objectives of several domains.


@pytest.mark.parametrize(
    ("domain", "key", "value", "expected"),
    [
        ("chain_sum", "advantage.std", "sample", "advantages"),
        ("chain_sum", "mask_truncated", False, "learned tokens"),
        ("spell_backward", "kl.coefficient", 0.25, "loss"),
        ("spell_backward", "kl.estimator", "k2", "kl/spell_backward"),
        ("number_sorting", "kl.ema_decay", 0.6, "ema"),
        ("number_sorting", "aggregation", "token_mean", "loss"),
    ],
)
def test_another_objective_of_one_domain_differs(
    odd: Path, domain: str, key: str, value: Any, expected: str
) -> None:
    run = read_run(odd)
    settings = copy.deepcopy(run.settings)
    block = settings["domains"][domain]["objective"]
    *above, last = key.split(".")
    for name in above:
        block = block[name]
    block[last] = value
    assert expected in differing(audit_step(RecordedRun(odd, settings), "mixed", 3).rows)


def test_a_changed_sample_of_one_domain_differs(copied: Path) -> None:
    path = samples_file(copied / "stages" / "mixed" / "rollouts", 3)
    samples = read_samples(path)
    sample = next(sample for sample in samples if sample["domain"] == "spell_backward")
    sample["reward_parts"]["brief"] += 0.25
    write_samples(path, samples)
    assert differing(audit_step(read_run(copied), "mixed", 3).rows) == {"rewards"}
    sample["reward"] += 0.25 * 0.3
    write_samples(path, samples)
    assert {"advantages", "loss"} <= differing(audit_step(read_run(copied), "mixed", 3).rows)
