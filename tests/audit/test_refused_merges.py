"""The audit refuses merges whose teachers or samples no file describes, with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.audit.blocks import recorded_stage
from stages.audit.recorded import NotAuditable
from stages.audit.token_steps import merge_step


@pytest.mark.parametrize("teachers", ["self", {"sums": "self", "words": "experts"}])
def test_a_merge_that_the_student_teaches_is_not_audited(teachers: Any) -> None:
    block = {
        **{"kind": "distill", "from": "cold_start", "teachers": teachers},
        **{"domains": None, "for_each": None, "as": None, "was": None},
    }
    settings = {"domains": {"sums": {}, "words": {}}, "stages": {"merge": block}}
    run: Any = SimpleNamespace(path=Path("runs/small"), settings=settings)
    with pytest.raises(NotAuditable) as caught:
        recorded_stage(run, "merge")
    assert str(caught.value) == (
        "merge has the teacher self, whose contexts are not recorded: it is not audited"
    )


def test_a_merge_with_data_is_not_audited() -> None:
    settings = {"method": "full_vocab_reverse_kl", "averaged_over": "domains", "data_share": 0.5}
    unread: Any = None
    with pytest.raises(NotAuditable, match="data_share above 0 trains on what no engine sampled"):
        merge_step(settings, [], unread, {}, unread, 1, {})
