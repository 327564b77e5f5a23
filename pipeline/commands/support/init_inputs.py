"""The options of `braid init`: their checks, the model and the domains."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.errors import UserError, hint
from parallel.families import architecture
from parallel.files import naming, write_atomically
from parallel.settings import ModelSettings
from pipeline.config.checkpoints import ANY_VALUE, has_weights, weights_violation
from pipeline.config.read import CONFIGS, Reader, find, plain
from pipeline.config.rules import DOMAIN_NAME, DOMAIN_RULE
from pipeline.estimate.capacity import check_searched
from pipeline.new_run.data_sets import rows_of
from pipeline.new_run.described import model_of
from pipeline.new_run.run_blocks import DEMONSTRATIONS
from pipeline.text import shown
from stages.data.settings import FilePromptSettings
from stages.rewards.kinds import KINDS

MODELS, DOMAINS = CONFIGS / "models", CONFIGS / "domains"
COLUMN_KEYS = ("prompt", "answer", "tools", "calls", "tests", "schema")  # of `--columns`
SFT_KEYS = ("messages", "prompt", "response", "tools")  # of `--columns demonstrations.KEY`
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def profile_of(arguments: Namespace) -> Path:
    """Return the file of the profile that is written beside the run."""
    target: Path = arguments.target
    return target.with_suffix(".cluster.yaml")


def check_given(arguments: Namespace) -> None:
    """Raise UserError where options are missing, or contradict each other."""
    needed = {"model": "--model", "domains": "--domains", "target": "--output"}
    if missing := [flag for name, flag in needed.items() if getattr(arguments, name) is None]:
        raise UserError(f"missing: {', '.join(missing)}; braid init --help has an example")
    name = arguments.name or arguments.target.stem
    if not re.fullmatch(NAME, name):
        option = f"--name {name}" if arguments.name else f"--output {arguments.target}"
        raise UserError(f"{option}: a run's name has letters, digits, '.', '_' and '-' only")
    if arguments.sft is None and any(name == DEMONSTRATIONS for name, *_ in arguments.columns):
        raise UserError(f"--columns {DEMONSTRATIONS}.KEY=COLUMN needs --sft ROWS, whose they are")
    if arguments.gpus is None:
        for name in ("gpu", "gpus_per_node", "budget"):
            if getattr(arguments, name) is not None:
                option = name.replace("_", "-")
                raise UserError(f"--{option} needs --gpus N, the number of GPUs")
    elif arguments.ranks is not None:
        raise UserError(
            f"--ranks {arguments.ranks}: these are of a run on CPU cores; --gpus {arguments.gpus} "
            "has a rank on each GPU"
        )
    else:
        check_searched("--gpus", arguments.gpus)


def check_output(files: Iterable[Path], force: bool) -> None:
    """Raise UserError where a file exists already or could not be written.

    What is there and is no file is never replaced: a device, a pipe, or a link such as /dev/stdout.
    """
    for path in files:
        try:
            if not path.parent.is_dir():
                raise UserError(f"--output: no such directory: {shown(path.parent)}")
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise UserError(f"{shown(path)} is not a regular file; choose another --output")
            with tempfile.TemporaryFile(dir=path.parent):  # /proc and read-only mounts refuse it
                pass
        except OSError as error:
            where = shown(path.parent)
            raise UserError(f"--output: cannot write in {where}: {error.strerror}") from error
        if path.exists() and not force:
            raise UserError(f"{shown(path)} exists already; choose another --output, or --force")


def write_files(texts: Mapping[Path, str], force: bool) -> None:
    """Write files, all or none; without `force` none of them may exist.

    Raises:
        UserError: a file was created since `check_output`.
        OSError: a file cannot be written.
    """
    if force:
        for path, text in texts.items():
            write_atomically(path, text)
        return
    created = []
    try:
        for path, text in texts.items():
            with naming(path), path.open("x", encoding="utf-8") as file:
                created.append(path)
                file.write(text)
    except OSError as error:
        for new_file in created:
            new_file.unlink(missing_ok=True)
        if not isinstance(error, FileExistsError):
            raise
        raise UserError(
            f"{shown(path)} was created in the meantime, and nothing is written; run the command "
            "again with another --output, or with --force"
        ) from None


def check_kept(option: str, inputs: Iterable[Path | None], files: Sequence[Path]) -> None:
    """Raise UserError where the new files, a run and its profile, would replace a given one."""
    for path in filter(None, inputs):
        for file, what in zip(files, ("file", "profile"), strict=True):
            if path.resolve() == file.resolve():
                raise UserError(f"{option} {shown(path)}: this run's {what} would replace it")


def model_named(
    model_option: str, weights: Path | None, *, dry_run: bool
) -> tuple[ModelSettings, Path | None, Path]:
    """Return the model, the shipped file that describes it, and its weights' directory.

    A `dry_run` needs no weights: those that are there are checked.

    Raises:
        UserError: there is no such model, the directory is no checkpoint of it, or a directory has
            further weights.
    """
    shipped = next((path for path in shipped_models() if path.stem == model_option), None)
    if shipped is None:
        directory = expanded(model_option, f"--model {model_option}")
        if not directory.is_dir() and "/" not in model_option:
            names = [path.stem for path in shipped_models()]
            raise UserError(
                f"--model {model_option}: no such directory, and none of {', '.join(names)}"
            )
        if weights is not None:
            raise UserError(
                f"--weights {shown(weights)}: is for a model by name; --model {model_option} is a "
                "directory, with weights of its own"
            )
        weights, model = directory, model_of(directory)
        alike = (path for path in shipped_models() if _sizes(_shipped(path)) == _sizes(model))
        shipped = next(alike, None)
    elif weights is None and not dry_run:
        raise UserError(
            f"--model {model_option}: name the directory of its weights too: --weights PATH"
        )
    else:
        model = _shipped(shipped)
        if weights is None:
            return model, shipped, Path("/path/to") / model_option
    if dry_run and not has_weights(weights):
        return model, shipped, weights
    start = model.model_copy(update={"initial_weights": weights})
    if problem := weights_violation(weights, start):
        raise UserError(problem)
    return model, shipped, weights


def _shipped(path: Path) -> ModelSettings:
    return ModelSettings.model_validate(plain(Reader().file(path)))


def _sizes(model: ModelSettings) -> dict[str, Any]:
    """Return all that says which model it is, with the family's defaults."""
    keys = model.model_dump(mode="json", exclude=set(ANY_VALUE) - {"precision"})
    return {**keys, "architecture": architecture(model).model_dump()}


