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

DOMAINS = 1000
MOST_SECONDS = 3.0  # of CPU; half of it at most on a quiet machine, and imports are a third of that


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of runs with the run `big`, and its configuration beside it."""
    folder = tmp_path_factory.mktemp("big")
    config = folder / "big.yaml"
    chains = REPOSITORY / "configs/domains/chain_sum.yaml"
    domains = [f"  d{number}: {{extends: {chains}}}" for number in range(DOMAINS)]
    head = [f"extends: {REPOSITORY}/configs/quickstart.yaml", "name: big", "domains:"]
    config.write_text("\n".join([*head, *domains]) + "\n")
    run = Run(folder / "runs" / "big", load(config))
    run.create()
    run.write_settings()
    return folder / "runs"


@pytest.mark.parametrize(
    "command",
    [
        ["status", "big"],
        ["plan", "{runs}/big/run.yaml"],
        ["plan", "{runs}/../big.yaml"],
        ["run", "{runs}/../big.yaml", "--dry-run"],
    ],
)
def test_commands_on_a_thousand_domains_take_seconds(runs: Path, command: list[str]) -> None:
    whole = [each.format(runs=runs) for each in command]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *whole, "--runs-dir", str(runs)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert f"experts.d{DOMAINS - 1}" in done.stdout
    used = sum(getattr(after, each) - getattr(before, each) for each in ("ru_utime", "ru_stime"))
    assert used < MOST_SECONDS


def test_a_run_that_no_command_could_read_is_not_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "small", load(config))
    monkeypatch.setattr(read, "MOST_BYTES", 1 << 10)
    with pytest.raises(read.ConfigError, match=r"run\.yaml: would be larger than 0 MiB"):
        run.write_settings()
    assert not run.settings_file.exists()
