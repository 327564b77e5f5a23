"""Run the parts of the GPU lane one after another, within a time limit: see tests/gpu."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.findings import PartResult, read, write

REPOSITORY = Path(__file__).parents[2]
# In the order of what is wanted most, should the time be up.
PARTS = {
    "check": ("machine", "losses", "parity", "refit", "determinism"),
    "bench": ("machine", "loss_speed", "model_speed"),
}
PARTS["all"] = tuple(dict.fromkeys(PARTS["check"] + PARTS["bench"]))
LEAST_SECONDS = 20.0  # a part that gets less is skipped


def main() -> None:
    """Run the parts that the command line names; exit 1 where one is wrong."""
    asked = _arguments()
    deadline = time.monotonic() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    results: list[PartResult] = []
    groups = [PARTS[asked.what]] if asked.together else [(part,) for part in PARTS[asked.what]]
    for parts in groups:
        results += _run(parts, asked, deadline - time.monotonic())
        write(asked.out / "gpu.json", results)  # also if the next part takes the machine down
    table = "\n".join(each.table for each in results)
    (asked.out / "gpu.txt").write_text(table + "\n")
    sys.exit(any(each.wrong for each in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("what", choices=PARTS, nargs="?", default="all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--together", action="store_true", help="all parts in one process")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all parts together")
    out = Path(os.environ.get("OUT") or REPOSITORY / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=out, help="directory of gpu.json and gpu.txt")
    return parser.parse_args()


def _run(parts: tuple[str, ...], asked: argparse.Namespace, seconds: float) -> list[PartResult]:
    """Run parts in one new process and print what they found."""
    if seconds < LEAST_SECONDS:
        results = [PartResult(part, skipped="the time is up") for part in parts]
    else:
        results = _in_process(parts, asked, seconds)
    for each in results:
        print(each.table, flush=True)
    return results


def _in_process(
    parts: tuple[str, ...], asked: argparse.Namespace, seconds: float
) -> list[PartResult]:
    environment = dict(os.environ)
    if asked.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="braid-gpu-") as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.part", str(result)]
        command += ["--small"] * asked.small + [f"--device={asked.device}", *parts]
        started = time.monotonic()
        log = asked.out / f"{parts[0]}.log"
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    command,
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                ).returncode
                why = f"exit {status}"
            except subprocess.TimeoutExpired:
                why = f"no result after {seconds:.0f} s"
        done = read(result) if result.exists() else []
        missing = parts[len(done) :]
        last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        spent = time.monotonic() - started
        failed = [PartResult(part, seconds=spent, failed=f"{why}: {last}") for part in missing]
        return done + failed


if __name__ == "__main__":
    main()
