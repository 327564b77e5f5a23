"""The cost of what is recorded: a step with every log and tracker, and with as little as may be.

    python benchmarks/logging_cost.py [--pairs 5]

Each pair is two runs of the quickstart's cold start and first expert, one after the other and in
turn the other way around: `all` with the defaults (logging.tokens 0.1, Weights & Biases offline),
`least` with logging.tokens 0 and no tracker. A run's number is the median over the expert's steps
of the seconds from one step's line in metrics.jsonl to the next. The ratio is of each pair, with
Student's t over the pairs. `recording` is the share of the steps' time that rank 0's timeline says
was spent in writing samples and metrics. Writes benchmarks/logging_cost.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from intervals import half_width
from machine import measured

sys.path.insert(0, str(Path(__file__).parents[1]))
from pipeline.run.timeline import phases
from stages.directory import StageDirectory
from tests.runs import REPOSITORY, braid, finish, metrics

RESULTS = Path(__file__).with_suffix(".json")
STAGE = "experts.chain_sum"
CONFIG = [
    str(REPOSITORY / "configs" / "quickstart.yaml"),
    *("domains.spell_backward=null", "domains.number_sorting=null", "stages.merge=null"),
    *("stages.export=null", "stages.evaluate=null", "stages.cold_start.loop.steps=40"),
    "stages.cold_start.optimizer.warmup_steps=10",
]
LEAST = ["logging.tokens=0", "logging.trackers=[]"]
WRITING = ("log", "record")  # phases


def seconds(directory: Path, name: str, settings: list[str]) -> tuple[float, float]:
    """Return the median seconds of a step of a run, and the share of them that writing takes."""
    finish(braid(directory, "run", *CONFIG, *settings, "--name", name))
    run = directory / name
    times = [line["time"] for line in metrics(run, STAGE)]
    own = phases(StageDirectory(run / "stages" / STAGE).timeline(1, 0), "rank 0")
    lasted = {
        wanted: sum((each.end or each.begin) - each.begin for each in own if each.name in wanted)
        for wanted in (WRITING, ("step", "log"))
    }
    writing = lasted[WRITING] / lasted["step", "log"]
    return median(after - before for before, after in pairwise(times)), writing


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    found = []
    for pair in range(arguments.pairs):
        with tempfile.TemporaryDirectory(prefix="braid-benchmark-") as folder:
            order = [("all", []), ("least", LEAST)]
            own = {
                name: seconds(Path(folder), name, settings)
                for name, settings in (order if pair % 2 == 0 else order[::-1])
            }
        found.append(
            {
                "all": round(own["all"][0], 4),
                "least": round(own["least"][0], 4),
                "recording": round(own["all"][1], 4),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    ratios = [each["all"] / each["least"] for each in found]
    document = {
        **measured(),
        "pairs": found,
        "ratio": round(mean(ratios), 4),
        "half_width": round(half_width(ratios), 4),
        "recording": round(median(each["recording"] for each in found), 4),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: document[name] for name in ("ratio", "half_width", "recording")}))


if __name__ == "__main__":
    main()
