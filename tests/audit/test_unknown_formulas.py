"""The audit names an algorithm that it has no formula for, and audits the other stages."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.audit import formulas, main
from stages.audit.advantages import advantages
from stages.audit.objective import Facts, UpdateCounts, aggregate, terms
from stages.audit.recorded import NotAuditable, RecordedRun
from stages.audit.stage_audit import Audited
from stages.objectives.loss import ObjectiveSettings
from stages.objectives.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    RATIOS,
    Registry,
)
from tests.stages.objectives.objective_cases import documented

REGISTRIES: list[tuple[Registry, formulas.Formulas]] = [
    (ADVANTAGES, formulas.ADVANTAGES),
    (RATIOS, formulas.RATIOS),
    (CORRECTIONS, formulas.CORRECTIONS),
    (KL_ESTIMATORS, formulas.KL_ESTIMATORS),
    (AGGREGATIONS, formulas.AGGREGATIONS),
]
KEYS = [registry.key for registry, _ in REGISTRIES]
NO_WEIGHTS = "none"  # the correction that multiplies nothing


@pytest.mark.parametrize(("registry", "audited"), REGISTRIES, ids=KEYS)
def test_every_documented_algorithm_has_a_formula(
    registry: Registry, audited: formulas.Formulas
) -> None:
    """A row in the page makes an algorithm the project's; others may do without a formula."""
    ours = documented() & registry.keys()
    assert audited.keys() <= registry.keys()
    assert ours
    assert ours - audited.keys() <= {NO_WEIGHTS}
    if without := sorted(registry.keys() - audited.keys() - {NO_WEIGHTS}):
        pytest.skip(f"{audited.path} has no formula for {audited.key} {', '.join(without)}")


@pytest.mark.parametrize(
    ("key", "block"),
    [
        ("ratio", {"ratio": {"name": "half"}}),
        ("correction", {"correction": {"name": "half", "level": "token"}}),
        ("kl.estimator", {"kl": {"estimator": "half"}}),
    ],
)
def test_an_unknown_part_of_a_loss_is_named(key: str, block: dict[str, Any]) -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    facts = Facts(zeros, zeros, zeros, zeros, stale=False, reference=zeros)
    objective = ObjectiveSettings().model_dump() | block
    with pytest.raises(NotAuditable) as caught:
        terms(facts, objective, correct_all=True)
    assert str(caught.value).startswith(
        f"no formula for {key} 'half' in stages/audit/objective.py; add one beside '"
    )


def test_an_unknown_advantage_and_aggregation_are_named() -> None:
    with pytest.raises(NotAuditable) as caught:
        advantages([], {"name": "half"}, {})
    assert str(caught.value) == (
        "no formula for advantage 'half' in stages/audit/advantages.py; add one beside 'grpo'"
    )
    with pytest.raises(NotAuditable, match="no formula for aggregation 'half' in stages/audit/"):
        aggregate(torch.zeros(3), "half", UpdateCounts(1, 3, 3))


def test_a_name_has_one_formula() -> None:
    two = copy.deepcopy(formulas.RATIOS)
    with pytest.raises(ValueError, match=r"objective\.py: ratio token is registered twice"):
        two.register("token")(len)


def test_the_other_stages_are_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that is missing and a key that no file has are two causes."""

    def audited(run: RecordedRun, stage: str, step: int | None) -> Audited:
        if stage == "ours":
            formulas.ADVANTAGES.find("half")
        if stage == "older":
            run.settings["rollout"]
        return Audited(stage, step, [], [])

    job, result = tmp_path / "job.json", tmp_path / "result.json"
    stages = ["ours", "older", "theirs"]
    job.write_text(
        json.dumps({"run": str(tmp_path), "stages": stages, "step": 3, "result": str(result)})
    )
    (tmp_path / "run.yaml").write_text("model: {hidden_size: 512}")
    monkeypatch.setattr(main, "_audited", audited)
    monkeypatch.setattr(sys, "argv", ["audit", str(job)])
    main.main()
    refused = {stage["stage"]: stage["refused"] for stage in json.loads(result.read_text())}
    assert refused == {
        "ours": "no formula for advantage 'half' in stages/audit/advantages.py; add one beside"
        " 'grpo'",
        "older": "its files have no 'rollout', which the audit reads: were they written by another"
        " version of Braid?",
        "theirs": None,
    }
