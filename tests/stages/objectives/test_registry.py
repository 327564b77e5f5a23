"""An algorithm is one file: added to a copy of the source it validates, computes, is listed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.objectives.loss import REGISTRIES
from stages.objectives.registry import Registry

ROOT = Path(__file__).parents[3]
NEW = {
    "stages/objectives/advantages/median.py": '''
"""The median of the group as a baseline."""

from typing import Literal

from stages.objectives.graded import AdvantageBase, Graded
from stages.objectives.registry import advantage


class MedianSettings(AdvantageBase):
    """Group median baseline."""

    name: Literal["median"] = "median"
    factor: float = 1.0


@advantage(MedianSettings, source="nobody's")
def median(graded: Graded, settings: MedianSettings):
    """Return factor (R - median of the group), [groups, G]."""
    return settings.factor * (graded.rewards - graded.rewards.median(-1, keepdim=True).values)
''',
    "stages/objectives/ratios/unclipped.py": '''
"""The token ratio without a clip."""

from typing import Literal

from stages.objectives.registry import ratio
from stages.objectives.surrogate import RatioBase, Surrogate, Tokens, bounded_exp


class UnclippedSettings(RatioBase):
    """One ratio a token."""

    name: Literal["unclipped"] = "unclipped"


@ratio(UnclippedSettings)
def unclipped(tokens: Tokens, settings: UnclippedSettings) -> Surrogate:
    """Return r_t A of r_t = exp(log pi_theta - log pi_old)."""
    ratio = bounded_exp(tokens.log_ratio)
    return Surrogate(-ratio * tokens.advantages, ratio, ratio != ratio)
''',
    "stages/guards/rules/router_collapse.py": '''
"""A guard of the routers."""

from typing import ClassVar

from stages.guards.registry import GuardSettings, guard


@guard("router_collapse")
class RouterCollapseSettings(GuardSettings):
    """Below the threshold, trainer and engine choose other experts."""

    metric: ClassVar[str] = "router_agreement"
    side: ClassVar[str] = "below"
    remedy: ClassVar[str] = "set routing.replay to r3"

    threshold: float = 0.5
    patience: int = 1
''',
}
DOMAIN = "domains.chain_sum"
OVERRIDES = [
    f"{DOMAIN}.objective.advantage={{name: median, factor: 2}}",
    f"{DOMAIN}.objective.ratio.name=unclipped",
    f"{DOMAIN}.guards.router_collapse={{threshold: 0.9, action: stop}}",
]
PROGRAM = """
import json, sys
import torch
from pathlib import Path
from pipeline.config.validate import load
from pipeline.config.read import ConfigError
from stages.guards.watch import GuardMonitor
from stages.objectives.graded import compute_advantages
from stages.objectives.loss import Totals
from stages.objectives.graded import Graded
from stages.objectives.loss import policy_loss
from stages.objectives.loss import REGISTRIES
from stages.objectives.surrogate import Tokens

config, wrong, *overrides = sys.argv[1:]
settings = load(Path(config), overrides)
domain = settings.domains["chain_sum"]
rewards = torch.tensor([[1.0, 2.0, 4.0]])
graded = Graded(rewards, torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.int64))
zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
tokens = Tokens(zeros, zeros, zeros, rewards, mask)
loss = policy_loss(tokens, Totals(1, 3), domain.objective, 0.0).loss
monitor = GuardMonitor("domain", str, domain, domain.rewards)
try:
    load(Path(config), [wrong])
except ConfigError as error:
    [violation] = error.violations
print(json.dumps({
    "advantages": compute_advantages(graded, domain.objective.advantage).flatten().tolist(),
    "loss": loss.item(),
    "stop": monitor.observe(1, {"router_agreement": 0.8}).stop,
    "wrong": str(violation),
    "listed": {r.key: {n: [a.description, a.formula, a.source] for n, a in r.items()}
               for r in REGISTRIES},
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the three floors with the files of `NEW`, and no other change."""
    copy = tmp_path_factory.mktemp("copy")
    for floor in ("pipeline", "stages", "parallel"):
        shutil.copytree(ROOT / floor, copy / floor, ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in NEW.items():
        assert not (copy / path).exists()
        (copy / path).write_text(text.lstrip())
    return copy


def test_a_new_algorithm_touches_only_its_file(copy: Path) -> None:
    wrong = f"{DOMAIN}.objective.advantage={{name: median, faktor: 2}}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "configs/smoke.yaml"), wrong, *OVERRIDES],
        cwd=copy,
        env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["advantages"] == [-2.0, 0.0, 4.0]
    assert printed["loss"] == pytest.approx(-(1 + 2 + 4) / 3)
    assert "router_agreement is 0.8, below" in printed["stop"]
    assert "; set routing.replay to r3" in printed["stop"]
    assert "advantage.faktor: unknown key" in printed["wrong"]
    assert printed["listed"]["objective.advantage"]["median"] == [
        "Group median baseline.",
        "Return factor (R - median of the group), [groups, G].",
        "nobody's",
    ]
    assert "unclipped" in printed["listed"]["objective.ratio"]


def test_a_name_is_registered_once() -> None:
    registry = Registry("objective.ratio")
    registry.register("token")(len)
    with pytest.raises(ValueError, match=r"objective\.ratio: token is registered twice"):
        registry.register("token")(max)


def test_every_algorithm_is_described() -> None:
    for registry in REGISTRIES:
        for algorithm in registry.values():
            assert algorithm.description.endswith(".")
            assert algorithm.formula.startswith("Return ")
