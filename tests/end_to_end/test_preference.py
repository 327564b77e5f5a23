"""Preference optimisation in a real run: killed and resumed, it gives the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.awaiting import PATIENCE_SECONDS
from tests.end_to_end.process_tree import KILLED, tree
from tests.end_to_end.same_bits import digests
from tests.runs import braid, metrics
from tests.warm_runs import WarmBraid

CONFIG = Path(__file__).with_name("preference.yaml")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration beside its pairs: 3+4 is answered by 7 and by 8."""
    smoke = Path(__file__).parents[2] / "configs" / "smoke.yaml"
    text = CONFIG.read_text().replace("../../configs/smoke.yaml", str(smoke))
    (tmp_path / CONFIG.name).write_text(text)
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
        for a in range(10)
        for b in range(10)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / CONFIG.name


def test_a_killed_stage_continues_with_the_same_bits(
    config: Path, tmp_path: Path, warm_braid: WarmBraid
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    warm_braid(whole, "run", str(config))
    run = killed / "preference"
    process = braid(killed, "run", str(config), log=tmp_path / "killed.log")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(metrics(run, "dpo")) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    victims = tree([process.pid])
    for name in ("launcher", "rank 0", "rank 1"):
        for each in KILLED[name](victims):
            os.kill(each.number, signal.SIGKILL)
    process.wait()
    done = len(metrics(run, "dpo"))
    assert 5 <= done < 12
    cached = run / "stages" / "dpo" / "reference.npz"
    written = cached.stat()
    warm_braid(killed, "resume", str(run))
    assert cached.stat().st_ino == written.st_ino  # the reference was not computed again
    assert digests(run) == digests(whole / "preference")

    def values(of: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in line.items() if k != "time"} for line in metrics(of, "dpo")]

    assert values(run) == values(whole / "preference")
    first, last = values(run)[0], values(run)[-1]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < first["loss"] and last["reward_margin"] > 0
    assert last["reward_accuracy"] > 0.5
    shutil.rmtree(killed)


def test_a_command_that_fails_is_reported(warm_braid: WarmBraid, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no run missing"):
        warm_braid(tmp_path, "status", "missing")
