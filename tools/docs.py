"""The generated pages of docs/reference: every key, metric and command, from their declarations.

    .venv/bin/python -m tools.docs      # what `make docs` runs

Never imports torch. tests/repository/test_docs.py fails where a committed page is not current.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.cli import command_parser
from pipeline.config.cluster import ClusterSettings, KindSettings
from stages.domains import DomainSettings
from stages.guards.registry import GUARDS, WindowGuardSettings
from stages.guards.settings import GuardsSettings
from stages.metric_definitions import METRICS
from stages.objectives.loss import REGISTRIES
from stages.sampling.sample_files import COLUMNS
from stages.settings import RunSettings

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Written by `make docs` from the declarations in the code; edit those. -->\n\n"
CHOSEN_BY = ("name", "kind", "source")  # the keys that choose between settings classes
STAGES = "stages.NAME"  # where every kind has its own blocks
# The page of a block, by the beginning of its path; the first that fits counts.
PAGES = {
    "domains.NAME.objective": "objective.md",
    "domains.NAME.rewards": "rewards.md",
    "domains.NAME.guards": "guards.md",
    "domains.NAME": "domain.md",
    STAGES: "stages.md",
    "cluster": "cluster.md",
    "": "run.md",
}
HEADS = {
    "run.md": """\
# Keys of a run

The file that `braid run CONFIG` takes. [The run](../explanation/run.md) says how files extend one
another and what a run's directory holds. Every integer has an upper bound; those that only catch a
slip of a digit, 1,000,000 and above, are not shown.
""",
    "domain.md": """\
# Keys of a domain

