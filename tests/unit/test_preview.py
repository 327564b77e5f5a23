"""What a preview writes: a real policy and a real pool on what fake engines draw."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from fake_engines import MODEL, FakeEngine
from test_rollout_modes import RefittedFleet, one_rank  # noqa: F401

from parallel import checkpoints
from parallel.settings import EngineSettings, LayoutSettings
from stages import preview
from stages.domains.rewards.settings import RewardPoolSettings
from stages.settings import DomainSettings, LoggingSettings, RunSettings, StageJob


def test_every_sample_of_one_step_is_graded_and_written(tmp_path: Path) -> None:
    domain = DomainSettings.model_validate(
        {
            "prompts": {"dataset": "chain_sum"},
            "rewards": {"parity": {"kind": "python", "function": "small_rewards:parity"}},
            "sampling": {"prompts_per_step": 3, "group_size": 5, "max_response_tokens": 8},
            "optimizer": {"learning_rate": 1e-2},
            "loop": {"steps": 1},
        }
    )
    settings = RunSettings.model_construct(
        name="toy",
        seed=0,
        deterministic=False,
        model=MODEL,
        layout=LayoutSettings(),
        engine=EngineSettings(),
        rewards=RewardPoolSettings(workers=1),
        experts={"sums": domain},
        logging=LoggingSettings(wandb="disabled"),
    )
    engine = FakeEngine()
    job = StageJob.model_construct(
        stage="preview",
        domain="sums",
        directory=tmp_path,
        attempt=1,
        parent=tmp_path / "step_2",
        engine_addresses=[engine],
        settings=settings,
    )
    with (
        mock.patch("stages.rollout.Fleet", RefittedFleet),
        mock.patch.object(checkpoints, "load_weights") as load_weights,
    ):
        preview.run(job)
    assert load_weights.call_args.args[1] == tmp_path / "step_2"
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["failures"] == []
    assert [len(group) for group in found["groups"]] == [5, 5, 5]
    samples = [sample for group in found["groups"] for sample in group]
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}
    for sample in samples:
        assert sample["parts"] == {"parity": sample["reward"]}
        assert sample["solved"] == (sample["reward"] == 1.0)
        assert 1 <= sample["tokens"] <= 8
        assert sample["finished"] or sample["tokens"] == 8
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == sum(s["reward"] for s in samples) / len(samples)
