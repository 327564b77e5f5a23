"""Code fences of Markdown in a response: programs and JSON stand in them, written in many ways.

A fence may have any name, case, indentation, length and line ending; it is read line by line as
CommonMark does, and forgives what models write: a closing fence at the end of a line of code, or
none before the response ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Two parts that match the same blanks would take quadratic time where a backtick follows.
FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<mark>`{3,}|~{3,})(?P<info>[^`]*)")
PYTHON = re.compile(r"i?py(thon)?[\d.]*|\S+\.py")
# A closing fence that is indented by more than this beyond its opening one is text, as in the
# docstring of a function.
INDENT = 3


@dataclass
class Fence:
    """A fence's name, in lower case and "" for none, and its lines; `ends` where it is closed."""

    name: str
    indent: int
    mark: str
    begins: int  # the line of its opening mark
    lines: list[str]
    ends: int | None = None  # the line of its closing mark

    @property
    def content(self) -> str:
        """The text inside, moved to the left by the indentation of its first line.

        Each line has its end, except the last of a fence that is not closed.
        """
        first_line = next((line for line in self.lines if line.strip()), "")
        margin = len(first_line) - len(first_line.lstrip(" \t"))
        indentation = re.compile(rf"[ \t]{{0,{margin}}}")
        moved = [indentation.sub("", line, count=1) for line in self.lines]
        return "\n".join(moved) + ("\n" if self.lines and self.ends is not None else "")


def read_fences(text: str) -> list[Fence]:
    """Return the fences of a text in their order."""
    fences: list[Fence] = []
    open_fence: Fence | None = None
    for number, line in enumerate(unix_lines(text)):
        mark = FENCE.fullmatch(line)
        if open_fence is None:
            if mark is not None:
                name = mark["info"].strip().lower().strip("{}.").split() or [""]
                open_fence = Fence(name[0], len(mark["indent"]), mark["mark"], number, [])
                fences.append(open_fence)
        elif mark is not None and _closes(mark, open_fence):
            open_fence.ends, open_fence = number, None
        else:
            open_fence.lines.append(line)
    if open_fence is not None:
        _close_within_line(open_fence)
        if not open_fence.name and not any(line.strip() for line in open_fence.lines):
            fences.pop()  # a closing fence that nothing opened
    return fences


def unix_lines(text: str) -> list[str]:
    """Return the lines of a text that ends them as Unix, DOS or old Macs do."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _closes(mark: re.Match[str], fence: Fence) -> bool:
    return (
        not mark["info"].strip()
        and mark["mark"].startswith(fence.mark)
        and len(mark["indent"]) <= fence.indent + INDENT
    )


def _close_within_line(fence: Fence) -> None:
    """Close a fence that is open at the end of the text at a mark that ends a line of its code."""
    for number, line in enumerate(fence.lines):
        if line.rstrip().endswith(fence.mark):
            fence.lines = [*fence.lines[:number], line.rstrip().rstrip(fence.mark[0])]
            fence.ends = fence.begins + 1 + number
            return


def unfenced(text: str) -> str:
    r"""Return the content of the code fence that the text consists of, or the text.

    Example:
        >>> unfenced("```json\n[1]\n```"), unfenced("[1]")
        ('[1]\n', '[1]')
    """
    stripped = text.strip()
    fences = read_fences(stripped)
    if len(fences) != 1 or fences[0].begins or fences[0].ends != len(unix_lines(stripped)) - 1:
        return text
    return fences[0].content


def extract_program(response: str, prompt: str = "") -> str:
    r"""Return the program of a response: its last fence that is named for Python.

    Without one it is the last fence without a name, else the last of any name, else all of the
    response. The prompt may end with the line that opens the fence.

    Example:
        >>> extract_program("First:\n```\n1\n```\nSo:\n```python\nprint(4)\n```\nDone.")
        'print(4)\n'
    """
    opening = FENCE.fullmatch(unix_lines(prompt.rstrip())[-1])
    if opening is not None and PYTHON.fullmatch(opening["info"].strip().lower()):
        response = f"{opening[0]}\n{response}"
    fences = read_fences(response)
    ranked = (
        [fence for fence in fences if PYTHON.fullmatch(fence.name)],
        [fence for fence in fences if not fence.name],
        fences,
    )
    programs = next(filter(None, ranked), None)
    if programs:
        return programs[-1].content
    lines = unix_lines(response)
    stray = max((n for n, line in enumerate(lines) if FENCE.fullmatch(line)), default=None)
    return "\n".join(lines if stray is None else lines[:stray])
