"""The command that shows what is installed: `braid doctor`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from parallel.errors import UserError
from pipeline.commands.support.arguments import JSON, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.config.validate import load_cluster
from pipeline.report.doctor import probe, section_table, sections
from pipeline.text import say


@command(
    "doctor",
    "show what is installed here, what Braid uses of it, and what to fix",
    "  braid doctor\n"
    "  srun --gres=gpu:8 braid doctor --cluster configs/clusters/mine.yaml    on a node\n\n"
    "✓ works, · is a note, ✗ keeps stages from running and makes the exit code 1: a login node\n"
    "without torch has one too, and still validates, plans and shows runs.\n"
    "`make install` builds an environment for the CPU in which everything works, and\n"
    "`make install-gpu` one for GPUs.\n\n"
    'JSON: {"errors": COUNT, "sections": {HEADING: [{"name", "value", "verdict", "fix"}]}}.',
    Argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="a cluster's profile: fewer GPUs here than it says is an error",
    ),
    JSON,
    place=30,
)
def doctor(arguments: Namespace) -> None:
    """Show what is installed, what is used here, and how to fix what is missing."""
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    section_rows = list(sections(probe(), arguments.runs_dir, cluster))
    errors = sum(row.verdict == "error" for _, rows in section_rows for row in rows)
    if arguments.json:
        tables = {heading: [asdict(row) for row in rows] for heading, rows in section_rows}
        print_json(arguments, {"errors": errors, "sections": tables})
    else:
        for heading, rows in section_rows:
            print(section_table(heading, rows), end="\n\n")
    if errors:
        raise UserError(f"{errors} of these (✗) keep stages from running here")
    if not arguments.json:
        say("everything that stages need works here")
