"""Merges of weights in a real run: measured, exported, distilled from; killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

from tests.awaiting import PATIENCE_SECONDS
from tests.end_to_end.process_tree import KILLED, tree
from tests.end_to_end.same_bits import digests
from tests.runs import braid
from tests.warm_runs import WarmBraid

CONFIG = Path(__file__).with_name("merged_weights.yaml")
MERGES = ("average", "arithmetic", "ties", "dare", "sce", "ram", "recalibrated")
LAST = MERGES[-1]  # the one that also runs the model


def test_a_killed_merge_is_made_again_with_the_same_bits(
    tmp_path: Path, warm_braid: WarmBraid
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    warm_braid(whole, "run", str(CONFIG))
    found = digests(whole / "merged_weights")
    assert len({found[f"{name}/step_0"] for name in MERGES}) == len(MERGES)
    models = json.loads((whole / "merged_weights" / "results.json").read_text())["models"]
    assert {*MERGES, "merge"} <= models.keys()
    assert (whole / "merged_weights/stages/export/huggingface/config.json").is_file()

    # A copy of the run, which merges once more from the same experts.
    run = shutil.copytree(whole, killed, symlinks=True) / "merged_weights"
    log = tmp_path / "killed.log"
    process = braid(killed, "run", str(CONFIG), "--from", LAST, "--only", LAST, log=log)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (run / "replaced").exists() or not (run / "stages" / LAST / "checkpoints").exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    victims = tree([process.pid])
    for name in ("launcher", "rank 0", "rank 1"):
        for each in KILLED[name](victims):
            os.kill(each.number, signal.SIGKILL)
    process.wait()
    warm_braid(killed, "resume", str(run), "--only", LAST)
    again = digests(run)
    assert again[f"{LAST}/step_0"] == found[f"{LAST}/step_0"]
    shutil.rmtree(killed)
