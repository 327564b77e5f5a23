"""The fuzzer of configurations: damaged copies of configs/, through everything that reads them.

A case is a few edits. An edit knows the settings' schema (keys, types, bounds), YAML's syntax, or
how files extend each other. The settings are either accepted, and their run.yaml loads as equal
settings, or raise a ConfigError in which every violation names a file or a key.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from parallel.settings import ModelSettings
from pipeline.config.cluster import ClusterSettings
from pipeline.config.read import ConfigError
from pipeline.config.validate import dump_resolved, load, load_cluster, load_domain
from pipeline.estimate.memory import memory_report
from pipeline.run.graph import compile_graph
from pipeline.tables import terminal
from stages.domains import DomainSettings
from stages.rewards.reward import RewardPoolSettings
from stages.settings import RunSettings

from .worker import CONTROL, REPOSITORY, Case, FuzzStep, raised
from .yaml_traps import CONFUSABLE, NAMES, Raw, damaged_text, encoded, flow, key, scalar

CONFIGS = REPOSITORY / "configs"
RUNS = ("quickstart.yaml", "smoke.yaml")
ROOTS: dict[str, type[BaseModel]] = {
    "models": ModelSettings,
    "domains": DomainSettings,
    "clusters": ClusterSettings,
    "": RunSettings,
}


@dataclass
class Config:
    """A case: files by name, the one to load, and overrides.

    `links` are symlinks by name, or FIFOs where the target is empty.
    """

    entry: str
    trees: dict[str, dict[str, Any]]
    texts: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write all files below a directory."""
        texts = {name: encoded(tree) for name, tree in self.trees.items()}
        for name, text in {**texts, **self.texts}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        for name, target in self.links.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target) if target else os.mkfifo(folder / name)


def generate(random: Random) -> Config:
    """Return a case: a real configuration with one to four edits."""
    paths = sorted(CONFIGS.rglob("*.yaml"))
    trees = {str(p.relative_to(CONFIGS)): yaml.safe_load(p.read_text()) for p in paths}
    others = [name for name in trees if name.startswith(("domains/", "clusters/"))]
    entry = random.choice([*RUNS, *RUNS, *RUNS, random.choice(others)])
    config = Config(entry, trees)
    for _ in range(random.choice([1, 1, 1, 2, 2, 4])):
        edit = random.choices([*EDITS], weights=EDITS.values())[0]
        edit(random, config)
    return config


def cases(seed: int, folder: Path, *, keep: bool = False) -> Case:
    """Return the function from a number to its case, which writes below `folder`."""

    def case(number: int) -> Iterator[FuzzStep]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = generate(Random(f"configs {seed} {number}"))
        config.write(folder)
        if keep:
            print(f"load {folder / config.entry} {config.overrides}")
        yield from check(folder, config.entry, config.overrides)

    return case


def check(folder: Path, entry: str, overrides: list[str]) -> Iterator[FuzzStep]:
    """Load the file as a run, domain or cluster profile. Yield the outcome of each step."""
    kind = entry.partition("/")[0] if "/" in entry else "run"
    try:
        yield from _loaded(kind, folder / entry, overrides)
    except ConfigError as error:
        yield _judged(kind, error)
    except Exception as error:
        yield raised(kind, error)


def _loaded(kind: str, path: Path, overrides: list[str]) -> Iterator[FuzzStep]:
    """Load a file, use the settings, and compare them with themselves after a round trip."""
    settings: BaseModel
    if kind == "domains":
        settings = load_domain(path, RewardPoolSettings())
    elif kind == "clusters":
        settings = load_cluster(path)
    else:
        run = settings = load(path, overrides)
        yield FuzzStep("load", "accepted")
        compile_graph(run)
        with redirect_stdout(io.StringIO()):
            for part in memory_report(run):
                terminal().print(part)
        yield FuzzStep("memory", "accepted")
        again = path.with_name("resolved.yaml")
        again.write_text(dump_resolved(run), encoding="utf-8")
        yield _compared("run.yaml", load(again), run)
    found = type(settings).model_validate_json(settings.model_dump_json(), strict=True)
    yield _compared(kind, found, settings)


def _compared(name: str, found: BaseModel, settings: BaseModel) -> FuzzStep:
    if found == settings:
        return FuzzStep(name, "accepted")
    return FuzzStep(
        name, "difference", "it loads as different settings", f"{found!r}\n{settings!r}"
    )