A domain's file, which a run names under `domains:`. [Add a domain](../how-to/domain.md) writes one;
[what a change undoes](../explanation/run.md#what-a-change-undoes) lists the stages that go stale.
""",
    "stages.md": """\
# Keys of stages

The blocks `stages:` of a run, by kind. [Pipelines](../explanation/pipelines.md) says what blocks,
names and references mean; [add a stage kind](../how-to/stage-kind.md) declares another one.
""",
    "objective.md": """\
# Keys of an objective

The block `objective:` of a domain. [Objectives](../explanation/objectives.md) has the formulas,
their sources and when to choose which.
""",
    "rewards.md": """\
# Keys of rewards

The block `rewards:` of a domain, by the reward's name. [Rewards](../explanation/rewards.md) has the
range of each kind and what it makes of a truncated response.
""",
    "guards.md": """\
# Keys of guards

The block `guards:` of a domain. [Guards](../explanation/guards.md) has the failure behind each.
""",
    "cluster.md": """\
# Keys of a cluster

The profile that `braid submit --cluster FILE` takes, such as `configs/clusters/example.yaml`. No
key changes a result or makes a stage stale. [Slurm](../explanation/slurm.md) follows a job.
""",
    "metrics.md": """\
# Metrics

Every stage writes one JSON object per step to `runs/NAME/stages/STAGE/metrics.jsonl`, and the same
numbers to the [trackers](../how-to/read-a-run.md#trackers). A name that
`stages/metric_definitions.py` does not declare is an error. [Read a
run](../how-to/read-a-run.md) says which to look at first.

The denominator is what a metric is divided by. *step*: it is of the whole optimizer step; *tokens*,
*sequences*, *groups*: a mean over the response tokens, responses or prompts of the step, on all
ranks; *problems*: a mean over the evaluated problems; *layers*, *domains*: over the routed layers,
the domains; *computed tokens*: over all tokens that the ranks compute, padding included.

| metric | denominator | meaning | healthy |
|---|---|---|---|
""",
    "samples.md": """\
# Recorded samples

Every stage that samples writes the samples of each step to
`runs/NAME/stages/STAGE/rollouts/step_N.parquet`, an evaluation the answers of each model to
`samples/MODEL/DOMAIN_N.parquet`. [`braid look`](commands.md#braid-look) shows them;
`pandas.read_parquet("runs/NAME/stages/STAGE/rollouts")` reads all steps of a stage.

The trainer's values of tokens are recorded of the share `logging.tokens` of the prompts, the same
ones in every step: an entropy over a large vocabulary is not free.

| column | type | meaning |
|---|---|---|
""",
    "commands.md": "# Commands\n\n",
}
Places = dict[type[BaseModel], str]  # the path of every settings class
KEYS = "| key | type | default | meaning |\n|---|---|---|---|"
SLIP = 1_000_000  # bounds from here on only catch a slip of a digit, and are not shown
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
TYPES: dict[Any, str] = {
    **{int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"},
    **{NoneType: "null", Any: "any value", date: "date"},
}


def pages() -> dict[Path, str]:
    """Return the text of every generated page, by its path."""
    texts = {name: [NOTE + head] for name, head in HEADS.items()}
    texts["guards.md"].append(_guards())
    texts["objective.md"].append(_algorithms())
    texts["metrics.md"][0] += _metrics()
    texts["samples.md"][0] += _samples()
    texts["commands.md"][0] += _commands(command_parser())
    blocks = _blocks()
    places = {model: path for path, models in blocks for model in models}
    for path, models in blocks:
        if _page(path) == "guards.md":
            continue  # eleven blocks of the same keys: _guards has them in two tables
        texts[_page(path)].append(_section(path, models, places))
    return {REFERENCE / name: "\n".join(parts).rstrip() + "\n" for name, parts in texts.items()}


# Keys


def _blocks() -> list[tuple[str, list[type[BaseModel]]]]:
    """Return every block once, at the shortest path to it: a path and its settings classes."""
    seen: set[type[BaseModel]] = set()
    found: list[tuple[str, list[type[BaseModel]]]] = []
    # A domain's blocks first: the optimizers and loops of a run then link to the domain's page.
    roots = (("domains.NAME", DomainSettings), ("", RunSettings), ("cluster", ClusterSettings))
    for start, root in roots:
        queue: list[tuple[str, list[type[BaseModel]]]] = [(start, [root])]
        for path, models in queue:
            fresh = [model for model in models if model not in seen]
            seen |= set(fresh)
            found += [(path, fresh)] if fresh else []
            keys = ((model, *pair) for model in fresh for pair in model.model_fields.items())
            for model, name, field in keys:
                named = "NAME" if get_origin(field.annotation) is dict else ""
                kind = (_choice(model) or ("", ""))[1] if path == STAGES else ""
                inner = ".".join(filter(None, (path, kind, field.alias or name, named)))
                queue.append((inner, _models(field.annotation)))
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes that an annotation names, in its order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models(each)]


def _page(path: str) -> str:
    return next(page for start, page in PAGES.items() if path.startswith(start))


def _shown(path: str) -> str:
    """Return a block's path as a person writes it in the file that its page is about."""
    return re.sub(r"^(domains\.NAME|stages\.NAME|cluster)\.?", "", path)


def _section(path: str, models: list[type[BaseModel]], places: Places) -> str:
    """Return a block's heading and tables; a block with choices has one table for each."""
    parts = [f"## `{_shown(path)}`\n"] if _shown(path) else []
    rows = [_rows(model, places) for model in models]
    common = [row for row in rows[0] if len(models) > 1 and all(row in other for other in rows)]
    if common:
        parts += ["All of them have these keys.\n", KEYS, *common, ""]
    for model, own in zip(models, rows, strict=True):
        if chosen := _choice(model):
            block = path.removesuffix(".NAME").rpartition(".")[2]
            parts.append(f"### `{block}: {{{chosen[0]}: {chosen[1]}}}`\n")
        if text := _one_line(model.__doc__):
            parts.append(f"{text}\n")
        if own := [row for row in own if row not in common]:
            parts += [KEYS, *own, ""]
    return "\n".join(parts)


def _choice(model: type[BaseModel]) -> tuple[str, str] | None:
    """Return the key and the value that choose this class, where one does."""
    for key in CHOSEN_BY:
        field = model.model_fields.get(key)
        values = get_args(field.annotation) if field else ()
        if field and get_origin(field.annotation) is Literal and len(values) == 1:
            return key, values[0]
    return None


def _rows(model: type[BaseModel], places: Places) -> list[str]:
    """Return a row for every key of a block, but for the one that chooses it."""
    chosen = (_choice(model) or ("",))[0]
    rows = []
    for name, field in model.model_fields.items():
        below = _models(field.annotation)
        usual = [type(field.default)] if isinstance(field.default, BaseModel) else below
        of_block = _one_line(usual[0].__doc__).partition(". ")[0].rstrip(".") if below else ""
        said = meaning(name, model) or of_block
        if name != chosen:
            key = f"`{field.alias or name}`"
            rows.append(_table_row(key, _type(field, places), _default(field), said))
    return rows


def meaning(name: str, model: type[BaseModel]) -> str:
    """Return a field's description, or the one of the class that it overrides; "" without any."""
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel)]
    if model is KindSettings:  # overrides of the profile's keys
        bases.append(ClusterSettings)
    said = (base.model_fields[name].description for base in bases if name in base.model_fields)
    return next(filter(None, said), "")


def _type(field: FieldInfo, places: Places) -> str:
    """Return a type in a person's words, or a link to the keys of the block."""
    below = _models(field.annotation)
    if not below:
        return _named(field.annotation, field.metadata)
    place = places[below[0]]
    anchor = re.sub(r"[^\w-]", "", _shown(place).lower())
    null = " or null" if NoneType in get_args(field.annotation) else ""
    shown = _shown(place) or _page(place).removesuffix(".md")
    return f"[`{shown}`]({_page(place)}{anchor and '#' + anchor}){null}"


def _named(annotation: Any, metadata: Any = ()) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *own = get_args(annotation)
        metadata = [*own, *metadata]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f"`{each}`" for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_named(each, () if each is NoneType else metadata) for each in arguments)
    if origin is dict:
        return f"mapping of names to {_named(arguments[1])}"
    if origin in (list, tuple):
        inner = [each for each in arguments if each is not Ellipsis]
        return "list of " + " and ".join(_named(each) for each in inner)
    return " ".join(filter(None, (TYPES[annotation], _bounds(metadata, annotation))))


