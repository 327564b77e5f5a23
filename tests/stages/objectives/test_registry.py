"""An algorithm is one file: added to a copy of the source it validates, computes, is listed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.objectives.loss import REGISTRIES
from stages.objectives.registry import Registry

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "objective.md"
GUARD = {
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
    f"{DOMAIN}.objective.advantage={{name: half}}",
    f"{DOMAIN}.objective.ratio={{name: spo, width: 0.1}}",
    f"{DOMAIN}.guards.router_collapse={{threshold: 0.9, action: stop}}",
]
PROGRAM = """
import json, sys
import torch
from pathlib import Path
from pipeline.config.validate import load
from pipeline.config.read import ConfigError
from stages.audit.advantages import ADVANTAGES as FORMULAS
from stages.audit.recorded import NotAuditable
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
try:
    FORMULAS.find("half")
except NotAuditable as error:
    refused = str(error)
print(json.dumps({
    "refused": refused,
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
    """A copy of the three floors with the page's examples and `GUARD`, and no other change."""
    copy = tmp_path_factory.mktemp("copy")
    for floor in ("pipeline", "stages", "parallel"):
        shutil.copytree(ROOT / floor, copy / floor, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = re.findall(r"```python\n# (stages/\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for path, text in [*blocks, *GUARD.items()]:
        (copy / path).write_text(text.lstrip())
    return copy


def test_a_new_algorithm_touches_only_its_file(copy: Path) -> None:
    wrong = f"{DOMAIN}.objective.ratio={{name: spo, widht: 0.1}}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "configs/smoke.yaml"), wrong, *OVERRIDES],
        cwd=copy,
        env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    # Rewards 1, 2, 4 less their mean 7/3, halved; the loss is of a ratio of 1, which gains A.
    assert printed["advantages"] == pytest.approx([-2 / 3, -1 / 6, 5 / 6])
    assert printed["loss"] == pytest.approx(-(1 + 2 + 4) / 3)
    assert "router_agreement is 0.8, below" in printed["stop"]
    assert "; set routing.replay to r3" in printed["stop"]
    assert "ratio.widht: unknown key" in printed["wrong"]
    assert printed["listed"]["objective.advantage"]["half"] == [
        "Half of the advantage of the group mean baseline.",
        "Return (R - mean of the group) / 2, [groups, G].",
        "this page",
    ]
    assert "spo" in printed["listed"]["objective.ratio"]
    assert printed["refused"].startswith("no formula for advantage 'half' in stages/audit/")


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