def shipped_models() -> list[Path]:
    """Return the files of configs/models."""
    return sorted(MODELS.glob("[a-z]*.yaml"))


def shipped_kinds() -> list[str]:
    """Return the shipped domains that read rows."""
    paths = sorted(DOMAINS.glob("[a-z]*.yaml"))
    trees = {path.stem: Reader().file(path) for path in paths}
    return [name for name, tree in trees.items() if find(tree, ("prompts", "prompt")) is not None]


def check_names(domain_options: Sequence[str]) -> None:
    """Raise UserError where a domain's name is no name, or two domains have one."""
    names = [option.partition("=")[0].partition(":")[0] for option in domain_options]
    for name, option in zip(names, domain_options, strict=True):
        if "=" in option and not re.fullmatch(DOMAIN_NAME, name):
            raise UserError(f"--domains {option}: {DOMAIN_RULE}")
    if DEMONSTRATIONS in names:
        raise UserError(f"--domains: {DEMONSTRATIONS} is the name of --sft's rows; choose another")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--domains: {', '.join(repeated)} named twice; NAME:KIND=ROWS renames one")


def column_named(text: str) -> tuple[str, str, str]:
    """Return a domain's name ("": all), a key of COLUMN_KEYS and its column.

    Raises ArgumentTypeError for anything else.
    """
    name, _, column = text.partition("=")
    domain, dot, key = name.rpartition(".")
    valid = SFT_KEYS if domain == DEMONSTRATIONS else COLUMN_KEYS
    if key not in valid or not column or (dot and not domain):
        keys = f"KEY=COLUMN or DOMAIN.KEY=COLUMN; keys: {', '.join(valid)}"
        raise ArgumentTypeError(f"{text} is not {keys}")
    return domain, key, column