def _bounds(metadata: Any, annotation: Any) -> str:
    """Return the bounds of a number, such as `above 0, at most 1`."""
    flat = [part for each in metadata for part in getattr(each, "metadata", [each])]
    return ", ".join(
        f"{word} {format(bound, ',' if annotation is int else 'g')}"
        for part in flat
        for name, word in BOUNDS.items()
        if (bound := getattr(part, name, None)) is not None and not (name == "le" and bound >= SLIP)
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        chosen = _choice(type(value))
        return f"`{chosen[1]}`" if chosen else ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """Return a default as one line of YAML; of a block, what chooses it."""
    if isinstance(value, BaseModel):
        chosen = _choice(type(value))
        return f"{{{chosen[0]}: {chosen[1]}}}" if chosen else "{}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(each) for each in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_line(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _table_row(*cells: str) -> str:
    """Return a row of a table; a bar within a cell does not end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# Guards, metrics, commands


def _algorithms() -> str:
    """Return a table for every registry of the objective: names, formulas and sources."""
    parts = []
    for registry in REGISTRIES:
        parts += [f"## `{registry.key}` by name\n", "| name | description | formula | source |"]
        parts.append("|---|---|---|---|")
        for name, found in registry.items():
            formula = _one_line(found.formula).removeprefix("Return ")
            description = "" if found.settings is None else _one_line(found.description)
            parts.append(_table_row(f"`{name}`", description, formula, found.source))
        parts.append("")
    return "\n".join(parts)


def _guards() -> str:
    head = "| guard | metric | beyond | action, patience | failure | first thing to try |"
    defaults = GuardsSettings()
    rows = []
    for name, guard in GUARDS.items():
        found = getattr(defaults, name)
        beyond, then = f"{guard.side} {found.threshold:g}", f"{found.action}, {found.patience}"
        cells = (f"`{name}`", f"`{guard.metric}`", beyond, then, _one_line(guard.__doc__))
        rows.append(_table_row(*cells, guard.remedy))
    # The key `window` is of those alone that compare windows.
    keys = ["## Keys of each guard\n", KEYS, *_rows(WindowGuardSettings, {})]
    return "\n".join(["## `guards`\n", head, "|---|---|---|---|---|---|", *rows, "", *keys, ""])


def _metrics() -> str:
    return "\n".join(
        _table_row(f"`{name}`", metric.denominator, metric.meaning, metric.healthy)
        for name, metric in METRICS.items()
    )


def _samples() -> str:
    return "\n".join(
        _table_row(f"`{name}`", str(column.type), column.meaning)
        for name, column in COLUMNS.items()
    )


def _commands(braid: ArgumentParser) -> str:
    parts = [_code(braid.description)]
    for words, command, summary in _all_commands(braid, "braid"):
        parts += [f"## {words}", f"{summary[:1].upper()}{summary[1:]}."]
        rows = [
            _option(action)
            for action in command._actions
            if action.help != SUPPRESS and action.dest != "help"
        ]
        if rows:
            parts.append("\n".join(["| argument | meaning |\n|---|---|", *rows]))
        if command.epilog:
            parts.append(_code(command.epilog))
    return "\n\n".join([*parts, "## Exit codes", _code(braid.epilog)])


def _all_commands(above: ArgumentParser, name: str) -> Iterator[tuple[str, ArgumentParser, str]]:
    """Yield every command's words, parser and summary; of one with actions, these alone."""
    for action in above._actions:
        if isinstance(action, _SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, command in action.choices.items():
                deeper = list(_all_commands(command, f"{name} {word}"))
                yield from deeper or [(f"{name} {word}", command, summaries.get(word, ""))]


def _option(action: Action) -> str:
    shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        shown += f" {action.metavar or action.dest.upper()}"
    return _table_row(f"`{shown}`", action.help or "")


def _code(text: str | None) -> str:
    return f"```text\n{(text or '').strip()}\n```"


def main() -> None:
    """Write the pages."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
