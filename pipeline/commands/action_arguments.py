"""The arguments of the commands that have actions: `braid gate` and `braid domain`."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

from pipeline.run.trust import OPTION

DOMAIN_HELP = """\
  braid domain new geometry --source jsonl
  braid domain check configs/domains/geometry.yaml --tokenizer /models/tokenizer
  braid domain check configs/domains/geometry.yaml --run quickstart --stage cold_start

`check` scores the reference answers, an empty response and one that answers nothing, and its exit
code is 1 where a reward does not tell them apart. With --run it draws one step's responses from a
model and shows what they earn. `new` never overwrites.
"""

GATE_HELP = """\
  braid gate override quickstart gates.spell_backward --reason "noise: 3 of 500 problems"

The reason stands in the ledger, and `braid status` and `braid why` show it. What waits for the gate
starts with the next `braid resume`. Only a gate that has stopped can be overridden.
"""


def add_gate_commands(command: Callable[[str, str, str], ArgumentParser]) -> None:
    """Add `braid gate`, by what adds a command of a name, a summary and a help."""
    gate = command("gate", "let a run go on that a gate has stopped", GATE_HELP)
    actions = gate.add_subparsers(metavar="ACTION", required=True)
    override = actions.add_parser(
        "override",
        help="let what waits for the gate start, and record why",
        epilog=GATE_HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    override.set_defaults(command="gate_override")
    # Laid over the `gate`'s own, which may stand before the action.
    override.add_argument("--runs-dir", type=Path, default=SUPPRESS, help="where runs lie")
    override.add_argument("run", metavar="RUN", help="the run's name, or its folder")
    override.add_argument("stage", metavar="STAGE", help="the gate, such as gates.math")
    override.add_argument("--reason", required=True, help="why, in a sentence, for the ledger")


def add_domain_commands(command: Callable[[str, str, str], ArgumentParser]) -> None:
    """Add `braid domain`, likewise."""
    domain = command("domain", "write a domain's file, and check one", DOMAIN_HELP)
    actions = domain.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="show a domain's prompts, and whether its rewards tell right from wrong",
        epilog=DOMAIN_HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    check.set_defaults(command="domain_check")
    # Laid over the `domain`'s own, which may stand before the action.
    check.add_argument("--runs-dir", type=Path, default=SUPPRESS, help="where runs lie")
    check.add_argument("file", type=Path, metavar="FILE", help="the domain's YAML file")
    check.add_argument(
        "--prompts", type=positive, default=5, help="how many to show and score (default: 5)"
    )
    check.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of a Hugging Face tokenizer (default: the run's, else single characters)",
    )
    check.add_argument("--run", metavar="RUN", help="also draw responses, with this run's engine")
    check.add_argument("--stage", help="from the model of this finished stage of the run")
    check.add_argument(
        "--samples", type=positive, help="responses to a prompt (default: sampling.group_size)"
    )
    add_trust(check)
    new = actions.add_parser("new", help="write configs/domains/NAME.yaml, to begin with")
    new.set_defaults(command="domain_new")
    new.add_argument("name", metavar="NAME")
    new.add_argument(
        "--source",
        choices=("reasoning_gym", "jsonl", "parquet"),
        default="reasoning_gym",
        help="where its problems come from (default: reasoning_gym)",
    )


def add_trust(parser: ArgumentParser) -> None:
    """Add the option of everything that works on a run, or takes stages from one."""
    parser.add_argument(
        OPTION,
        action="store_true",
        help="work on the run although other users own it or may write to it",
    )


LARGEST = 10**18 - 1  # what fits a file's name, and 64 bits


def whole(text: str) -> int:
    """A number of a step. Raises ArgumentTypeError, as argparse wants it."""
    if not _is_number(text):
        raise ArgumentTypeError(f"{text[:40]} is not a number from 0 to {LARGEST}")
    return int(text)


def positive(text: str) -> int:
    """A number that is not 0. Raises ArgumentTypeError, as argparse wants it."""
    if not _is_number(text) or not int(text):
        raise ArgumentTypeError(f"{text[:40]} is not a number from 1 to {LARGEST}")
    return int(text)


def _is_number(text: str) -> bool:
    """Return whether it is a whole number that a file's name can hold."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST))
