"""The report's one file: the pages, their program and the data, with no address but its own."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from html import escape
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any

from parallel.errors import UserError
from pipeline.text import visible

WEB = Path(__file__).parent / "web"
CHARTS = WEB / "vendor" / "uplot"
DEMO = Path(__file__).with_name("demo.json.gz")  # of a small run, which tools/demo.py wrote
PROGRAM = (
    *("dom.js", "charts.js", "curves.js", "verdict.js", "samples.js", "sample.js", "versus.js"),
    *("merge.js", "routing.js", "time.js", "lineage.js", "app.js"),
)


def report_file(document: Mapping[str, Any]) -> str:
    """Return the HTML of a report's data.

    Raises:
        UserError: the charts' library is missing, which `make install` downloads.
    """
    try:
        charts = (CHARTS / "uPlot.iife.min.js").read_text()
        chart_style = (CHARTS / "uPlot.min.css").read_text()
        licence = (CHARTS / "LICENSE").read_text()
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename} is missing, the library of the report's charts: download it with"
            " python -m tools.vendor, as `make install` does"
        ) from error
    # Without a time of compression equal data gives an equal file.
    packed = gzip.compress(_json(document).encode(), 9, mtime=0)
    return Template((WEB / "index.html").read_text()).substitute(
        title=escape(visible(document["run"]["name"])),
        style=(WEB / "style.css").read_text(),
        chart_style=chart_style,
        charts=f"/* uPlot\n{licence}*/\n{charts}",
        data=base64.b64encode(packed).decode(),
        program="\n".join((WEB / name).read_text() for name in PROGRAM),
    )


def demo_document() -> dict[str, Any]:
    """Return the data of the report of `braid report --demo`."""
    document: dict[str, Any] = json.loads(gzip.decompress(DEMO.read_bytes()))
    return document


def _json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON, in which a number that is none, of a damaged file, is null."""
    try:
        return json.dumps(document, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value with null for every infinity and NaN in it."""
    if isinstance(value, Mapping):
        return {key: _finite(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not isfinite(value) else value
