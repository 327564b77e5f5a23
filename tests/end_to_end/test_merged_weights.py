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
from tests.runs import braid, finish

CONFIG = Path(__file__).with_name("merged_weights.yaml")
MERGES = ("average", "arithmetic", "ties", "dare", "sce", "ram", "recalibrated")
LAST = MERGES[-1]  # the one that also runs the model


def test_a_killed_merge_is_made_again_with_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(braid(whole, "run", str(CONFIG)))
    found = digests(whole / "merged_weights")
    assert len({found[f"{name}/step_0"] for name in MERGES}) == len(MERGES)
    models = json.loads((whole / "merged_weights" / "results.json").read_text())["models"]
    assert {*MERGES, "merge"} <= models.keys()
    assert (whole / "merged_weights/stages/export/huggingface/config.json").is_file()

    run = killed / "merged_weights"
    names = ("cold_start", "experts.chain_sum", "experts.spell_backward", LAST)
    only = [word for name in names for word in ("--only", name)]
    process = braid(killed, "run", str(CONFIG), *only, log=tmp_path / "killed.log")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (run / "stages" / LAST / "checkpoints").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    victims = tree([process.pid])
    for name in ("launcher", "rank 0", "rank 1"):
        for each in KILLED[name](victims):
            os.kill(each.number, signal.SIGKILL)
    process.wait()
    finish(braid(killed, "resume", str(run), *only))
    again = digests(run)
    assert again[f"{LAST}/step_0"] == found[f"{LAST}/step_0"]
    shutil.rmtree(killed)
