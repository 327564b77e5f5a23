"""The parts of the kill matrix: a run's processes, moments of a seed, and digests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
from torch.distributed import checkpoint as distributed_checkpoint

from parallel.files import digest_of
from tests.awaiting import PATIENCE_SECONDS
from tests.end_to_end.moments import StagePosition, Stretch, draw, position, recorded
from tests.end_to_end.process_tree import KILLED, everything, tree
from tests.end_to_end.same_bits import digests

WAIT = "import time; time.sleep(60)"
# Waits beside a child that waits, whose arguments are its own last one.
BOTH = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}, '-m', sys.argv[3]])"
)


def test_processes_are_those_below_the_launcher_alone() -> None:
    def launcher() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"{BOTH}; {WAIT}", "-m", "pipeline.cli", "stages.main"]
        return subprocess.Popen(command, env={**os.environ, "RANK": "1"}, start_new_session=True)

    mine, other = launcher(), launcher()
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(tree([mine.pid])) < 2 or len(tree([other.pid])) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = tree([mine.pid])
        [rank] = KILLED["rank 1"](found)
        assert rank.parent == mine.pid
        assert [each.number for each in KILLED["launcher"](found)] == [mine.pid]
        assert KILLED["rank 0"](found) == KILLED["engine"](found) == []
        assert len(KILLED["rank 1"](everything())) >= 2
    finally:
        for each in (mine, other):
            os.killpg(each.pid, 9)
            each.wait()


def test_moments_are_those_of_the_seed_in_the_order_of_the_run() -> None:
    timeline = [
        Stretch("cold_start", 0, 5.0, {"launcher"}),
        Stretch("cold_start", 1, 1.0, {"launcher", "rank 0"}),
        Stretch("merge", 0, 9.0, {"launcher", "engine"}),
    ]
    names = ["engine", "rank 0", *["launcher"] * 20]
    drawn = draw(timeline, names, random.Random(3))
    assert (
        drawn == draw(timeline, names, random.Random(3)) != draw(timeline, names, random.Random(4))
    )
    places = [(stretch.stage, stretch.step) for stretch in timeline]
    order = [(places.index((moment.stage, moment.step)), moment.seconds) for moment in drawn]
    assert order == sorted(order)
    assert {place for place, _ in order} == {0, 1, 2}
    assert all(0 <= seconds <= timeline[place].seconds for place, seconds in order)
    where = {moment.process: (moment.stage, moment.step) for moment in drawn}
    assert (where["engine"], where["rank 0"]) == (("merge", 0), ("cold_start", 1))


def test_a_long_stage_does_not_draw_all_kills() -> None:
    timeline = [Stretch("cold_start", step, 1.0, {"launcher"}) for step in range(300)]
    timeline += [Stretch("collect", 0, 1.0, {"launcher"})]
    drawn = draw(timeline, ["launcher"] * 200, random.Random(0))
    in_the_short_stage = sum(moment.stage == "collect" for moment in drawn)
    assert 70 < in_the_short_stage < 130


def test_where_a_run_stands(tmp_path: Path) -> None:
    assert position(tmp_path) is None
    begun = {"stage": "merge", "state": "running", "cause": "from the start", "attempt": 2}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(begun) + '\n{"stage": "half')
    assert position(tmp_path) == StagePosition("merge", 0, 2)
    (tmp_path / "stages" / "merge").mkdir(parents=True)
    (tmp_path / "stages" / "merge" / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert position(tmp_path) == StagePosition("merge", 1, 2)


def test_a_timeline_is_read_from_a_finished_run(tmp_path: Path) -> None:
    now = "2026-11-26T00:00:10+00:00"
    of = {"stage": "merge", "attempt": 1, "time": now}
    events = [{**of, "state": "running"}, {**of, "state": "done", "seconds": 9.0}]
    events.append({**of, "stage": "export", "state": "done", "seconds": 2.0})
    (tmp_path / "ledger.jsonl").write_text("\n".join(map(json.dumps, events)))
    (tmp_path / "stages" / "merge").mkdir(parents=True)
    end = datetime.fromisoformat(now).timestamp()
    lines = [json.dumps({"time": end - left}) for left in (5.0, 2.0)]
    (tmp_path / "stages" / "merge" / "metrics.jsonl").write_text("\n".join(lines))
    found = [(each.stage, each.step, each.seconds) for each in recorded(tmp_path)]
    assert found == [("merge", 0, 4.0), ("merge", 1, 3.0), ("merge", 2, 2.0), ("export", 0, 2.0)]


def test_a_changed_bit_is_seen(tmp_path: Path) -> None:
    weight = torch.randn(3, 5)
    before = digests(_run(tmp_path / "before", weight))
    assert before == digests(_run(tmp_path / "same", weight.clone()))
    changed = weight.clone()
    changed.view(torch.int32)[2, 4] ^= 1
    after = digests(_run(tmp_path / "after", changed))
    assert before.keys() == after.keys() == {"merge/step_7"}
    assert before != after


def _run(path: Path, weight: torch.Tensor) -> Path:
    """Return a run with a single checkpoint."""
    folder = path / "stages" / "merge" / "checkpoints" / "step_7"
    folder.mkdir(parents=True)
    distributed_checkpoint.save({"weight": weight}, checkpoint_id=folder, no_dist=True)
    (folder / "checksums.json").write_text(json.dumps({"digest": digest_of({}), "files": {}}))
    return path
