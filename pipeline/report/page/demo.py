"""The bundled report of `braid report --demo`: a small run's data, which tools/demo.py wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

DEMO = Path(__file__).with_name("demo.json.gz")


def demo_document() -> dict[str, Any]:
    """Return the data of the bundled run's report."""
    document: dict[str, Any] = json.loads(gzip.decompress(DEMO.read_bytes()))
    return document
