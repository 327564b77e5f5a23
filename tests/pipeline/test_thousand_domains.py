"""A run of 1,000 domains: its run.yaml has 280,000 keys and values, and every command reads it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import read
from pipeline.config.validate import load
from pipeline.run.run import Run
from tests.runs import REPOSITORY

DOMAINS = {"big": 1000, "tenth": 100}
# Of the CPU's time with a tenth of the domains: 10 where all of it grows with their number, less
# with what starting Python takes, and 100 where it grows with their square.
MOST_TIMES = 8.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of runs with two runs, and their configurations beside it."""
    folder = tmp_path_factory.mktemp("domains")
    chains = REPOSITORY / "configs/domains/chain_sum.yaml"
    for name, count in DOMAINS.items():
        config = folder / f"{name}.yaml"
        domains = [f"  d{number}: {{extends: {chains}}}" for number in range(count)]
        head = [f"extends: {REPOSITORY}/configs/quickstart.yaml", f"name: {name}", "domains:"]
        config.write_text("\n".join([*head, *domains]) + "\n")
        run = Run(folder / "runs" / name, load(config))
        run.create()
        run.write_settings()
    return folder / "runs"


@pytest.mark.parametrize(
    "command",
    [
        ["status", "{name}"],
        ["plan", "{runs}/{name}/run.yaml"],
        ["plan", "{runs}/../{name}.yaml"],
        ["run", "{runs}/../{name}.yaml", "--dry-run"],
    ],
)
def test_commands_on_a_thousand_domains_take_no_square_of_them(
    runs: Path, command: list[str]
) -> None:
    seconds = {name: cpu_seconds(runs, name, command) for name in DOMAINS}
    assert seconds["big"] < MOST_TIMES * seconds["tenth"]


def cpu_seconds(runs: Path, name: str, command: list[str]) -> float:
    """Return the CPU's time of a command on a run."""
    whole = [each.format(runs=runs, name=name) for each in command]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *whole, "--runs-dir", str(runs)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert f"experts.d{DOMAINS[name] - 1}" in done.stdout
    return sum(getattr(after, each) - getattr(before, each) for each in ("ru_utime", "ru_stime"))


def test_a_run_that_no_command_could_read_is_not_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "small", load(config))
    monkeypatch.setattr(read, "MOST_BYTES", 1 << 10)
    with pytest.raises(read.ConfigError, match=r"run\.yaml: would be larger than 0 MiB"):
        run.write_settings()
    assert not run.settings_file.exists()
