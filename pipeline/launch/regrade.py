"""The grades of recorded samples by a run's rewards as they are now, which may have been edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.errors import UserError
from pipeline.launch.one_off import answer_of
from pipeline.run.directory import check_owner
from pipeline.run.run import Run


def regrade(
    run: Run, stage: str, rows: Sequence[Mapping[str, Any]], trusted: bool
) -> list[dict[str, Any]]:
    """Return the `reward`, `parts`, `messages` and `failure` that samples of a stage earn now.

    `rows` have the columns of recorded samples. The rewards are those of run.yaml, in a process of
    their own; what they read (the code of a Python reward, a judge) may have changed since.

    Raises:
        UserError: others may have written the run, which names code, and it is not trusted; a
            sample has no problem, or a domain that the run has not; a problem is not in its
            domain's data any more; a reward cannot be made.
    """
    check_owner(run, trusted)
    settings = run.settings
    for row in rows:
        if row["problem"] is None or row["domain"] not in settings.domains:
            raise UserError(f"{stage}: a sample without a problem of a domain cannot be graded")
    [graph_stage] = run.chosen([stage])
    job = {
        "domains": {
            name: settings.domains[name].model_dump(mode="json")
            for name in dict.fromkeys(row["domain"] for row in rows)
        },
        "tokenizer": settings.model.tokenizer,
        "pool": settings.rewards.model_dump(mode="json"),
        "seed": settings.seed,
        "stage": graph_stage.seeded_as,
        "samples": [
            {
                "domain": row["domain"],
                "problem": row["problem"],
                "response": row["response"],
                "tokens": row["tokens"],
                "finished": row["finish_reason"] == "stop",
            }
            for row in rows
        ],
    }
    found: list[dict[str, Any]] = answer_of("the grading", "stages.regrade", job)
    return found
