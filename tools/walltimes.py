"""The walltimes and the costs of configs/runs, by their simulation on H100.

    .venv/bin/python -m tools.walltimes      # after a change of a run or of the simulation

Writes configs/clusters/walltimes and the table of docs/how-to/start-a-run.md;
tests/pipeline/test_shipped_runs.py fails where one is not current.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from parallel.estimates.roofline.hardware import GPUS
from pipeline.config.validate import load
from pipeline.estimate.budget import walltimes
from pipeline.estimate.simulation import (
    FILLED,
    HOUR,
    PER_NODE,
    Assumptions,
    SimulatedStage,
    simulated,
)
from pipeline.run.graph import compile_graph

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "configs" / "runs"
PROFILES = ROOT / "configs" / "clusters" / "walltimes"
PAGE = ROOT / "docs" / "how-to" / "start-a-run.md"
HEAD = "| run | GPUs | hours | GPU hours |\n|---|---:|---:|---:|\n"
LONGEST = 24 * HOUR
HEADER = """\
# Walltimes of configs/runs/{name} on H100, by `python -m tools.walltimes`: half as long
# again as the longest simulated stage and half an hour, at most a day. A profile has them with
#
#     extends: walltimes/{name}
kinds:
"""


def written() -> dict[Path, str]:
    """Return the text of every file that is written from the simulations."""
    found = {path: _simulated(path) for path in sorted(RUNS.glob("[a-z]*.yaml"))}
    texts = {PROFILES / path.name: _profile(path.name, times) for path, times in found.items()}
    rows = [_row(path.stem, times) for path, times in sorted(found.items(), key=_by_size)]
    page = PAGE.read_text()
    table = re.compile(re.escape(HEAD) + r"(\|[^\n]*\n)*")
    return {**texts, PAGE: table.sub(lambda _: HEAD + "".join(rows), page)}


def _simulated(path: Path) -> list[SimulatedStage]:
    settings = load(path, to_start=False)
    assumed = Assumptions(GPUS["h100"], PER_NODE, FILLED, 1.0)
    return simulated(compile_graph(settings), settings, assumed)


def _by_size(item: tuple[Path, list[SimulatedStage]]) -> tuple[str, int]:
    path, times = item
    return re.sub(r"-\d+$", "", path.stem), times[0].gpus


def _profile(name: str, times: list[SimulatedStage]) -> str:
    kinds: Mapping[str, str] = walltimes(times, LONGEST)
    lines = (f'  {kind}: {{walltime: "{each}"}}\n' for kind, each in kinds.items())
    return HEADER.format(name=name) + "".join(lines)


def _row(name: str, times: list[SimulatedStage]) -> str:
    hours = sum(each.duration for each in times) / HOUR
    cost = sum(each.gpu_hours for each in times)
    return f"| `{name}` | {times[0].gpus} | {hours:,.0f} | {cost:,.0f} |\n"


if __name__ == "__main__":
    PROFILES.mkdir(exist_ok=True)
    for path, text in written().items():
        path.write_text(text)
