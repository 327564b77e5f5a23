"""The findings of the GPU lane's parts: numbers with their bounds, or why a part was skipped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """A number of a part; without a bound it is only reported. NaN is beyond every bound."""

    name: str
    value: float | str
    unit: str = ""
    bound: float | None = None

    @property
    def wrong(self) -> bool:
        """True where the number is beyond its bound."""
        return self.bound is not None and not float(self.value) <= self.bound

    @property
    def line(self) -> str:
        """The finding as a line of the table."""
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        shown = f"{value} {self.unit}".strip()
        if self.bound is None:
            return f"{self.name}: {shown}"
        return (
            f"{self.name}: {shown} ({'WRONG, above' if self.wrong else 'at most'} {self.bound:g})"
        )


@dataclass(frozen=True)
class PartResult:
    """A part's findings; `skipped` or `failed` says why it has none."""

    part: str
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    skipped: str = ""
    failed: str = ""

    @property
    def wrong(self) -> bool:
        """True where the part failed or a number is wrong."""
        return bool(self.failed) or any(each.wrong for each in self.findings)

    @property
    def table(self) -> str:
        """The part as lines for a person."""
        if self.skipped:
            return f"{self.part}: skipped: {self.skipped}"
        if self.failed:
            return f"{self.part}: FAILED after {self.seconds:.0f} s: {self.failed}"
        verdict = "WRONG" if self.wrong else "ok"
        lines = [f"{self.part}: {verdict} ({self.seconds:.0f} s)"]
        return "\n".join([*lines, *(f"    {each.line}" for each in self.findings)])


def write(path: Path, results: Iterable[PartResult]) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")


def read(path: Path) -> list[PartResult]:
    """Read results that `write` wrote."""
    return [
        PartResult(**{**each, "findings": tuple(Finding(**found) for found in each["findings"])})
        for each in json.loads(path.read_text())
    ]
