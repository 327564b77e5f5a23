"""The audit's process: `python -m stages.audit.main JOB`.

JOB is JSON: `run`, the run's directory; `stages`, the stages to audit; `step`, or null for the
newest that can be audited; `result`, the file to write. The result is a list with one object a step
or evaluation: `stage`, `step`, `rows`, `notes`, and `refused`, the reason why it cannot be audited.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from parallel.checkpoint.reader import CheckpointRefused
from parallel.files import write_atomically
from parallel.status_pipe import report_error, report_notice
from stages.audit.evaluation import evaluation_rows
from stages.audit.recorded import LONGEST, NotAuditable, RecordedRun, read_run
from stages.audit.stage_audit import Audited, audit_step, auditable_steps, kind_of

MEASURING = ("evaluate", "gates")
WIDE = 512


def main() -> None:
    """Run the job named by argv[1]."""
    job = json.loads(Path(sys.argv[1]).read_text())
    run = read_run(Path(job["run"]))
    if run.settings["model"]["hidden_size"] < WIDE:
        torch.set_num_threads(1)  # threads cost more than products this small
    found = []
    for stage in job["stages"]:
        report_notice(f"auditing {stage}")
        try:
            found.append(_shown(_audited(run, stage, job["step"])))
        except NotAuditable as error:
            found.append(_refused(stage, str(error)))
        except KeyError as error:
            why = f"its files have no {error}: another version of Braid wrote them"
            found.append(_refused(stage, why))
        except (CheckpointRefused, OSError) as error:
            report_error(str(error))
            sys.exit(1)
        except Exception as error:
            # Damaged files may raise anything in the arithmetic; intact ones raise nothing.
            why = f"its step cannot be recomputed: {repr(error)[:LONGEST]}"
            found.append(_refused(stage, why))
    write_atomically(Path(job["result"]), json.dumps(found) + "\n")


def _audited(run: RecordedRun, stage: str, step: int | None) -> Audited:
    if kind_of(stage) in MEASURING:
        return Audited(stage, None, evaluation_rows(run, stage), [])
    if step is None:
        steps = auditable_steps(run, stage)
        if not steps:
            raise NotAuditable(
                f"no step of {stage} has both its samples and a checkpoint of the step before; set "
                "logging.auditable=true and loop.checkpoint_every=1, or name a --step"
            )
        step = steps[-1]
    return audit_step(run, stage, step)


def _refused(stage: str, why: str) -> dict[str, Any]:
    return {"stage": stage, "step": None, "rows": [], "notes": [], "refused": why}


def _shown(audited: Audited) -> dict[str, Any]:
    rows = [{**asdict(row), "agrees": row.agrees} for row in audited.rows]
    return {**asdict(audited), "rows": rows, "refused": None}


if __name__ == "__main__":
    main()