def _judged(kind: str, error: ConfigError) -> FuzzStep:
    """Return whether each violation has a location, on one line of printable characters."""
    for violation in error.violations:
        text = str(violation)
        named = violation.key or "an override must be written" in text
        if not named and violation.place.file is None:
            return FuzzStep(kind, "unclear", "a violation names neither file nor key", text)
        if CONTROL.search(text) or "\n" in text:
            return FuzzStep(
                kind, "control", "a violation prints control characters", repr(text)[:2000]
            )
    return FuzzStep(kind, "refused", detail=str(error)[:2000])


def _set_value(random: Random, config: Config) -> None:
    """Change the value of a key of the schema, mostly to one of its type."""
    name = _file(random, config)
    path, annotation, bounds = _spot(random, _root(name))
    value = plausible(random, annotation, bounds) if random.random() < 0.6 else scalar(random)
    _put(config.trees[name], path, value)


def _damage_key(random: Random, config: Config) -> None:
    """Misspell, delete, move or copy an existing key."""
    tree = config.trees[_file(random, config)]
    mappings = [tree, *(value for value in tree.values() if isinstance(value, dict) and value)]
    mapping = random.choice(mappings)
    if not mapping:
        return
    old = random.choice([*mapping])
    if random.random() < 0.3:
        del mapping[old]
    elif random.random() < 0.3:
        random.choice(mappings)[old] = deepcopy(mapping[old])
    else:
        mapping[key(random, old)] = mapping.pop(old) if random.random() < 0.6 else scalar(random)


def _override(random: Random, config: Config) -> None:
    """Add a valid or an invalid override."""
    path, annotation, bounds = _spot(random, RunSettings)
    dotted = ".".join(path)
    value = scalar(random) if random.random() < 0.4 else flow(plausible(random, annotation, bounds))
    wrong = [
        *("", "=", "a", "a..b=1", ".a=1", "=1", dotted, f"{dotted}.x=1", f"{dotted}==1"),
        *(f"{dotted.translate(CONFUSABLE)}=1", "name=\udcff", "\udcff=1", f"{dotted}=\x1b[2J"),
        *("model=null", "domains={}", "domains.chain_sum.extends=x.yaml", "extends=smoke.yaml"),
        f"model.architecture.{'a.' * random.choice([3, 100, 130, 600, 2000])}a=1",
        f"name={'x' * 5000}",
    ]
    right = f"{dotted}={value}"
    config.overrides.append(right if random.random() < 0.75 else random.choice(wrong))


def _extend(random: Random, config: Config) -> None:
    """Let a mapping extend a wrong file, or something that is not a file."""
    name = _file(random, config)
    up = "../" * name.count("/")
    targets = [
        *(up + other for other in config.trees),
        *("nope.yaml", ".", "..", "", "a\0b", "x" * 5000, "/dev/null", "~/x.yaml", "a\nb"),
        *([], ["a", "b"], 3, None, {"a": 1}, True, Raw("*a"), Raw("!!binary aGk=")),
    ]
    links = {"loop.yaml": "loop.yaml", "fifo.yaml": "", "zero.yaml": "/dev/zero", "dir.yaml": "."}
    links |= {"gone.yaml": "nowhere", "self.yaml": Path(name).name}
    target = random.choice(targets)
    if random.random() < 0.15:
        link = random.choice([*links])
        config.links[str(Path(name).parent / link)] = links[link]
        target = link
    path = _spot(random, _root(name))[0][: random.choice([0, 0, 1, 2])]
    _put(config.trees[name], [*path, "extends"], target)


def _chain(random: Random, config: Config) -> None:
    """Let a file extend a long chain of files, a cycle, or a tree that multiplies."""
    length = random.choice([2, 5, 9, 50, 200])
    width = 1 if length > 9 else random.choice([1, 2, 10])
    nodes = [f"chain/c{number}.yaml" for number in range(length)]
    for number, node in enumerate(nodes):
        last = number + 1 == length
        target = random.choice(["", "c0.yaml"]) if last else f"c{number + 1}.yaml"
        below = {"extends": target} if target else {"name": "chain"}
        deeper = {f"k{each}": below for each in range(width)}
        config.trees[node] = below if width == 1 else deeper
    name = _file(random, config)
    config.trees[name]["extends"] = "../" * name.count("/") + nodes[0]


def _damage_text(random: Random, config: Config) -> None:
    """Damage the bytes of a file."""
    name = _file(random, config)
    text = config.texts.get(name) or encoded(config.trees[name])
    for _ in range(random.choice([1, 1, 3])):
        text = damaged_text(random, text)
    config.texts[name] = text


