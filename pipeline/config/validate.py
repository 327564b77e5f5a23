"""The loader of configurations: YAML files and overrides to validated settings, and to run.yaml."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from parallel.settings import CHARACTERS, Settings
from pipeline.config import cluster as profile
from pipeline.config import environment, rules, schema, yaml_core
from pipeline.config.cluster import ClusterSettings
from pipeline.config.messages import (
    MISSING,
    renamed_to,
    schema_of,
    unknown,
    violation_of,
    violations_below,
)
from pipeline.config.read import (
    MOST_ERRORS,
    ConfigError,
    Key,
    Leaf,
    Mapping,
    Node,
    Reader,
    SourceLocation,
    Violation,
    apply_deletions,
    dotted,
    find,
    key_in,
    matching,
    nearest,
    override_at,
    plain,
    replaced,
)
from pipeline.config.unroll import REFERENCES, WEIGHTED, is_path
from pipeline.text import shown
from stages.domains import DomainSettings
from stages.keys import STRUCTURE, differing, flatten
from stages.kinds.grpo.settings import GRPO
from stages.kinds.kind import GATE_KEY
from stages.kinds.sft.settings import SFT
from stages.rewards.reward import RewardPoolSettings
from stages.settings import RunSettings

TOKENIZER: Key = ("model", "tokenizer")
# Of a block: what names other stages or domains, or is of the graph alone.
OF_OTHERS = (*STRUCTURE, GATE_KEY)
OF_A_RUN = {"name", "model", "domains"}  # of which a template of stages has none
TRAINED_FROM = "./"  # a model outside the run, which is never read
# Paths relative to the file in which they are written; `*` stands for every name.
PATHS: tuple[Key, ...] = (
    ("model", "initial_weights"),
    TOKENIZER,
    ("domains", "*", "prompts", "path"),
    ("domains", "*", "demonstrations", "path"),
    ("domains", "*", "rewards", "*", "api_key_file"),
    ("domains", "*", "rewards", "*", "path"),
    ("stages", "*", "data", "*", "path"),
)


def load(path: Path, overrides: Sequence[str] = (), *, to_start: bool = True) -> RunSettings:
    """Read a run's settings.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value` in order; values are YAML.
        to_start: also check the environment, such as the module of a reward.

    Raises:
        ConfigError: with every violation in the files and the overrides.
    """
    reader = Reader()
    tree = reader.file(path)
    if not reader.broken and "stages" in tree.entries and not tree.entries.keys() & OF_A_RUN:
        message = (
            f"a template of stages, not a run; a run has extends: {shown(path)}, its own name,"
            " model and domains, and what its stages lack (docs/explanation/pipelines.md)"
        )
        raise ConfigError([Violation(nearest(tree, ("stages",)), "stages", message)])
    tree = _with_overrides(tree, overrides, reader)
    return _settings(tree, reader, to_start=to_start)


def load_started(path: Path) -> RunSettings:
    """Read the run.yaml of a run that has started, whatever this version would let start.

    Raises:
        ConfigError: like `load`; of the rules only for those without which no run can be shown.
    """
    reader = Reader()
    tree, settings = _valid(RunSettings, reader.file(path), reader)
    _check_rules(tree, rules.unreadable(settings))
    return settings


def load_unfinished(
    path: Path,
    overrides: Sequence[str],
    starting: Callable[[RunSettings], Collection[str] | None],
) -> RunSettings:
    """Read settings like `load`, of a run that has stages that will not start again.

    `starting` returns the names of the stages that will, or None for a run without any output:
    only they are checked against the rules of what may start.
    """
    try:
        return load(path, overrides)
    except ConfigError as error:
        reader = Reader()
        tree = _with_overrides(reader.file(path), overrides, reader)
        try:
            tree, settings = _valid(RunSettings, tree, reader)
        except ConfigError:
            # A schema error is no rule of what may start: it stands as `load` raised it.
            raise error from None
        if any(rules.unreadable(settings)) or (names := starting(settings)) is None:
            raise
        # Files may be gone since the run began, but the stages that will start need them.
        missing = environment.violations(settings)
        _check_rules(tree, chain(rules.violations(settings, starting=names), missing))
        return settings


def located(path: Path, overrides: Sequence[str], messages: Iterable[tuple[str, str]]) -> list[str]:
    """Return every (dotted key, message) about a valid configuration, with file and line."""
    if not (listed := list(messages)):  # most configurations are read only once
        return []
    reader = Reader()
    tree, _ = apply_deletions(_with_overrides(reader.file(path), overrides, reader))
    return [str(violation) for violation in _located(tree, listed)]


def load_domain(path: Path, pool: RewardPoolSettings) -> DomainSettings:
    """Read a domain's file by itself, as the domain that the file is named after.

    Rules that need a run's other blocks are skipped. Raises ConfigError like `load`.
    """
    reader = Reader()
    tree = _with_domain(Mapping({}, SourceLocation(path)), path, reader)
    tree, settings = _valid(_Domains, tree, reader)
    domain = settings.domains[path.stem]
    broken = rules.domain_violations(path.stem, domain, pool)
    _check_rules(tree, chain(broken, environment.domain_violations(path.stem, domain)))
    return domain


def is_run(path: Path) -> bool:
    """Return whether a file names domains, as a run's does and a domain's does not."""
    return "domains" in Reader().file(path).entries


def load_cluster(path: Path) -> ClusterSettings:
    """Read a cluster profile. Raises ConfigError like `load`."""
    reader = Reader()
    tree, settings = _valid(ClusterSettings, reader.file(path), reader)
    _check_rules(tree, profile.violations(settings))
    return settings


def place_in_cluster(path: Path, key: Key) -> SourceLocation:
    """Return the location of a key in a cluster profile."""
    return nearest(Reader().file(path), key)


def load_with_domain(run: Path, path: Path, samples: int | None = None) -> RunSettings:
    """Read a run's settings with a file's domain in place of all of its domains.

    Of its stages only what a domain alone is checked with stays: supervised fine-tuning on its
    demonstrations, and the training on its rewards. `samples` overrides the domain's
    `sampling.group_size`. Raises ConfigError like `load`.
    """
    reader = Reader()
    tree = _with_domain(reader.file(run), path, reader)
    if samples is not None:
        key = ("domains", path.stem, "sampling", "group_size")
        tree = override_at(tree, key, Leaf(samples, SourceLocation(None)))
    alone = Mapping({**tree.entries, "stages": _alone(find(tree, ("stages",)), tree)}, tree.place)
    return _settings(alone, reader, to_start=False, graph=False)


def _alone(stages: Node | None, tree: Mapping) -> Mapping:
    """Return the blocks of stages that any domain passes through, without other blocks' names."""
    trained = {"kind": GRPO.name, "from": TRAINED_FROM, "for_each": "domain"}
    leaves: dict[str, Node] = {key: Leaf(value, tree.place) for key, value in trained.items()}
    blocks: dict[str, Node] = {"domain": Mapping(leaves, tree.place)}
    for name, block in stages.entries.items() if isinstance(stages, Mapping) else ():
        kind = find(block, ("kind",)) if isinstance(block, Mapping) else None
        if isinstance(block, Mapping) and isinstance(kind, Leaf) and kind.value == SFT.name:
            entries = {key: node for key, node in block.entries.items() if key not in OF_OTHERS}
            blocks[name] = Mapping(entries, block.place)
    return Mapping(blocks, tree.place)


