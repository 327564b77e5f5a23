"""The text of a new run's configuration, and of the cluster's profile with its walltimes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.settings import LayoutSettings, ModelSettings
from pipeline.config.read import CONFIGS
from pipeline.config.yaml_core import dump_line

PARENT = CONFIGS / "runs" / "_experts_merge.yaml"
SFT_PARENT = CONFIGS / "runs" / "_sft_experts_merge.yaml"  # which extends PARENT
# Of a model's settings, what a run's file states of any model.
PLACES = {"initial_weights", "tokenizer"}
ASIDE = 27  # the column of a comment after a key
# Keys of a cluster's profile that only its users know: an example, and what the key is.
TO_FILL_IN: dict[str, tuple[Any, str]] = {
    "account": ("my_project", "sbatch --account: whose hours are spent (sacctmgr show assoc)"),
    "partition": ("gpu", "sbatch --partition: the queue of these nodes (sinfo)"),
    "memory_per_node": (
        "900G",
        'sbatch --mem: of a node (sinfo -o %m), "0" is all; Slurm\'s own default may be a few GB',
    ),
    "network_interface": ("ib0", "of the private network that all nodes share (ip -brief address)"),
    "setup": (["module load cuda"], "shell lines before every stage: modules, NCCL_* variables"),
}
GPU_TYPE = "as Slurm names it (sinfo -o %G); null where its GPUs have no types"


@dataclass(frozen=True)
class NewDomain:
    """A domain of a new run: the shipped file that it extends, its own keys, and its rows."""

    base: Path
    keys: Mapping[str, Any]
    about: str = ""


@dataclass(frozen=True)
class NewRun:
    """The content of a new run's file.

    `described` is the shipped file of the model, None where the run states its sizes. `cold_start`
    and `merge` are the keys of these blocks, None for a run without one. `head` and `about_layout`
    are comments, at the top and above the layout.
    """

    name: str
    model: ModelSettings
    described: Path | None
    weights: Path
    domains: Mapping[str, NewDomain]
    layout: LayoutSettings | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    cold_start: Mapping[str, Any] | None = None
    merge: Mapping[str, Any] | None = None
    problems: int | None = None
    head: Sequence[str] = ()
    about_layout: Sequence[str] = ()

    def text(self, directory: Path) -> str:
        """Return the YAML of a file in a directory; in the checkout its paths are relative."""
        parent = PARENT if self.cold_start is None else SFT_PARENT
        lines = [f"# {comment}" for comment in self.head]
        lines += [
            f"extends: {dump_line(_path(parent, directory))}",
            f"name: {dump_line(self.name)}",
            "",
        ]
        lines += [*self._model(directory), "", "domains:"]
        for name, domain in self.domains.items():
            lines.append(_aside(f"  {dump_line(name)}:", domain.about))
            lines.append(f"    extends: {dump_line(_path(domain.base, directory))}")
            lines += [f"    {key}: {dump_line(value)}" for key, value in domain.keys.items()]
        lines += ["", *(f"# {comment}" for comment in self.about_layout)]
        if self.layout is not None:
            lines.append(f"layout: {dump_line(differing(self.layout))}")
        if self.engine:
            lines.append(f"engine: {dump_line(dict(self.engine))}")
        lines += ["", *self._stages()]
        if self.problems is not None:
            lines.append(f"evaluation: {dump_line({'problems': self.problems})}")
        return "\n".join(lines).rstrip() + "\n"

    def _model(self, directory: Path) -> list[str]:
        lines = ["model:"]
        if self.described is not None:
            lines.append(f"  extends: {dump_line(_path(self.described, directory))}")
        else:
            sizes = self.model.model_dump(mode="json", exclude=PLACES | {"initialization"})
            lines += [f"  {key}: {dump_line(value)}" for key, value in sizes.items() if value != {}]
        weights = dump_line(str(self.weights))
        return [*lines, f"  initial_weights: {weights}", f"  tokenizer: {weights}"]

    def _stages(self) -> list[str]:
        lines = []
        for name, keys in (("cold_start", self.cold_start), ("merge", self.merge)):
            if keys:
                lines.append(f"  {name}:")
                lines += [f"    {key}: {dump_line(value)}" for key, value in keys.items()]
        if self.merge is None:
            [domain] = self.domains
            export = dump_line({"from": f"experts.{domain}"})
            lines += ["  merge: null  # one domain has nothing to merge", f"  export: {export}"]
        return ["stages:", *lines] if lines else []


def profile_text(
    base: Path,
    directory: Path,
    keys: Mapping[str, Any],
    times: Mapping[str, str],
    head: str,
    *,
    fill_in: bool,
) -> str:
    """Return the YAML of a cluster's profile that extends `base` with walltimes by kind.

    To `fill_in` it has the keys that only the cluster's users know, as comments.
    """
    lines = [f"# {comment}" for comment in head.splitlines()]
    lines.append(f"extends: {dump_line(_path(base, directory))}")
    about = {"gpu_type": GPU_TYPE} if fill_in else {}
    lines += [
        _aside(f"{key}: {dump_line(value)}", about.get(key, "")) for key, value in keys.items()
    ]
    if fill_in:
        lines += ["", "# FILL IN what your cluster needs: remove the first #, write your value."]
        examples = TO_FILL_IN.items()
        lines += [_aside(f"# {key}: {dump_line(value)}", what) for key, (value, what) in examples]
        lines.append("")
    if times:
        lines.append("kinds:")
    lines += [f'  {kind}: {{walltime: "{walltime}"}}' for kind, walltime in times.items()]
    return "\n".join(lines) + "\n"


def differing(layout: LayoutSettings) -> dict[str, Any]:
    """Return the keys of a layout that are not the default."""
    keys = layout.model_dump(mode="json", exclude_defaults=True)
    return {"ranks": layout.ranks, **keys}


def _path(path: Path, directory: Path) -> str:
    """Return a path relative to a directory of the same checkout, else as it is."""
    path, directory = path.absolute(), directory.absolute()
    same = directory.is_relative_to(CONFIGS.parent) and path.is_relative_to(CONFIGS.parent)
    return os.path.relpath(path, directory) if same else str(path)


def _aside(line: str, comment: str) -> str:
    return f"{line.ljust(ASIDE - 2)}  # {comment}" if comment else line
