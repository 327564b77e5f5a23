"""Every benchmark of a part, one after another: `make bench`.

    python benchmarks/all.py [NAME ...]

Writes benchmarks/results.json, replacing the named parts (all, by default) and keeping the rest.
Each ratio is measured in one run of this machine; leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PARTS = (
    "vocabulary",
    "packing",
    "checkpoints",
    "hugging_face",
    "refit",
    "refit_plan",
    "weight_loading",
    "rewards",
    "thousand_stages",
)


def main() -> None:
    """Run each part in a process of its own, so that none's memory counts for another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}")
    names = parser.parse_args().parts or PARTS
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        command = [sys.executable, "-W", "ignore", str(HERE / f"{name}.py")]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[name] = json.loads(output[output.index("{") :])
        print(json.dumps(results[name], indent=1), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
