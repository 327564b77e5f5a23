"""docs/run.md names every key of a run's configuration, and its defaults are the defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from stages.settings import RunSettings

TEXT = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
ELSEWHERE = ("optimizer", "loop")  # blocks whose keys docs/domains.md has
TRAINED = {"optimizer": {"learning_rate": 1e-3}, "loop": {"steps": 1}}
DOMAINS = {"sums": {"prompts": {"dataset": "chain_sum"}, **TRAINED}}
REQUIRED: dict[str, Any] = {"name": "small", "learning_rate": 1e-3, "steps": 1}


def filled_in(value: Any, name: str = "") -> Any:
    """The block with something in place of what has no default."""
    if isinstance(value, dict):
        return {key: filled_in(child, key) for key, child in value.items()}
    return REQUIRED.get(name, 8) if value == "REQUIRED" else value


def without(value: Any, *names: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: without(child, *names) for key, child in value.items() if key not in names}


def test_every_key_is_there_with_its_default() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    written = filled_in(yaml.safe_load(block))
    assert written.pop("experts") == 8
    resolved = RunSettings.model_validate({**written, "experts": DOMAINS}).model_dump(mode="json")
    resolved.pop("experts")
    # Of `sampling` and `rollout`, whose further keys docs/domains.md has, it shows a part.
    merge = resolved["merge"]
    for name in ("sampling", "rollout"):
        merge[name] = {key: merge[name][key] for key in written["merge"][name]}
    assert without(written, *ELSEWHERE) == without(resolved, *ELSEWHERE)
