"""The YAML reader: scalars of version 1.2, and one clear error for invalid documents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from pipeline.config import rules
from pipeline.config.read import ConfigError, Reader, plain
from pipeline.config.validate import dump_resolved, load
from pipeline.config.yaml_core import dump_line
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.test_bounds import within
from tests.pipeline.violations import edited, errors

REPOSITORY = Path(__file__).parents[2]


def read(text: str) -> object:
    """Return the value of an override that has no error."""
    reader = Reader()
    node = reader.value(text, ("key",))
    assert node is not None and not reader.violations, reader.violations
    return plain(node)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("+3", 3),
        ("0", 0),
        ("0o10", 8),
        ("0xFf", 255),
        ("4e-3", 4e-3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-0.0", 0.0),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),
        ("1_0", "1_0"),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("off", "off"),
        ("2026-01-01", "2026-01-01"),
        ("0b11", "0b11"),
        ("=", "="),
        ("'010'", "010"),
        ("[1, [off, {a: 1:30}]]", [1, ["off", {"a": "1:30"}]]),
        ("[{1: a, <<: b}]", [{"1": "a", "<<": "b"}]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert read(text) == value
    assert type(read(text)) is type(value)


@pytest.mark.parametrize("text", ["010", "-08", "00", "1:30", "1_0"])
def test_numbers_that_differ_between_yaml_versions_are_not_integers(
    config: Path, text: str
) -> None:
    [error] = errors(config, f"seed={text}")
    if ":" in text or "_" in text:
        assert error == f'command line: seed: should be a valid integer, not "{text}"'
    else:
        assert error == (
            f"command line: seed: {text} has a leading zero: octal in YAML 1.1, decimal in 1.2; "
            "remove the zero, or quote text"
        )


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "Y"])
def test_words_are_not_booleans(config: Path, text: str) -> None:
    assert errors(config, f"deterministic={text}") == [
        f'command line: deterministic: should be true or false, not "{text}"'
    ]


@pytest.mark.parametrize(
    "name", ["1e5", "0o17", "010", "1_000", "yes", "1.5", "0x1F", "2026-01-01"]
)
def test_text_that_looks_like_another_value_is_quoted(config: Path, name: str) -> None:
    settings = load(config, [f"name='{name}'"])
    config.write_text(dump_resolved(settings))
    assert load(config) == settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: !!bool maybe", "2: not valid YAML: the tag !!bool is not supported; "),
        ("seed: !!int '3'", "2: not valid YAML: the tag !!int is not supported; "),
        ("layout: !!python/object:os.system {ranks: 2}", "2: not valid YAML: the tag !!python/o"),
        (
            "seed: !custom 3",
            "2: not valid YAML: the tag !custom is not supported; write the plain val",
        ),
        (
            "cold_start: {optimizer: {betas: [{a: 1, a: 2}]}}",
            "2: cold_start.optimizer.betas.0.a: duplicate key in this mapping",
        ),
        ('name: "a\\ud800"', "2: name: contains a lone surrogate, which"),
        ('"na\\udfffme": 1', "2: na\\udfffme: the key contains a lone surrogate, which"),
        ("seed: " + "[" * 100 + "]" * 100, "2: seed: nested too deeply"),
        ("seed: " + "[" * 9000 + "]" * 9000, "2: seed: nested too deeply"),
        ("seed: " + "{a: " * 150 + "1" + "}" * 150, "2: seed.a.a.a"),
        ("? [a, b]\n: 1", "2: not valid YAML: keys must be text"),
        ("seed: " + "9" * 5000, "2: seed: the integer does not fit in 64 bits"),
        (
            "cold_start: {optimizer: {betas: [1, 9999999999999999999999]}}",
            "betas.1: the integer does not fit",
        ),
    ],
)
def test_invalid_yaml_is_reported_with_its_location(config: Path, line: str, message: str) -> None:
    base = config.with_name("base.yaml")
    config.rename(base)
    config.write_text(f"extends: base.yaml\n{line}\n")
    found = errors(config)
    assert any(f"small.yaml:{message}" in each or message in each for each in found), found
    assert not any("Invalid JSON" in each for each in found), found
    assert max(map(len, found)) < 1500


def test_depth_is_bounded_across_files_and_overrides(config: Path) -> None:
    deep = "a: {" * 50 + "b: 1" + "}" * 50
    config.with_name("deep.yaml").write_text(deep + "\n")
    nested = "{a: " * 40 + "{extends: deep.yaml}" + "}" * 40
    old = "prompts: {dataset: chain_sum"
    edited(config, old, f"{old}, config: {nested}")
    assert any(": nested too deeply" in each for each in errors(config))
    long = ".".join(["domains.sums.prompts.config", *"a" * 3000])
    assert any(": nested too deeply" in each for each in errors(config, f"{long}=1"))


def test_an_override_that_is_not_utf8_is_one_error(config: Path) -> None:
    raw = os.fsdecode(b"name=\xff\xfe")
    assert errors(config, raw) == ["command line: name: not UTF-8 text"]
    [error] = errors(config, os.fsdecode(b"na\xffme=a"))
    assert "unknown key" in error


@pytest.mark.parametrize("what", ["directory", "pipe", "device", "absent", "not text"])
def test_a_path_that_is_not_a_text_file_is_an_error_at_once(tmp_path: Path, what: str) -> None:
    path, reason = tmp_path / "run.yaml", "not a regular file"
    if what == "directory":
        path.mkdir()
        reason = "neither a configuration nor a bundle: no bundle.json in it"
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path = Path("/dev/zero")
    elif what == "absent":
        reason = "No such file or directory"
    else:
        path.write_bytes(b"\xff\xfe")
        reason = "not a UTF-8 text file"
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "validate", str(path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    said = f"{path}: cannot be read: {reason}" if what != "directory" else f"{path}: {reason}"
    assert done.stderr.splitlines()[-1].removeprefix("braid: ") == said


def test_extends_that_multiply_are_an_error_at_once(config: Path) -> None:
    for number in range(9):
        keys = [f"k{key}: {{extends: f{number + 1}.yaml, x: 1}}" for key in range(10)]
        config.with_name(f"f{number}.yaml").write_text("\n".join(keys) + "\n")
    config.with_name("f9.yaml").write_text("a: 1\n")
    edited(config, "name: small", "name: small\nevaluation: {extends: f0.yaml}")
    with within(10):
        [error] = errors(config)
    assert error.startswith("f")
    assert "more than 1000000 keys and values, including extended files" in error


def test_the_size_and_the_keys_of_a_file_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_text("".join(f"key{number}: {number}\n" for number in range(2_600_000)))
    with within(2), pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).endswith("huge.yaml: cannot be read: larger than 8 MiB")
    path.write_text("".join(f"{number}: 1\n" for number in range(510_000)))
    with within(60), pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).endswith(": more than 1000000 keys and values")


def test_errors_are_counted_and_the_first_are_shown(config: Path) -> None:
    config.write_text("\n".join(f"key_{number}: 1" for number in range(3000)) + "\n")
    with within(20), pytest.raises(ConfigError) as caught:
        load(config)
    title, *lines, last = str(caught.value).splitlines()
    assert title == "3004 configuration errors:"
    assert last == "... and 2954 more"
    assert len(lines) == 50
    assert all(": unknown key" in line or ": required key" in line for line in lines)


def test_rules_only_see_valid_settings(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 75,000 empty domains take ten seconds, twice the limit for a file."""
    monkeypatch.setattr(rules, "violations", mock.Mock(side_effect=AssertionError))
    config.write_text("domains:\n" + "".join(f"  k{number}: {{}}\n" for number in range(500)))
    with pytest.raises(ConfigError, match=r"k9\.loop: required key is missing(.|\n)* more$"):
        load(config)


def test_a_long_value_or_key_is_shortened_in_the_message(config: Path) -> None:
    found = errors(config, "seed=" + "x" * 100_000, f"{'y' * 100_000}=1", "seed=" + "[1, " * 60)
    assert max(map(len, found)) < 1500


@pytest.mark.parametrize(
    "text",
    [
        *("1e3", "08", "0o7", "12e4", "3e5", "0x1F", "1_000", ".inf", "1:30", "2026-01-01", "+.5"),
        *("null", "~", "", "true", "No", "on", "y", "=", "<<", "-", "--", "---", "...", "- d"),
        *("a: b", "a #b", "# c", "[e]", "{f}", "&g", "*h", "!i", "|", ">", "%j", "@k", "`l", "? m"),
        *(" a", "a ", "a\nb", "a\tb", "'", '"', "\\n", "\x85", "\u2028", "\ufeff", "\x1b[m", "ü"),
    ],
)
def test_text_on_one_line_reads_back_as_the_same_text(text: str) -> None:
    value = [text, {"key": text, text or "empty": "value"}]
    line = dump_line(value)
    assert read(line) == value
    assert "\n" not in line
    assert read(dump_line(text)) == text
