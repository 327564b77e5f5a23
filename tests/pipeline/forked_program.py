"""A program that a fork server forks in tests: prints where it runs as JSON, and obeys its name.

`python -m forked_program DIRECTORY ACTION`: each process adds a line to DIRECTORY/runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from parallel.errors import report_error


def main() -> None:
    """Do what the second argument says."""
    directory, action = Path(sys.argv[1]), sys.argv[2]
    print(
        json.dumps(
            {
                "arguments": sys.argv[1:],
                "environment": {k: v for k, v in os.environ.items() if k.startswith("TEST_")},
                "cores": sorted(os.sched_getaffinity(0)),
                "directory": str(Path.cwd()),
                "leads_its_session": os.getsid(0) == os.getpid(),
                "parent": os.getppid(),
                "input": str(Path("/proc/self/fd/0").readlink()),
                "forked": "forked_preload" in sys.modules,
                "threads": getattr(sys.modules.get("torch"), "get_num_threads", lambda: None)(),
            }
        )
    )
    with (directory / "runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    if action == "wait":
        time.sleep(60)
    if action == "fail":
        report_error("it was asked to")
        sys.exit(3)


if __name__ == "__main__":
    main()
