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

import torch

from parallel.errors import report_error, report_notice
from parallel.files import CheckpointRefused, write_atomically
from stages.audit.blocks import recorded_stage
from stages.audit.collection import collection_rows
from stages.audit.evaluation import evaluation_rows
from stages.audit.recorded import LONGEST, NotAuditable, RecordedRun, read_run
from stages.audit.stage_audit import Audited, audit_step, newest_step

# Of a stage that has no steps.
WHOLE = {"evaluate": evaluation_rows, "gate": evaluation_rows, "sample": collection_rows}
WIDE = 512


def main() -> None:
    """Run the job named by argv[1]."""
    job = json.loads(Path(sys.argv[1]).read_text())
    run = read_run(Path(job["run"]))
    if run.settings["model"]["hidden_size"] < WIDE:
        torch.set_num_threads(1)  # threads cost more than products this small
    results = []
    for stage in job["stages"]:
        report_notice(f"auditing {stage}")
        audited, why = Audited(stage, None, [], []), None
        try:
            audited = _audited(run, stage, job["step"])
        except NotAuditable as error:
            why = str(error)
        except KeyError as error:
            # Formulas that are missing raise NotAuditable: a key that is missing is one of a file.
            why = f"its files have no {error}, which the audit reads: were they written by another"
            why += " version of Braid?"
        except (CheckpointRefused, OSError) as error:
            report_error(str(error))
            sys.exit(1)
        except Exception as error:
            # Damaged files may raise anything in the arithmetic; intact ones raise nothing.
            why = f"its step cannot be recomputed: {repr(error)[:LONGEST]}"
        rows = [{**asdict(row), "agrees": row.agrees} for row in audited.rows]
        results.append({**asdict(audited), "rows": rows, "refused": why})
    write_atomically(Path(job["result"]), json.dumps(results) + "\n")


def _audited(run: RecordedRun, stage: str, step: int | None) -> Audited:
    if (rows := WHOLE.get(recorded_stage(run, stage).kind)) is not None:
        return Audited(stage, None, rows(run, stage), [])
    return audit_step(run, stage, newest_step(run, stage) if step is None else step)


if __name__ == "__main__":
    main()
