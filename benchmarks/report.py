"""How large a report of many samples is, and how soon a browser shows it.

    python benchmarks/report.py [--samples 100000 1000000] [--repeats 5]

The run is tests/browser's, whose expert has recorded the samples: responses of 60 words in groups
of 8, drawn by Zipf's law from 5,000 words. `seconds_to_write` is of `braid report`;
`seconds_to_open` is from the navigation to the first page in headless Chromium without a network,
`seconds_to_samples` from a click until the sample browser is drawn; medians. Writes
benchmarks/report.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from machine import measured
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from stages.sampling.sample_files import samples_file, write_samples
from tests.browser.reported_run import EXPERT, key, write_reported
from tests.runs import braid, finish

RESULTS = Path(__file__).with_suffix(".json")
GROUP, OF_STEP = 8, 1024  # samples of a prompt, of a step
WORDS, LENGTH = 5000, 60


def record(directory: Path, samples: int) -> None:
    """Replace an expert's samples by this number of others."""
    shutil.rmtree(directory)
    draw = Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=3 + n % 8)) for n in range(WORDS)]
    weights = [1 / rank for rank in range(1, WORDS + 1)]
    for step in range(1, -(-samples // OF_STEP) + 1):
        rows = []
        for place in range(min(OF_STEP, samples - OF_STEP * (step - 1))):
            if place % GROUP == 0:
                prompt = f"prompt {draw.randrange(5000)}"
            text = " ".join(draw.choices(words, weights, k=LENGTH))
            rows.append(
                {
                    **{"step": step, "update": 0, "group": place // GROUP, "domain": "sums"},
                    **{"problem": key(prompt), "prompt": prompt, "response": text},
                    **{"tokens": LENGTH, "finish_reason": "stop", "reward": place % 2},
                    **{"solved": bool(place % 2), "reward_parts": {"exact": place % 2}},
                    **{"advantage": 0.5, "staleness": 0, "weight_version": step - 1},
                }
            )
        write_samples(samples_file(directory, step), rows)


def opened(browser: Browser, report: Path) -> tuple[float, float]:
    """Return the seconds until the report is shown, and from a click until its samples are."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    ready = float(page.locator("body").get_attribute("data-ready") or "nan") / 1000
    started = time.monotonic()
    page.get_by_role("link", name="Samples", exact=True).click()
    page.wait_for_selector("#count")
    seconds = time.monotonic() - started
    context.close()
    return ready, seconds


def measure(browser: Browser, samples: int, repeats: int) -> dict[str, Any]:
    """Return the sizes and times of a report of this number of recorded samples."""
    with tempfile.TemporaryDirectory(prefix="braid-benchmark-") as folder:
        run = write_reported(Path(folder) / "small")
        record(run.stage(EXPERT).rollouts, samples)
        started = time.monotonic()
        finish(braid(Path(folder), "report", "small"))
        seconds = time.monotonic() - started
        report = run.path / "report.html"
        times = [opened(browser, report) for _ in range(repeats)]
        return {
            "recorded": samples,
            "bytes": report.stat().st_size,
            "seconds_to_write": round(seconds, 2),
            "seconds_to_open": round(median(each for each, _ in times), 3),
            "seconds_to_samples": round(median(each for _, each in times), 3),
        }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        sizes = [measure(browser, each, arguments.repeats) for each in arguments.samples]
        browser.close()
    found = {**measured(), "reports": sizes}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