def _rename(random: Random, config: Config) -> None:
    """Load the file under another name; a domain is named after its file."""
    new = f"{random.choice(NAMES).replace('/', '')}.yaml"
    folder, slash, _ = config.entry.rpartition("/")
    name = f"{folder}{slash}{new}"
    if len(new) < 200 and name not in config.trees:
        config.trees[name] = config.trees[config.entry]
        config.entry = name


EDITS = {
    _set_value: 12,
    _override: 5,
    _damage_key: 5,
    _damage_text: 5,
    _extend: 2,
    _chain: 0.5,
    _rename: 0.5,
}


def _root(name: str) -> type[BaseModel]:
    return ROOTS.get(name.partition("/")[0] if "/" in name else "", RunSettings)


def _file(random: Random, config: Config) -> str:
    """Return a file that is read with the entry: itself, an extended one, or a domain."""
    folder, _, _ = config.entry.rpartition("/")
    if folder == "clusters":
        return config.entry
    if folder:
        return random.choice([config.entry, config.entry, "domains/_base.yaml"])
    read = ["quickstart.yaml", "models/tiny-moe.yaml", "pipelines/experts-merge.yaml"]
    return random.choice([config.entry, *read, "domains/_base.yaml", "domains/chain_sum.yaml"])


def _spot(random: Random, root: type[BaseModel]) -> tuple[list[str], Any, list[Any]]:
    """Return a random key of the schema as a path, its annotation and its bounds."""
    path: list[str] = []
    annotation, bounds = root, []
    while True:
        arms = [arm for arm in _arms(annotation) if arm is not NoneType]
        annotation = random.choice(arms) if arms else annotation
        if _is_settings(annotation):
            name, found = random.choice([*annotation.model_fields.items()])
            path.append(found.alias or name)
            annotation, bounds = found.annotation, found.metadata
        elif get_origin(annotation) is dict:
            names = ["chain_sum", "exact", "experts", "merge", random.choice(NAMES), "x"]
            path.append(random.choice(names))
            annotation, bounds = get_args(annotation)[1], []
        else:
            return path, annotation, bounds
        if random.random() < 0.15:
            return path, annotation, bounds


def plausible(random: Random, annotation: Any, bounds: list[Any]) -> Any:
    """Return a value of the annotation's type, mostly within its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plausible(random, arguments[0], [*bounds, *arguments[1:]])
    if arms := _arms(annotation):
        return plausible(random, random.choice(arms), bounds)
    if origin is Literal:
        return random.choice(arguments)
    if origin is dict:
        names = random.sample(
            ["chain_sum", "exact", "x", "experts", "merge"], random.choice([0, 1, 2])
        )
        return {name: plausible(random, arguments[1], []) for name in names}
    if origin in (list, tuple):
        several = [each for each in arguments if each is not ...]
        several = several if len(several) > 1 else several * random.choice([0, 1, 2])
        return [plausible(random, each, []) for each in several]
    if _is_settings(annotation):
        return _block(random, annotation)
    if annotation is NoneType:
        return None
    if annotation is bool:
        return random.random() < 0.5
    if annotation in (int, float):
        return _number(random, annotation, bounds)
    if annotation is Any:
        return scalar(random)
    return random.choice(["characters", "chain_sum", "x", "../x", "a.b:c", *NAMES])


def _block(random: Random, annotation: type[BaseModel]) -> dict[str, Any]:
    return {
        found.alias or name: plausible(random, found.annotation, found.metadata)
        for name, found in annotation.model_fields.items()
        if found.is_required() or get_origin(found.annotation) is Literal or random.random() < 0.2
    }


def _number(random: Random, annotation: type, bounds: list[Any]) -> float:
    low = next((b.ge for b in bounds if hasattr(b, "ge")), None)
    low = next((b.gt + (annotation is int) for b in bounds if hasattr(b, "gt")), low) or 0
    high = next((getattr(b, n) for b in bounds for n in ("le", "lt") if hasattr(b, n)), 10**6)
    if annotation is float:
        return random.choice([low, high, (low + high) / 2, 1e-3, 0.5, 1.0, 1e-30, -low - 1e-3])
    near = [low, low, low + 1, low + 1, 2, 4, 8, 16, 64, 96, 100, 1024]
    return random.choice([*near, high, high + 1, low - 1, 10**9, 2**40])


def _arms(annotation: Any) -> list[Any]:
    """Return the members of a union, or none for another annotation."""
    if get_origin(annotation) is Annotated:
        return _arms(get_args(annotation)[0])
    return [*get_args(annotation)] if get_origin(annotation) in (Union, UnionType) else []


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set the value at a path, and create mappings on the way."""
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[path[-1]] = value
