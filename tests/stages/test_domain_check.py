"""The check of a domain: rewards that hang on its rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parallel.sample import Sample
from parallel.settings import CHARACTERS
from stages.domain_tools.domain_check import checked
from stages.domain_tools.response_lengths import longest_turn
from stages.rewards.reward import RewardError
from stages.settings import DomainCheckJob
from tests.byte_tokenizer import CHATML, save_tokenizer

ROWS = 20


def job(directory: Path, slow: int) -> DomainCheckJob:
    """Return the check of rows of which some have an answer that is scored for a minute."""
    answers = ["sleep 60" if row < slow else "1" for row in range(ROWS)]
    rows = ({"prompt": f"say {n}", "answer": answer} for n, answer in enumerate(answers))
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"kind": "python", "function": "tests.stages.small_rewards:does", "timeout_seconds": 0.3}
    domain = {
        "prompts": {"source": "jsonl", "path": f"{directory}/rows.jsonl", "answer": "answer"},
        "rewards": {"right": own},
        "optimizer": {"learning_rate": 1},
        "loop": {"steps": 1},
    }
    return DomainCheckJob.model_validate(
        {
            "domain": "sums",
            "settings": domain,
            "tokenizer": CHARACTERS,
            "pool": {"workers": 1},
            "prompts": ROWS,
            "result": directory / "result.json",
        }
    )


def test_scoring_stops_after_three_timeouts(tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        checked(job(tmp_path, slow=ROWS))
    found = re.match(
        r"scoring timed out (\d+) times, and the rest is not scored; ", str(caught.value)
    )
    assert found and 3 <= int(found[1]) < ROWS // 2
    first = (
        "first: domains.sums.rewards.right: took more than 0.3 seconds and was killed for problem"
    )
    assert first in str(caught.value)


def test_two_timeouts_are_scores(tmp_path: Path) -> None:
    found = checked(job(tmp_path, slow=2))
    rewards = [each["reward"] for row in found["prompts"] for each in row["responses"]]
    assert len(rewards) > 2 * ROWS and None not in rewards


def test_prompts_are_those_of_the_run_s_date_and_arguments(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }} {{ style }}" + CHATML
    folder = save_tokenizer(tmp_path / "tokenizer", template)
    template_keys = {
        "tokenizer": str(folder),
        "chat_template_arguments": {"style": "terse"},
        "chat_template_date": "2026-02-03",
    }
    given = job(tmp_path, slow=0).model_dump(mode="json")
    rows = ({"prompt": [{"role": "user", "content": str(n)}], "answer": "1"} for n in range(9))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = checked(DomainCheckJob.model_validate({**given, **template_keys, "prompts": 1}))
    [shown] = report["prompts"]
    assert shown["prompt"].startswith("03 Feb 2026 terse<|im_start|>user\n")


def test_references_are_measured_with_the_end_token_against_the_limit(tmp_path: Path) -> None:
    given = job(tmp_path, slow=0).model_dump(mode="json")
    rows = [{"prompt": f"{n}", "answer": "1" * (1 + n % 4)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given["settings"]["sampling"]["max_response_tokens"] = 4
    right = checked(DomainCheckJob.model_validate({**given, "prompts": 1}))["references"]
    assert (right["checked"], right["limit"], right["too_long"]) == (40, 4, 10)
    assert (right["tokens"][0], right["tokens"][50], right["tokens"][100]) == (2, 4, 5)


def test_the_longest_of_several_turns_is_measured() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0])
    sample = Sample(domain="a", prompt=np.arange(2), response=np.arange(9), loss_mask=mask)
    assert longest_turn(sample) == 3
    assert longest_turn(Sample(domain="a", prompt=np.arange(2), response=np.arange(9))) == 9
    assert longest_turn(replace(sample, loss_mask=np.zeros(9))) == 0
