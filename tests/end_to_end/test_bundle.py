"""A bundle of a real run: repeated bit by bit elsewhere, and with one input changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import braid, finish

HERE = Path(__file__).parent
STAGES = ("cold_start", "experts.chain_sum", "taught", "export")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration beside its rows and the code of its reward, outside any checkout."""
    here = tmp_path / "first"
    (here / "code").mkdir(parents=True)
    (here / "code/bundled_rewards.py").write_text(
        "from bundled_lengths import LONGEST\n\n\n"
        "def short(problem, response):\n    return float(len(response) < LONGEST)\n"
    )
    (here / "code/bundled_lengths.py").write_text("LONGEST = 9\n")
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(10)]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = (HERE / "bundled.yaml").read_text()
    path = here / "bundled.yaml"
    path.write_text(text.replace("extends: chaos.yaml", f"extends: {HERE / 'chaos.yaml'}"))
    return path


def refusal(directory: Path, *arguments: object) -> str:
    """Return the message of a command that must end with 1."""
    process = braid(directory, *map(str, arguments))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    return output


@pytest.mark.combinations
def test_a_bundle_repeats_a_run_and_names_the_stage_that_a_changed_input_reaches(
    config: Path, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    finish(braid(first, "run", str(config)))
    archive = second / "bundled.tar.gz"
    finish(braid(first, "bundle", "bundled", "--to", str(archive)))
    shutil.rmtree(first)  # nothing of the first run or its inputs is left
    output = finish(braid(second, "run", str(archive), "--name", "again"))
    assert f"the output of all {len(STAGES)} stages equals the bundle's" in output

    bundle, rows = second / "bundled", second / "bundled/data/stages.taught.data.rows/rows.jsonl"
    rows.write_text(rows.read_text().replace('"response": "11"', '"response": "12"'))
    output = refusal(third, "run", bundle)
    assert "stages.taught.data.rows.path: " in output
    assert "its content differs; restore it; taught is the first stage that reads it" in output
    assert not third.exists()

    finish(braid(third, "run", str(bundle / "config.yaml")))
    output = refusal(third, "bundle", "--check", "bundled", bundle)
    lines = [line.strip() for line in output.splitlines()]
    assert "taught is the first stage that differs from the bundle's; 2 of 4" in lines[0]
    assert lines[1].startswith("files of data.rows.path: ")
    assert lines[-2:] == [
        "differ as a consequence: export",
        "equal: cold_start, experts.chain_sum",
    ]

    lengths = bundle / "code/0/bundled_lengths.py"
    lengths.write_text("LONGEST = 8\n")
    output = refusal(third, "run", bundle, "--name", "fourth")
    assert "domains.chain_sum.rewards.short.path: " in output
    assert "experts.chain_sum is the first stage that reads it" in output
