"""What the files hold that a stage reads, in short: a stage whose data or tokenizer was replaced
under the same name is stale."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallel.files import CHARACTERS

TOKENIZER = "model.tokenizer"
TEMPLATE = "model.tokenizer (its chat template)"
# Of a tokenizer's folder, which may be a whole model's.
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)
# Of longer data files only the size, the beginning and the end are read, so that `braid status`
# answers at once.
WHOLE_BYTES, END_BYTES = 1 << 20, 1 << 16


def fingerprints(reads: dict[str, Any]) -> dict[str, str | None]:
    """A digest for every key of a stage's settings that names files; None where they are gone."""
    found: dict[str, str | None] = {}
    tokenizer = reads.get(TOKENIZER, CHARACTERS)
    if tokenizer != CHARACTERS:
        folder = Path(tokenizer)
        files = {file for name in TOKENIZER_FILES for file in folder.glob(name)}
        found[TOKENIZER] = _digest(files, whole=True)
        found[TEMPLATE] = template_digest(folder)
    for key in reads:
        if key.endswith((".prompts.path", ".demonstrations.path")):
            found[key] = _digest(_data_files(reads, key))
    return found


def _data_files(reads: dict[str, Any], key: str) -> list[Path]:
    # Imported here, since building the settings classes takes longer than all of `braid status`.
    from stages.data.sources.settings import FileSettings

    source = reads[f"{key.removesuffix('path')}source"]
    return FileSettings(source=source, path=reads[key]).files()


def template_digest(folder: Path) -> str | None:
    """SHA-256 of a tokenizer's chat template, as `stages.data.tokenizer` computes it;
    None where there is none."""
    try:
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        try:
            text = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
            template = json.loads(text).get("chat_template")
        except (OSError, ValueError):
            return None
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def _digest(files: Iterable[Path], whole: bool = False) -> str | None:
    """SHA-256 of the files' names and contents, whatever folder they stand in."""
    digests = []
    for file in sorted(files):
        if file.is_file():
            stat = file.stat()
            digest = _file_digest(file, stat.st_size, stat.st_mtime_ns, whole)
            digests.append([file.name, digest])
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if digests else None


@lru_cache(maxsize=4096)
def _file_digest(file: Path, size: int, changed: int, whole: bool) -> str:
    """`size` in bytes and the time it `changed` tell whether what is remembered still holds."""
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        if whole or size <= WHOLE_BYTES:
            found.update(content.read())
        else:
            found.update(content.read(END_BYTES))
            content.seek(size - END_BYTES)
            found.update(content.read())
    return found.hexdigest()