def columns_of(
    options: Iterable[tuple[str, str, str]], domains: Mapping[str, tuple[Path, Path | None]]
) -> dict[str, dict[str, str]]:
    """Return, by domain, the columns of `--columns` by the keys of the domain's block.

    A key without a domain is for every domain that reads it.

    Raises:
        UserError: there is no such domain, or it reads no such column.
    """
    columns: dict[str, dict[str, str]] = {name: {} for name in domains}
    blocks = {name: plain(Reader().file(base)) for name, (base, _) in domains.items()}
    for domain, key, column in sorted(options):  # those of one domain override those of all
        if domain == DEMONSTRATIONS:
            columns.setdefault(domain, {})[key] = column
            continue
        option = f"--columns {f'{domain}.' if domain else ''}{key}={column}"
        if domain and domain not in domains:
            raise UserError(f"{option}: no domain {domain}; {hint(domain, domains)}")
        readers = {
            name: _keys_of(blocks[name], key, stated=bool(domain))
            for name in ([domain] if domain else domains)
        }
        if not any(readers.values()):
            whose = f"domain {domain} reads no" if domain else "no domain reads a"
            raise UserError(f"{option}: {whose} column of {key}")
        for name, keys in readers.items():
            columns[name] |= dict.fromkeys(keys, column)
    return columns


def _keys_of(block: dict[str, Any], key: str, *, stated: bool) -> list[str]:
    """Return the keys of a domain's block that name a column, such as rewards.passes.tests_field.

    An answer that the domain's rewards do not want is one of them where it is `stated` for it.
    """
    keys = [f"prompts.{key}"] if key in FilePromptSettings.model_fields else []
    if key == "answer" and not stated and block.get("prompts", {}).get("answer") is None:
        keys = []
    for name, reward in block.get("rewards", {}).items():
        kind, field = KINDS.get(reward.get("kind")), f"{key}_field"
        # null: it reads none
        if kind and field in kind.settings.model_fields and reward.get(field, "") is not None:
            keys.append(f"rewards.{name}.{field}")
    return keys


def expanded(path: str, option: str) -> Path:
    """Return a path with the home directory for `~`; raise UserError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{option}: no such user: {Path(path).parts[0]}") from None


def demonstrations_named(rows: str | None) -> Path | None:
    """Return the file, pattern or directory of the demonstrations that `--sft` names."""
    if rows is None:
        return None
    option = f"--sft {rows}"
    return rows_of(option, str(expanded(rows, option)))


def domain_named(domain_option: str) -> tuple[str, tuple[Path, Path | None]]:
    """Return a domain's name, the file that it extends, and its rows."""
    name, equals, rows = domain_option.partition("=")
    name, _, kind = name.partition(":")
    if not equals or not rows:
        raise UserError(
            f"--domains {domain_option}: write NAME=ROWS, such as math=/data/math.jsonl"
        )
    option = f"--domains {domain_option}"
    rows = str(expanded(rows, option))
    if rows.endswith((".yaml", ".yml")):
        return name, (rows_of(option, rows), None)
    kinds = shipped_kinds()
    if (kind := kind or name) not in kinds:
        raise UserError(
            f"{option}: no domain {kind} that reads rows; {hint(kind, kinds)}. "
            "NAME=FILE.yaml is one of yours: braid domain new NAME --source jsonl"
        )
    return name, (DOMAINS / f"{kind}.yaml", rows_of(option, rows))
