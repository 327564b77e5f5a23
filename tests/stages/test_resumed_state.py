"""The loop resumes from a checkpoint that another version wrote, or refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel.checkpoint import load
from parallel.files import CheckpointError
from stages import loop
from stages.settings import StageJob


class OfToday:
    """A stage whose state has one thing in it."""

    policy = None

    def restore(self, state: dict[str, Any]) -> None:
        self.restored = state["rate"]


@pytest.mark.parametrize("rate", [{}, {"rate": 2}])
def test_a_state_that_lacks_something_names_it(
    rate: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path("runs/small/stages/experts.sums")
    saved = directory / "checkpoints/step_20"
    monkeypatch.setattr(load, "newest_intact", lambda directory: (saved, []))
    monkeypatch.setattr(load, "training_state", lambda policy, path: {"step": 20, **rate})
    stage, job = OfToday(), StageJob.model_construct(stage="experts.sums", directory=directory)
    if rate:
        assert loop._load(stage, job, saved.parent) == {"step": 20, "rate": 2}
        assert stage.restored == 2
        return
    with pytest.raises(CheckpointError) as caught:
        loop._load(stage, job, saved.parent)
    assert str(caught.value) == (
        f"{saved}: another version of Braid wrote it: state.json has no 'rate'; resume with that "
        "version, or rerun the stage: braid resume runs/small --from experts.sums"
    )
