"""What `braid domain new` and `braid domain check` do."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from parallel.files import CHARACTERS
from pipeline.commands import runs as commands
from pipeline.config.validate import load_domain, load_with_domain
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.launch import one_off
from pipeline.launch.jobs import checkpoint_path
from pipeline.launch.signals import Signals
from pipeline.report import domain_preview
from pipeline.report.domain_check import check
from pipeline.report.domain_starter import write_starter
from pipeline.report.terminal import terminal
from pipeline.slurm.jobs import refuse_queued
from pipeline.text import say
from stages.rewards.settings import RewardPoolSettings
from stages.settings import DomainCheckJob


def domain_new(arguments: Namespace) -> None:
    """Write a domain's file to begin with."""
    path = write_starter(arguments.name, arguments.source)
    say(f"wrote {shown(path)}; see what it says with: braid domain check {shown(path)}")


def domain_check(arguments: Namespace) -> None:
    """Show a domain, and whether its rewards tell right from wrong; with a run, on a model too."""
    if arguments.run is not None:
        _check_with_run(arguments)
        return
    if arguments.stage or arguments.samples:
        raise BraidError("--stage and --samples are of a --run, which is not given")
    folder: Path | None = arguments.tokenizer
    tokenizer = CHARACTERS if folder is None else str(folder.absolute())
    console = terminal()
    _judge(arguments, _faults(arguments, RewardPoolSettings(), tokenizer, console), console)


def _check_with_run(arguments: Namespace) -> None:
    """The same with a run's tokenizer and limits, and one step's responses from its model."""
    if arguments.tokenizer or not arguments.stage:
        raise BraidError("--run needs a --stage, and takes no --tokenizer: a run has its own")
    run, own = commands.owned(arguments)
    one_off.finished_training(run, own, arguments.stage)
    name, console = arguments.file.stem, terminal()
    settings = load_with_domain(run.settings, arguments.file, arguments.samples)
    model = own.model
    faults = _faults(arguments, own.rewards, model.tokenizer, console, model.max_positions)
    checkpoint = checkpoint_path(run, arguments.stage)
    console.print()
    with run.lock():
        refuse_queued(run)
        found = one_off.preview(run, settings, console, commands.PROGRAMS, checkpoint, name)
    console.print()
    console.print(domain_preview.examples(found["groups"]))
    console.print()
    failures = found["failures"], found["watch_failures"]
    for line in domain_preview.lines(found["groups"], *failures):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for histogram in domain_preview.histograms(found["groups"]):
        console.print()
        console.print(histogram)
    console.print()
    _judge(arguments, faults, console)


def _faults(
    arguments: Namespace,
    pool: RewardPoolSettings,
    tokenizer: str,
    console: Console,
    max_positions: int | None = None,
) -> list[str]:
    """Show the domain; where its rewards do not tell right from wrong."""
    path: Path = arguments.file
    domain = load_domain(path, pool)
    # A signal that ended this process by itself would leave the folder behind.
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="braid-domain-") as folder:
        job = DomainCheckJob(
            domain=path.stem,
            settings=domain,
            tokenizer=tokenizer,
            pool=pool,
            prompts=arguments.prompts,
            max_positions=max_positions,
            result=Path(folder) / "found.json",
        )
        return check(job, console, signals)


def _judge(arguments: Namespace, faults: list[str], console: Console) -> None:
    """Raises BraidError where a reward does not tell right from wrong."""
    path: Path = arguments.file
    for fault in faults:
        console.print(Text.assemble(("✗ ", "red"), fault))
    if faults:
        raise BraidError(f"{shown(path)}: its rewards (✗) do not tell right from wrong")
    say(f"{shown(path)} is valid, and its rewards tell right from wrong on these prompts")
