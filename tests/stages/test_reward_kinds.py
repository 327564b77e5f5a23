"""A new kind of reward is one file: the schema, the listing and the workers find it there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHOUT = '''
from typing import Literal
from stages.rewards.reward import RewardBase, register

class ShoutReward(RewardBase):
    """1 where the response is in capitals."""
    kind: Literal["shout"] = "shout"
    marks: int = 0

@register(ShoutReward)
def make(settings, directory):
    return lambda problem, response: float(response.text == problem.answer.upper())
'''
PROGRAM = """
import sys, json
from pathlib import Path
from stages.data.problem import Problem
from stages.rewards.kinds import KINDS
from stages.domains import DomainSettings
from pydantic import TypeAdapter
schema = TypeAdapter(DomainSettings.model_fields["rewards"].annotation)
rewards = schema.validate_python({"loud": {"kind": "shout", "marks": 1}})
heavy = {"torch", "numpy", "math_verify", "sympy", "jsonschema", "reasoning_gym", "transformers"}
loaded = sorted(heavy & set(sys.modules))
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response, RewardPoolSettings
pool = RewardPool({"words": rewards}, RewardPoolSettings(workers=1), Path.cwd())
futures = pool.submit(Problem("words", 0, "say hi", "hi"), [Response("HI", 1), Response("hi", 1)])
print(json.dumps({
    "kinds": {kind: each.settings.__doc__ for kind, each in KINDS.items()},
    "settings": rewards["loud"].model_dump(),
    "scores": [future.result(600).reward for future in futures],
    "loaded": loaded,
}))
pool.close()
"""


def test_a_new_kind_of_reward_is_one_file(tmp_path: Path) -> None:
    for floor in ("parallel", "stages"):
        shutil.copytree(REPOSITORY / floor, tmp_path / floor)
    (tmp_path / "stages/rewards/kinds/shout.py").write_text(SHOUT)
    found = json.loads(
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert found["kinds"]["shout"] == "1 where the response is in capitals."
    assert list(found["settings"].items())[-2:] == [("kind", "shout"), ("marks", 1)]
    assert found["scores"] == [1.0, 0.0]
    assert found["loaded"] == []
