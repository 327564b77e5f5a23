"""The commands on a domain's file: `braid domain new` and `braid domain check`."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from parallel.files import CHARACTERS
from pipeline.commands import common
from pipeline.commands.command import GROUPS, Argument, command, positive
from pipeline.commands.common import JSON, TRUST, print_json
from pipeline.config.validate import load_domain, load_with_domain
from pipeline.errors import BraidError
from pipeline.launch import one_off
from pipeline.launch.launcher import checkpoint_path
from pipeline.launch.processes import Signals
from pipeline.report.domain import check, previewed, write_starter
from pipeline.report.tables import Cell, table
from pipeline.report.terminal import terminal
from pipeline.slurm.queue import check_not_queued
from pipeline.text import say, shown
from stages.rewards.reward import RewardPoolSettings
from stages.settings import DomainCheckJob

DOMAIN_HELP = """\
  braid domain new geometry --source jsonl
  braid domain check configs/domains/geometry.yaml --tokenizer /models/tokenizer
  braid domain check configs/domains/geometry.yaml --run quickstart --stage cold_start

`check` scores the reference answers, an empty response and a wrong one; the exit code is 1 where a
reward does not distinguish them. With --run it also samples one step's responses from a model and
shows their rewards. `new` never overwrites.

JSON of `check`: {"valid", "errors": [TEXT], "preview": the samples and rewards, or null}.
"""
GROUPS["domain"] = ("write a domain's file, and check one", DOMAIN_HELP)


@command(
    "domain check",
    "show a domain's prompts, and whether its rewards tell right from wrong",
    DOMAIN_HELP,
    Argument("file", type=Path, metavar="FILE", help="the domain's YAML file"),
    Argument("--prompts", type=positive, default=5, help="prompts to show and score (default: 5)"),
    Argument(
        "--tokenizer",
        type=Path,
        help="directory of a Hugging Face tokenizer (default: the run's, else single characters)",
    ),
    Argument("--run", metavar="RUN", help="also sample responses, with this run's engine"),
    Argument("--stage", help="sample from the model of this finished stage of the run"),
    Argument(
        "--samples", type=positive, help="responses per prompt (default: sampling.group_size)"
    ),
    TRUST,
    JSON,
)
def domain_check(arguments: Namespace) -> None:
    """Show a domain and check its rewards; with a run, also on a model's responses."""
    if arguments.run is not None:
        _check_with_run(arguments)
        return
    if arguments.stage or arguments.samples:
        raise BraidError("--stage and --samples need --run")
    directory: Path | None = arguments.tokenizer
    tokenizer = CHARACTERS if directory is None else str(directory.absolute())
    _report(arguments, _errors(arguments, RewardPoolSettings(), tokenizer))


def _check_with_run(arguments: Namespace) -> None:
    """Check with a run's tokenizer and limits, and sample one step's responses from its model."""
    if arguments.tokenizer or not arguments.stage:
        raise BraidError("--run needs --stage, and excludes --tokenizer: a run has its own")
    run = common.owned(arguments)
    one_off.finished_training(run, arguments.stage)
    settings = load_with_domain(run.settings_file, arguments.file, arguments.samples)
    model, rewards = run.settings.model, run.settings.rewards
    errors = _errors(arguments, rewards, model.tokenizer, model.max_positions)
    checkpoint, name = checkpoint_path(run, arguments.stage), arguments.file.stem
    with run.lock():
        check_not_queued(run)
        found = one_off.preview(run, settings, terminal(), common.PROGRAMS, checkpoint, name)
    print("", *previewed(found), "", sep="\n")
    _report(arguments, errors, found)


def _errors(
    arguments: Namespace,
    pool: RewardPoolSettings,
    tokenizer: str,
    max_positions: int | None = None,
) -> list[str]:
    """Show the domain; return where its rewards do not tell right from wrong."""
    path: Path = arguments.file
    domain = load_domain(path, pool)
    # An unhandled signal would end this process and leave the temporary directory behind.
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="braid-domain-") as temporary:
        job = DomainCheckJob(
            domain=path.stem,
            settings=domain,
            tokenizer=tokenizer,
            pool=pool,
            prompts=arguments.prompts,
            max_positions=max_positions,
            result=Path(temporary) / "found.json",
        )
        return check(job, signals)


def _report(arguments: Namespace, errors: list[str], preview: dict[str, Any] | None = None) -> None:
    """Print the errors; raise BraidError where there are any."""
    path: Path = arguments.file
    if arguments.json:
        print_json(arguments, {"valid": not errors, "errors": errors, "preview": preview})
    if errors:
        print(table("", (), [(Cell("✗", "red"), error) for error in errors]))
        raise BraidError(f"{shown(path)}: its rewards (✗) do not tell right from wrong")
    say(f"{shown(path)} is valid, and its rewards tell right from wrong on these prompts")


@command(
    "domain new",
    "write configs/domains/NAME.yaml as a starting point",
    DOMAIN_HELP,
    Argument("name", metavar="NAME", help="the domain's name"),
    Argument(
        "--source",
        choices=("reasoning_gym", "jsonl", "parquet"),
        default="reasoning_gym",
        help="where its problems come from (default: reasoning_gym)",
    ),
)
def domain_new(arguments: Namespace) -> None:
    """Write a new domain's file."""
    path = write_starter(arguments.name, arguments.source)
    say(f"wrote {shown(path)}; check it with: braid domain check {shown(path)}")
