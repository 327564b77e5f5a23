"""The command that writes a run as one HTML file: `braid report`."""

from __future__ import annotations

import json
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.files import write_atomically
from pipeline.commands.support.arguments import positive
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import find, load_run, read_run
from pipeline.run.directory import RUNS_AS, exposure
from pipeline.run.run import Run
from pipeline.slurm.queue import states_now
from pipeline.text import human, say, shown, while_slow

DEMO_FILE = Path("braid-demo.html")
MOST_SAMPLES, MOST_BYTES = 100_000, 40 << 20  # of a report, unless --samples says how many
FEWEST_SAMPLES = 1000  # below which a report is not made smaller
FEWER = 0.9  # of the samples that would fit, were all of one size
SECONDS = 5.0  # between two looks at a run that is watched


def _file(text: str) -> Path:
    """Return the path of a file that may be replaced; raise ArgumentTypeError for another."""
    path = Path(text)
    if not text or (path.exists() and not path.is_file()):
        raise ArgumentTypeError(f"{text!r} is not a file that could be replaced")
    return path


@command(
    "report",
    "write a run as one HTML file that a browser opens without a network",
    "  braid report quickstart                         writes runs/quickstart/report.html\n"
    "  braid report quickstart longer --output both.html      with the curves of a second run\n"
    "  braid report quickstart --redact                without prompts, responses and messages\n"
    "  braid report quickstart --watch                 again at each checkpoint, until it ends\n"
    "  braid report --demo                             of a small run that comes with Braid\n\n"
    "The file has its data and its charts in it; mail it, or keep it beside a result.",
    Argument("run", metavar="RUN", nargs="?", help="the run's name or directory"),
    Argument(
        "others", metavar="OTHER_RUN", nargs="*", default=[], help="runs whose curves are added"
    ),
    Argument(
        "--output",
        dest="written",  # `output` is where --json goes
        type=_file,
        metavar="FILE",
        help="(default: report.html in the run, where nobody else may write)",
    ),
    Argument(
        "--redact",
        action="store_true",
        help="keep numbers and names alone: no text of a sample, and no hash of one",
    ),
    Argument(
        "--samples",
        type=positive,
        metavar="N",
        help="at most N samples; of more, those of a part of the prompts (default: 100,000, or"
        " fewer, for a file of 40 MiB)",
    ),
    (
        Argument("--watch", action="store_true", help="write it again whenever a stage has saved"),
        Argument(
            "--demo", action="store_true", help=f"write {DEMO_FILE}, a report of a bundled run"
        ),
    ),
    place=90,
)
def report(arguments: Namespace) -> None:
    """Write the report of a run."""
    if arguments.demo:
        # pyarrow takes a fifth of a second to import, which no other command should wait for.
        from pipeline.report.page.file import demo_document, report_file

        if arguments.run is not None:
            raise UserError("--demo is of the run that comes with Braid: name no RUN")
        _write(arguments.written or DEMO_FILE, report_file(demo_document()))
        return
    if arguments.run is None:
        raise UserError("name a RUN, or take --demo")
    run = load_run(arguments)
    if arguments.written is None and (others_write := exposure(run)) is not None:
        place, _, _ = others_write.partition(f", and {RUNS_AS}")
        raise UserError(f"{place}; write the report of this run elsewhere with: --output FILE")
    _write_run(arguments, run)
    while arguments.watch and _is_running(run):
        before = _saved(run)
        while _saved(run.refresh()) == before and _is_running(run):
            time.sleep(SECONDS)
        _write_run(arguments, run.refresh())


def _write_run(arguments: Namespace, run: Run) -> None:
    from pipeline.report.page.document import document
    from pipeline.report.page.file import report_file
    from pipeline.report.page.recorded import Recorded
    from pipeline.report.page.redaction import redact

    def text_of(data: dict[str, Any]) -> str:
        return report_file(redact(data, [run, *other_runs]) if arguments.redact else data)

    other_runs = [read_run(find(arguments.runs_dir, name)) for name in arguments.others]
    samples = arguments.samples or MOST_SAMPLES
    with while_slow(f"reading {shown(run.path)}: metrics, samples, timelines"):
        report_data = document(run, other_runs, arguments.redact, samples)
    with while_slow("writing the page"):
        text = text_of(report_data)
    # Again until it fits: a share of the samples is not that share of the bytes.
    while arguments.samples is None and len(text) > MOST_BYTES and samples > FEWEST_SAMPLES:
        shown_samples = sum(
            len(table["columns"]["step"]) for table in report_data["samples"].values()
        )
        samples = max(
            FEWEST_SAMPLES, int(FEWER * min(samples, shown_samples) * MOST_BYTES / len(text))
        )
        report_data["samples"] = Recorded(run, arguments.redact, samples).tables()
        text = text_of(report_data)
    _write(arguments.written or run.path / "report.html", text)


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        why = f"{shown(path)}: {error.strerror}"
        raise UserError(f"{why}; write it elsewhere with: --output FILE") from error
    say(f"{shown(path)}: {human(len(text.encode()))}", flush=True)


def _is_running(run: Run) -> bool:
    return any(state.state in ("running", "submitted") for state in states_now(run).values())


def _saved(run: Run) -> str:
    """Return what changes whenever a stage saves a checkpoint, or enters another state."""
    newest = {
        stage.name: (
            checkpoint.step if (checkpoint := run.stage(stage.name).newest_checkpoint()) else None
        )
        for stage in run.stages
    }
    return json.dumps([newest, len(run.events)])
