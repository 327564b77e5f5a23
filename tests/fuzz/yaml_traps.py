"""Surprises of YAML, Unicode and numbers: raw text for a value, and ways to damage a file."""

from __future__ import annotations

import json
from random import Random
from typing import Any


class Raw(str):
    """Text that stands in a file as it is, where other values are written as YAML."""


SCALARS = [
    *("~", "null", "yes", "No", "on", "true", "TRUE", "''", '" "', "=", "<<", "-", "?", "0", "-1"),
    *("010", "0o17", "0x1F", "0b11", "1:30", "1_000", "1_0.5", "1,5", "+1", "1.", ".5", "١٢", "½"),
    *(".nan", ".inf", "-.inf", "NaN", "1e400", "-1e400", "1e-400", "1e5", "1.0e+5", "0.1e1_0"),
    *("4000000", "2147483648", "4000000000", "96000000000000", "9000000000000000000", "1e308"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809"),
    *("2001-01-01", "2001-99-99", "2001-01-01T00:00:00Z", "2001-01-01 00:00:00 +99:99"),
    *("!!bool maybe", "!!int x", "!!int ''", "!!float nan", "!!float x", "!!null x", "!!str 1"),
    *("!!binary x===", "!!binary aGk=", "!!timestamp x", "!!set {a, b}", "!!omap [a: 1]"),
    *("!!omap 1", "!!pairs [a: 1]", "!!map []", "!!seq {}", "!local x", "!<tag:x> 1", "! x"),
    *("!!python/object/apply:os.getcwd []", "!!python/object:os.system {a: 1}", "!!python/none"),
    *("&a 1", "*a", "[&a 1, *a]", "{<<: {a: 1}}", "{<<: [{a: 1}, 2]}", "{<<: 1}", "{a: 1, a: 2}"),
    *("[{a: 1, a: 2}]", "{[a]: 1}", "{{a: 1}: 2}", "{? a}", "{1: 2}", "{null: 1}", "{true: 1}"),
    *("{}", "[]", "[[]]", "[null]", "[1, 2", "{a: 1", "]", "}", "[a, b]", "{a: b}", "[.inf]"),
    *('"\\ud800"', '"\\x00"', '"\\e[2J"', '"\\u202e"', '"a\\nb"', '"[/red]"', "[bold]", '"\\L"'),
    *("'unclosed", '"unclosed', '"\\q"', "|\n    text", ">-\n    a\n    b", "|9\n  x", "%TAG"),
    *("`x", "# nothing", "--- 1", "... 1", "a: b", "- a", "${HOME}", "~/x", "/dev/zero", "../../x"),
    *("os.path:join", "pipeline.cli:main", "nowhere:x", "a..b:c", ":", "stages.domains:\u0430"),
]
KEYS = [
    *("? [a]", "<<", "*a", "&a b", "!!int 3", "!!bool maybe", "null", "1", "true", "1.5", ".nan"),
    *("''", "' '", '"a\\nb"', '"\\e[2J"', '"\\ud800"', '"a.b"', '"[/x]"', "extends", "name"),
]
CONFUSABLE = str.maketrans("aeiopcxs", "\u0430\u0435\u0456\u043e\u0440\u0441\u0445\u0455")
NAMES = ["", " ", ".", "..", "a/b", "a.b", "a b", "\u00e9", "[/x]", "x" * 300, "ни", "-x"]


def scalar(random: Random) -> Raw:
    """Return the text of a value that no setting expects, or that YAML reads in its own way."""
    if random.random() < 0.9:
        return Raw(random.choice(SCALARS))
    depth = random.choice([10, 100, 129, 140, 200, 400, 2000])
    return random.choice(
        [
            Raw("[" * depth + "]" * depth),
            Raw("{a: " * depth + "1" + "}" * depth),
            Raw("[" * depth),
            Raw("9" * random.choice([20, 400, 5000])),
            Raw("x" * random.choice([300, 100_000])),
            Raw("{" + ", ".join(f"k{i}: {i}" for i in range(random.choice([50, 3000]))) + "}"),
            Raw("[" + ", ".join("1" * 3000) + "]"),
        ]
    )


def key(random: Random, name: str) -> str:
    """Return a key that looks like `name`, or is none at all."""
    at = random.randrange(len(name) + 1)
    return random.choice(
        [
            name.translate(CONFUSABLE),
            name[:at] + "\u200b" + name[at:],
            name[:at] + name[at + 1 :],
            name.upper(),
            name + "s",
            f"{name} ",
            name.replace("_", "-"),
            Raw(random.choice(KEYS)),
            random.choice(NAMES),
        ]
    )


def emitted(tree: dict[str, Any], indent: int = 0) -> str:
    """Return a mapping as the text of a YAML file, raw texts in it as they are."""
    lines = []
    for name, value in tree.items():
        start = "  " * indent + (name if isinstance(name, Raw) else json.dumps(name))
        if isinstance(value, dict) and value:
            lines.append(f"{start}:\n{emitted(value, indent + 1)}")
        else:
            lines.append(f"{start}: {flow(value)}\n")
    return "".join(lines)


def encoded(tree: dict[str, Any]) -> bytes:
    """Return the bytes of a YAML file of a mapping."""
    return emitted(tree).encode("utf-8", "replace")


def flow(value: Any) -> str:
    """Return a value on one line, raw texts in it as they are."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    return json.dumps(value)


def damaged_text(random: Random, text: bytes) -> bytes:
    """Return the bytes of a file with one damage that knows lines and bytes, and no YAML."""
    at = random.randrange(len(text) + 1)
    lines = text.splitlines(keepends=True) or [b""]
    line = random.randrange(len(lines))
    before, here, after = lines[:line], lines[line], lines[line + 1 :]
    anything = bytes(random.choices(range(256), k=random.choice([1, 2, 8])))
    token = random.choice([b"\xef\xbb\xbf", b"\x00", b"\t", b"\xff", b"\xed\xa0\x80", b"\x1b[2J"])
    mark = random.choice([b"---\n", b"...\n", b"%YAML 9\n", b"<<: *a\n", b"? x\n", b"- x\n"])
    damages = {
        "cut": lambda: text[:at],
        "overwrite": lambda: text[:at] + anything + text[at + len(anything) :],
        "insert": lambda: text[:at] + token + text[at:],
        "begin": lambda: token + text,
        "drop": lambda: b"".join([*before, *after]),
        "twice": lambda: b"".join([*before, here, here, *after]),
        "indent": lambda: b"".join([*before, b"  " + here, *after]),
        "outdent": lambda: b"".join([*before, here.lstrip(b" "), *after]),
        "mark": lambda: b"".join([*before, mark, here, *after]),
        "returns": lambda: text.replace(b"\n", b"\r\n"),
        "wide": lambda: text.decode(errors="replace").encode("utf-16"),
        "repeat": lambda: text + text,
    }
    return damages[random.choice([*damages])]()
