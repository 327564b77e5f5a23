"""Commands of one process that imports torch: what this machine has, and what a domain's rewards
make of its own references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.report.doctor import probe
from tests.runs import braid

ROWS = [{"question": f"say {n}", "answer": f'{{"n": {n}}}'} for n in range(40)]
DOMAIN = """\
prompts: {source: jsonl, path: rows.jsonl, prompt: question, answer: answer}
rewards:
  shape: {kind: json_schema, default_schema: {type: object, required: [KEY]}}
demonstrations: {source: jsonl, path: rows.jsonl, prompt: question, response: answer}
optimizer: {learning_rate: 1e-3}
loop: {steps: 2}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that can write JSON, which the one of characters cannot."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    letters = {chr(code): code - 32 for code in range(32, 127)}
    backend = Tokenizer(models.WordLevel({**letters, "[END]": len(letters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()  # without one, spaces come between the letters
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[END]").save_pretrained(folder)
    return folder


def checked(folder: Path, key: str, *arguments: str) -> tuple[int, str]:
    """`braid domain check` of JSON answers that are rewarded for having this key."""
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(rows)
    domain = folder / "shapes.yaml"
    domain.write_text(DOMAIN.replace("KEY", key))
    process = braid(folder / "runs", "domain", "check", str(domain), *arguments)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def test_this_machine_is_examined() -> None:
    findings = probe()
    assert findings.keys() == {"torch", "transformer_engine", "apex", "megatron", "vllm"}
    cuda = bool(findings["torch"]["devices"])
    assert findings["megatron"]["process_groups"] == ("nccl" if cuda else "gloo")
    assert findings["vllm"] == {"device": "cuda" if cuda else "cpu"}


def test_a_domain_whose_references_score_is_right(tmp_path: Path, tokenizer: Path) -> None:
    code, out = checked(tmp_path, "n", "--tokenizer", str(tokenizer), "--prompts", "1")
    assert code == 0, out
    assert f"prompts: {tmp_path}/rows.jsonl, 40 rows\n" in out
    assert "tells right" not in out
    assert f"demonstrations: {tmp_path}/rows.jsonl, 40 rows\n" in out
    row = next(line for line in out.splitlines() if line.startswith("reference"))
    assert row.split()[-2:] == ["1", "1"]
    row = next(line for line in out.splitlines() if line.startswith("garbage"))
    assert row.split()[-2:] == ["0", "0"]


def test_a_reference_that_does_not_score_is_told_loudly(tmp_path: Path, tokenizer: Path) -> None:
    code, out = checked(tmp_path, "m", "--tokenizer", str(tokenizer))
    assert code == 1
    assert "✗  domains.shapes.rewards.shape: the reference scores 0, no more than a wrong" in out
    assert "on 5 of 5 prompts" in " ".join(out.split())
    assert "such as a format, have the column hold a whole one" in " ".join(out.split())
    assert out.endswith(
        f"braid: {tmp_path}/shapes.yaml: a model cannot learn from it as it is (✗)\n"
    )