class _Domains(Settings):
    """The schema of `domains` alone."""

    domains: dict[str, DomainSettings]


def _settings(
    tree: Mapping, reader: Reader, *, to_start: bool = True, graph: bool = True
) -> RunSettings:
    """Return a tree's settings. Raises ConfigError for the schema, then for the rules."""
    tree, settings = _valid(RunSettings, tree, reader)
    broken = rules.violations(settings, graph=graph)
    _check_rules(tree, chain(broken, environment.violations(settings) if to_start else ()))
    return settings


def _valid[Root: Settings](root: type[Root], tree: Mapping, reader: Reader) -> tuple[Mapping, Root]:
    """Return the tree with its deletions applied, and its settings, valid by their schema."""
    tree, nothing_deleted = apply_deletions(_with_absolute_paths(tree))
    settings, invalid, more = _validated(root, tree, complete=not reader.broken)
    if not reader.broken and not more:  # else an unreadable file may define the deleted name
        invalid += nothing_deleted
    # A value that could not be read is not also reported as one of the wrong type.
    noted = {(violation.place.file, violation.key) for violation in reader.violations}
    invalid = [
        violation for violation in invalid if (violation.place.file, violation.key) not in noted
    ]
    violations = [*reader.violations, *invalid]
    if violations or settings is None:
        raise ConfigError(sorted(violations, key=_reading_order), more)
    return tree, settings


