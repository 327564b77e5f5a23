"""The data of `braid report --demo`, written from a run: `python -m tools.demo RUN_DIRECTORY`."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from pipeline.commands.support.runs import read_run
from pipeline.report.page.document import document
from pipeline.report.page.file import DEMO
from pipeline.run.directory import RunDirectory

SAMPLES = 1500  # in it; a package should stay small


def main() -> None:
    """Write the data of the run that argv[1] names, without the path it has here."""
    found = document(read_run(RunDirectory(Path(sys.argv[1]))), [], False, SAMPLES)
    found["run"]["path"] = f"runs/{found['run']['name']}"
    packed = gzip.compress(json.dumps(found, allow_nan=False).encode(), 9, mtime=0)
    DEMO.write_bytes(packed)
    print(f"{DEMO}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
