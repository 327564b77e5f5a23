"""An engine that samples nothing: it writes its address and waits, or dies as it is told.

python fake_engine.py ENGINE_JOB wait|die
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    job = Path(sys.argv[1])
    with (job.parent / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if sys.argv[2] == "die":
        print("RuntimeError: not enough memory for the cache")
        sys.exit(1)
    Path(json.loads(job.read_text())["address"]).write_text("{}")
    time.sleep(600)


if __name__ == "__main__":
    main()