def _check_rules(tree: Mapping, broken: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError with every (dotted key, message) at its location, if there is one."""
    if violations := _located(tree, broken):
        raise ConfigError(violations)


def _located(tree: Mapping, messages: Iterable[tuple[str, str]]) -> list[Violation]:
    """Return every (dotted key, message) at its location, in reading order."""
    triples = ((nearest(tree, key_in(tree, key)), key, message) for key, message in messages)
    return sorted((Violation(*triple) for triple in triples), key=_reading_order)


def _with_domain(tree: Mapping, path: Path, reader: Reader) -> Mapping:
    domain = reader.file(path, ("domains", path.stem))
    domains = Mapping({path.stem: domain}, domain.place)
    return Mapping({**tree.entries, "domains": domains}, tree.place)


def dump_resolved(settings: RunSettings) -> str:
    """Return the settings as YAML with every default; `load` reads it back unchanged."""
    return yaml_core.dump(settings.model_dump(mode="json"))


def dump_differing(settings: Settings) -> str:
    """Return the settings that differ from their defaults, and every tag (`kind`), as YAML."""
    return yaml_core.dump(_differing(settings))


def differing_keys(old: RunSettings, new: RunSettings) -> dict[str, tuple[Any, Any]]:
    """Return every dotted key whose value differs, with both values; None for an absent key."""
    before, after = (dict(flatten(run.model_dump(mode="json"))) for run in (old, new))
    return differing(before, after)


def _differing(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _differing(child) for name, child in value.items()}
    if not isinstance(value, Settings):
        return value
    leaves = value.model_dump(mode="json", by_alias=False)
    tags, values = {}, {}
    for name, field in type(value).model_fields.items():
        child = getattr(value, name)
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1:
            tags[name] = child
        elif child != field.get_default(call_default_factory=True):
            blocks = isinstance(child, Settings | dict)
            values[field.alias or name] = _differing(child) if blocks else leaves[name]
    return {**tags, **values}


def _with_overrides(tree: Mapping, overrides: Iterable[str], reader: Reader) -> Mapping:
    for override in overrides:
        name, equals, text = override.partition("=")
        key = tuple(name.split("."))
        if not equals or not all(key):
            message = "an override must be written dotted.key=value"
            reader.violations.append(Violation(SourceLocation(None), override, message))
        elif len(key) > yaml_core.MOST_DEPTH:
            reader.violations.append(Violation(SourceLocation(None), name, "nested too deeply"))
        elif not reader.broken and (violation := _unknown_override(tree, key)):
            if violation not in reader.violations:
                reader.violations.append(violation)
        elif node := reader.value(text, key):
            tree = _overridden(tree, key, node)
    return tree


def _overridden(tree: Mapping, key: Key, node: Node) -> Mapping:
    """Return the tree with a value of the command line at `key`.

    Blocks, and mappings of names to blocks, merge key by key. A mapping of names to values, such as
    weights, is replaced: merged with the file's, weights that sum to 1 would sum to 2. With a null,
    which deletes a name of the file's, it merges too.
    """
    below = find(tree, key)
    if not (isinstance(node, Mapping) and isinstance(below, Mapping)):
        return override_at(tree, key, node)
    at = _with_arms(tree, key)
    of_blocks = schema.fields(schema.type_at(RunSettings, (*at, "*")))
    if not (
        of_blocks
        or schema.fields(schema.type_at(RunSettings, at))
        or any(isinstance(child, Leaf) and child.value is None for child in node.entries.values())
    ):
        return replaced(tree, key, node)
    for name, child in node.entries.items():
        tree = _overridden(tree, (*key, name), child)
    return tree


def _unknown_override(tree: Mapping, key: Key) -> Violation | None:
    """Check an override's key: any field of the schema, and in free mappings an existing name."""
    for depth, name in enumerate(key):
        parent = schema.type_at(RunSettings, _with_arms(tree, key[:depth]))
        to_add = ""
        if fields := schema.fields(parent):
            names = list(fields)
        elif schema.fields(schema.type_at(RunSettings, key[: depth + 1])):
            entries = find(tree, key[:depth])
            names = list(entries.entries) if isinstance(entries, Mapping) else []
            to_add = f"; to add it: {dotted(key[:depth])}='{{{name}: ...}}'"
        else:
            return None
        if name not in names and name not in schema.former(parent):
            message = unknown(parent, name, names) + to_add
            return Violation(SourceLocation(None), dotted(key[: depth + 1]), message)
    return None


def _with_arms(tree: Mapping, key: Key) -> Key:
    """Return a key with the tag of every block of a union above its last name, as it is in a tree.

    Two kinds of stages may have blocks of one name with different keys, such as `gate`.
    """
    tagged: Key = ()
    for depth, name in enumerate(key, 1):
        tagged = (*tagged, name)
        annotation = schema.type_at(RunSettings, tagged)
        if depth < len(key) and (classes := schema.arms(annotation)):
            selected = find(tree, (*key[:depth], schema.tag(annotation)))
            if isinstance(selected, Leaf) and str(selected.value) in classes:
                tagged = (*tagged, str(selected.value))
    return tagged


def _with_absolute_paths(tree: Mapping) -> Mapping:
    for pattern in (*PATHS, *REFERENCES):
        for key in matching(tree, pattern):
            leaf = find(tree, key)
            if isinstance(leaf, Mapping) and pattern == WEIGHTED:
                tree = replaced(tree, key, _with_absolute_names(leaf))
            if not isinstance(leaf, Leaf):
                continue
            if (value := _absolute(leaf.value, leaf.place, pattern)) != leaf.value:
                tree = override_at(tree, key, Leaf(value, leaf.place))
    return tree


def _with_absolute_names(weights: Mapping) -> Mapping:
    """Return the weights of models with absolute paths, whose names are keys."""
    entries = {
        _absolute(name, weight.place, WEIGHTED): weight for name, weight in weights.entries.items()
    }
    return replace(weights, entries=entries)


def _absolute(value: Any, place: SourceLocation, pattern: Key) -> Any:
    """Return a path, or every path of a list, as an absolute one; anything else as it is."""
    if isinstance(value, list):
        return [_absolute(element, place, pattern) for element in value]
    name = pattern in REFERENCES and isinstance(value, str) and not is_path(value)
    if not isinstance(value, str) or name or (pattern == TOKENIZER and value == CHARACTERS):
        return value
    # Not Path.absolute, which leaves a leading `..` of a relative path where it is.
    return os.path.normpath(place.beside(value).absolute())


def _validated[Root: Settings](
    root: type[Root], tree: Mapping, *, complete: bool
) -> tuple[Root | None, list[Violation], int]:
    """Return the settings, or the first MOST_ERRORS violations and the number of further ones.

    Where the tree is not complete, an unreadable file may define a missing key.
    """
    # YAML has JSON's types, and only pydantic's strict mode for JSON accepts a list as a tuple and
    # a string as a path, but neither "3" nor true as a number.
    try:
        text = json.dumps(plain(tree), default=str)
        return root.model_validate_json(text, strict=True), [], 0
    except ValidationError as error:
        listed = error.errors(include_url=False)
        if nulls := [key for details in listed if (key := _deleting_null(root, tree, details))]:
            # These nulls delete what an earlier file states, so they are no errors; the rest may
            # have some.
            return _validated(root, reduce(_without, nulls, tree), complete=complete)
        renamed = {
            (*details["loc"][:-1], now)
            for details in listed
            if details["type"] == "extra_forbidden" and (now := renamed_to(root, details["loc"]))
        }
        reported = [
            details
            for details in listed
            if (complete or not _is_of_unread_file(root, tree, details))
            and (details["type"] not in MISSING or details["loc"] not in renamed)
        ]
        described = reported[:MOST_ERRORS]
        violations = [violation_of(root, tree, details) for details in described]
        violations += (
            violation
            for details in described
            for violation in violations_below(root, tree, details)
        )
        return None, violations, len(reported) - len(described)


def _is_of_unread_file(root: type[Settings], tree: Mapping, error: ErrorDetails) -> bool:
    """Return whether a file that cannot be read may define a missing key, or a block's class.

    A key that a class lacks is unknown only where the block itself says which class it is.
    """
    if error["type"] in MISSING:
        return True
    block, model = error["loc"][:-1], schema_of(root)
    union = schema.type_at(model, block[:-1])
    if error["type"] != "extra_forbidden" or not block or block[-1] not in schema.arms(union):
        return False
    node = find(tree, tuple(map(str, schema.without_arms(model, block))))
    return isinstance(node, Mapping) and schema.tag(union) not in node.entries


def _deleting_null(root: type[Settings], tree: Mapping, error: ErrorDetails) -> Key | None:
    """Return the key of a null that deletes an earlier file's key, which its block does not have.

    A block has fewer keys than before where a later file overrides its `source`, `kind` or `name`.
    """
    key = tuple(map(str, schema.without_arms(schema_of(root), error["loc"])))
    node = find(tree, key) if error["type"] == "extra_forbidden" else None
    return key if isinstance(node, Leaf) and node.value is None and node.replaces else None


def _without(tree: Mapping, key: Key) -> Mapping:
    """Return the tree without a key."""
    block = find(tree, key[:-1])
    assert isinstance(block, Mapping)
    remaining = {name: node for name, node in block.entries.items() if name != key[-1]}
    return replaced(tree, key[:-1], Mapping(remaining, block.place))


def _reading_order(violation: Violation) -> tuple[str, int]:
    return str(violation.place.file or ""), violation.place.line or 0
