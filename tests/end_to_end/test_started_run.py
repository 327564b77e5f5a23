"""A run that `braid init` writes of a tiny checkpoint, from its import to its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.hugging_face_directories import TINY, published, rows
from tests.runs import braid, finish


@pytest.mark.combinations
def test_a_written_run_reaches_its_export(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = published(tmp_path / "model", TINY)
    config = AutoConfig.from_pretrained(weights)
    (weights / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(weights)
    domains = [f"{kind}={rows(tmp_path / f'{kind}.jsonl', kind)}" for kind in ("math", "json")]
    finish(
        braid(
            *(tmp_path, "init", "--model", str(weights), "--domains", *domains),
            *("--output", str(tmp_path / "mine.yaml")),
        )
    )
    for step in ("validate", "plan", "run"):
        finish(braid(tmp_path, step, str(tmp_path / "mine.yaml")))
    found = json.loads(next(tmp_path.rglob("results.json")).read_text())
    assert found["models"].keys() == {"initial", "experts.math", "experts.json", "merge"}
    assert [*tmp_path.rglob("stages/export/huggingface/config.json")]
