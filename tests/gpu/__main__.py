"""Run the parts of the GPU lane one after another, within a time limit: see tests/gpu."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.bundle import VERSION_FILE, unusable
from tests.gpu.findings import PartResult, read, write

REPOSITORY = Path(__file__).parents[2]
# In the order of what is wanted most, should the time be up.
PARTS = {
    "check": ("machine", "losses", "parity", "refit", "determinism"),
    "bench": ("machine", "loss_speed", "model_speed"),
}
PARTS["all"] = tuple(dict.fromkeys(PARTS["check"] + PARTS["bench"]))
LEAST_SECONDS = 20.0  # a part that gets less is skipped
NOTHING_RAN = 3  # the exit status; argparse exits 2


def main() -> None:
    """Run the parts that the command line names; exit 1 where one is wrong, 3 where none ran."""
    asked = _arguments()
    if asked.bundle and (why := unusable(asked.bundle)):
        print(f"not used: {why}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + asked.seconds
    asked.out.mkdir(parents=True, exist_ok=True)
    results: list[PartResult] = []
    groups = [PARTS[asked.what]] if asked.together else [(part,) for part in PARTS[asked.what]]
    for parts in groups:
        results += _run(parts, asked, deadline - time.monotonic())
        write(asked.out / "gpu.json", results)  # also if the next part takes the machine down
    print(summary(results))
    table = "\n".join([*(each.table for each in results), summary(results)])
    (asked.out / "gpu.txt").write_text(table + "\n")
    sys.exit(exit_status(results))


def summary(results: list[PartResult]) -> str:
    """Return the number of parts that ran; `machine` is not one: it checks nothing."""
    parts = [each for each in results if each.part != "machine"]
    return f"{sum(not each.skipped for each in parts)} of {len(parts)} parts ran"


def exit_status(results: list[PartResult]) -> int:
    """Return 1 where a part is wrong, NOTHING_RAN where all were skipped, else 0."""
    if any(each.wrong for each in results):
        return 1
    ran = any(not each.skipped for each in results if each.part != "machine")
    return 0 if ran else NOTHING_RAN


def search_path(bundle: Path | None, path: str) -> str:
    """Return a PYTHONPATH with the bundle first, and without bundles for another Python."""
    given = [Path(entry) for entry in path.split(os.pathsep) if entry]
    bundles = [each for each in given if (each / VERSION_FILE).exists()]
    bundles += [bundle.absolute()] if bundle else []
    bad = [each for each in bundles if unusable(each)]
    first = [bundle.absolute()] if bundle else []
    return os.pathsep.join(str(each) for each in [*first, *given] if each not in bad)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("what", choices=PARTS, nargs="?", default="all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes in seconds")
    parser.add_argument("--together", action="store_true", help="all parts in one process")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all parts together")
    parser.add_argument(
        "--bundle", type=Path, help="directory of `make gpu-bundle`, for what this Python lacks"
    )
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
    environment["PYTHONPATH"] = search_path(asked.bundle, environment.get("PYTHONPATH", ""))
    if asked.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="braid-gpu-") as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.part", str(result)]
        command += ["--small"] * asked.small + [f"--device={asked.device}"]
        command += [f"--bundle={asked.bundle}"] if asked.bundle else []
        command += parts
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
