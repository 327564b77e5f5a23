"""An engine that samples nothing: it writes its address and waits, or fails on demand.

python fake_engine.py ENGINE_JOB wait|die|refuse|hang|fall|forget
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    path, action = Path(sys.argv[1]), sys.argv[2]
    job = json.loads(path.read_text())
    with (path.parent / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if action == "die":
        print("RuntimeError: not enough memory for the cache")
        sys.exit(1)
    if action == "refuse":
        os.write(int(os.environ["BRAID_STATUS_DESCRIPTOR"]), b"braid-error: it does not fit\n")
        sys.exit(1)
    if action == "hang":
        time.sleep(600)
    if action == "fall":
        os.kill(os.getpid(), signal.SIGKILL)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    node = int(os.environ.get("SLURM_PROCID", "0")) if job["nodes"] > 1 else 0
    (path.parent / f"gpus_{node}").write_text(str(visible))
    while node or len(list(path.parent.glob("gpus_*"))) < job["nodes"]:
        time.sleep(0.05)  # the first node's process serves, once all of them are up
    address = Path(job["address"])
    unfinished = address.with_suffix(".tmp")
    cores = sorted(os.sched_getaffinity(0))
    unfinished.write_text(json.dumps({"pid": os.getpid(), "cores": cores}))
    unfinished.rename(address)
    if action == "forget" and job["index"] == 1:
        os.write(int(os.environ["BRAID_STATUS_DESCRIPTOR"]), b"braid-error: it lost its mind\n")
        sys.exit(1)
    time.sleep(600)


if __name__ == "__main__":
    main()
