"""`braid` on a private Slurm, with stages that only take time."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.awaiting import PATIENCE_SECONDS
from tests.virtual_cluster import Cluster

HERE = Path(__file__).parent

CONFIG = """\
name: small
model:
  vocabulary_size: 80
  hidden_size: 96
  layers: 4
  attention_heads: 4
  key_value_heads: 2
  head_dim: 32
  experts: 8
  experts_per_token: 2
  expert_hidden_size: 96
layout: {ranks: 2, expert: 2}
domains:
  sums:
    prompts: {dataset: chain_sum}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 20, checkpoint_every: 5}
  words:
    prompts: {dataset: spell_backward}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 20, checkpoint_every: 5}
stages:
  cold_start:
    kind: sft
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 20, checkpoint_every: 5}
  experts: {kind: grpo, from: cold_start, for_each: domain}
  merge:
    kind: distill
    from: cold_start
    teachers: experts
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 20, checkpoint_every: 5}
  evaluate: {kind: evaluate}
  export: {kind: export, from: merge}
"""
PROFILE = """\
ranks_per_node: 1
network_interface: lo
walltime: "0:10:00"
warning_seconds: 60
"""
STAGES = ["cold_start", "experts.sums", "experts.words", "merge", "evaluate", "export"]


@dataclass
class Braid:
    """A `braid` whose stages only take time, with its configuration and its runs."""

    cluster: Cluster
    directory: Path
    program: Path
    config: Path = field(init=False)
    profile: Path = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.directory / "small.yaml"
        self.config.write_text(CONFIG)
        self.profile = self.directory / "cluster.yaml"
        self.write_profile(PROFILE)

    def write_profile(self, text: str) -> None:
        """Write the cluster's profile, with the setup that finds this `braid`."""
        setup = f"setup: ['export PATH={self.program.parent}:$PATH']\n"
        self.profile.write_text(text + setup)

    @property
    def run(self) -> Path:
        return self.directory / "runs" / "small"

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Run a command; return stdout and stderr together."""
        found = subprocess.run(
            [str(self.program), *map(str, arguments), "--runs-dir", str(self.run.parent)],
            env=self.cluster.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert found.returncode == code, found.stdout + found.stderr
        return found.stdout + found.stderr

    def submit(self, *arguments: object) -> dict[str, str]:
        """Submit the configuration; return the job of every stage."""
        said = self("submit", self.config, "--cluster", self.profile, *arguments)
        pairs = (line.split(": job ") for line in said.splitlines() if ": job " in line)
        return dict(pairs)

    def steps(self, stage: str) -> list[tuple[int, int, str]]:
        """Return (attempt, step, node) of every finished step."""
        log = self.run / "stages" / stage / "steps.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(a), int(step), node) for a, step, node in map(str.split, lines)]

    def hold(self, stage: str, step: int) -> None:
        """Make the stage's first attempt wait after a step until it is signalled or killed."""
        directory = self.run / "stages" / stage
        directory.mkdir(parents=True)
        (directory / "hold").write_text(str(step))

    def wait_for_step(self, stage: str, step: int) -> None:
        self.cluster.wait_until(lambda: any(made >= step for _, made, _ in self.steps(stage)))

    def wait_for_the_end(self, jobs: dict[str, str]) -> None:
        """Wait until the last stages have completed."""

        def ended() -> bool:
            return all(self.cluster.state(job) == "COMPLETED" for job in jobs.values())

        self.cluster.wait_until(ended)
