"""Text that others have written, printed: nothing in it acts on the terminal or ends a command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from pipeline.launch.progress import Screen
from pipeline.run.ledger import Ledger
from pipeline.tables import Cell, Terminal, table
from pipeline.text import visible, while_slow
from tests.awaiting import PATIENCE_SECONDS

Braid = Callable[..., tuple[int, str, str]]

REPOSITORY = Path(__file__).parents[2]
# Clear the screen; set the title; go up; an 8-bit CSI; a separator of lines; a reversed text.
ACTS = "\x1b[2J\x1b]0;owned\x07\r\x1b[A\x9b2J\u2028\u202e"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\r\x1b[A\x9b2J\u2028\u202e"


def acts(text: str) -> bool:
    return visible(text, keep="\n") != text


def test_what_would_act_on_a_terminal_becomes_an_escape() -> None:
    assert visible(f"a{ACTS}b\n") == rf"a{SHOWN}b\n"
    assert visible("\udcff") == r"\udcff"
    for text in ("", "plain", "◆ 50 ± 5", "naïve 日本語 🙂", r"a\b", "a\u00a0b"):
        assert visible(text) == text
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_a_violation_is_one_line_whatever_its_key_and_value_hold(
    braid: Braid, config: Path
) -> None:
    with config.open("a") as file:
        file.write('"a\\nb\\x1b[2J": 1\nlayout_: {"\\u2028": 1}\n"c\\rd": 1\n')
    code, _, err = braid("validate", config, "seed=x\x1b[2J", "x\ny=1", "model.layers=\x1b")
    assert code == 1
    title, *lines = err.splitlines()
    assert title == f"braid: {len(lines)} configuration errors:"
    assert not acts(err)
    assert any(r": a\nb\x1b[2J: unknown key" in line for line in lines)
    assert any(r"c\rd: unknown key" in line for line in lines)


def test_what_a_ledger_holds_is_printed_as_text(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    ledger = Ledger(runs / "small" / "ledger.jsonl")
    ledger.append("cold_start", "failed", f"said {ACTS}\n  forged", 1)
    for command in (("status", "small"), ("why", "small", "cold_start")):
        code, out, err = braid(*command)
        assert (code, err) == (0, "")
        assert rf"said {SHOWN}\n  forged" in out
        assert not acts(out)
    code, _, err = braid("evaluate", "small", "--stage", f"x{ACTS}")
    assert f"no stage x{SHOWN} has a model" in err


def test_names_of_runs_and_what_differs_are_printed_as_text(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    other = runs / f"other{ACTS}"
    (runs / "small").rename(other)
    assert braid("run", config, "--only", "cold_start")[0] == 0
    manifest = other / "stages" / "cold_start" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "code": f"c{ACTS}\n"}))
    for command in (("status",), ("diff", other, "small"), ("why", other, "cold_start")):
        code, out, err = braid(*command)
        assert (code, err) == (0, "")
        assert SHOWN in out
        assert not acts(out)


def test_results_are_printed_as_text(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config)[0] == 0
    score = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 400}
    names = {f"[/x][red]:smile:{ACTS}": {f"[/y]{ACTS}": score}}
    (runs / "small" / "results.json").write_text(json.dumps({"models": names}))
    code, out, err = braid("status", "small")
    assert (code, err) == (0, "")
    assert r"[/x][red]:smile:\x1b[2J" in out
    assert r"[/y]\x1b[2J" in out
    assert not acts(out)


def test_a_log_is_printed_as_text(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    log = runs / "small" / "stages" / "cold_start" / "attempt_1" / "rank_0.log"
    log.write_bytes(b"\tone\r\x1b[2Jtwo\n\xff\n")
    assert braid("logs", "small", "cold_start")[1] == "\tone\r\\x1b[2Jtwo\n\ufffd\n"


def test_a_terminal_shows_text_and_draws_only_itself(tmp_path: Path) -> None:
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return True

    console = Terminal(file=Output(), width=200)
    table = Table(f"[/x]{ACTS}")
    table.add_row(f"[red]{ACTS}")
    console.print(table)
    console.print(f"[/x]{ACTS}")
    (tmp_path / "metrics.jsonl").touch()
    with (
        Screen(console) as screen,
        screen.watching(f"[/x]{ACTS}", 10, tmp_path / "metrics.jsonl") as view,
    ):
        with (tmp_path / "metrics.jsonl").open("a") as metrics:
            label = {"model": f"[/m]{ACTS}", "domain": "d", "step": 1, "time": 1.0}
            metrics.write(f"{json.dumps(label)}\n")
        view.poll()
        view.say(f"[/said]{ACTS}")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for name in ("[/x]", "[red]", "[/m]", "[/said]"):
        assert rf"{name}\x1b[2J" in shown
    for own in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u2028", "\u202e"):
        assert own not in shown


def braid_in(
    runs: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments, "--runs-dir", str(runs)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}],
    ids=["PYTHONIOENCODING", "LC_ALL"],
)
def test_an_output_that_lacks_a_letter_gets_its_escape(
    braid: Braid, config: Path, runs: Path, environment: dict[str, str]
) -> None:
    assert braid("run", config)[0] == 0
    Ledger(runs / "small" / "ledger.jsonl").append("merge", "done", "of naïve\udcff", 1)
    found = braid_in(runs, environment, "status", "small")
    assert (found.returncode, found.stderr) == (0, b"")
    assert rb"\u25c6 50.0 \xb1 5.0" in found.stdout
    assert rb"of na\xefve\udcff" in found.stdout
    found = braid_in(runs, environment, "why", "small", "merge")
    assert (found.returncode, found.stderr) == (0, b"")
    assert rb"of na\xefve\udcff" in found.stdout
    found = braid_in(runs, {"PYTHONIOENCODING": "utf-8"}, "why", "small", "merge")
    assert (found.returncode, found.stderr) == (0, b"")
    assert "of naïve\\udcff" in found.stdout.decode()


def test_a_file_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"bad\xff\x1b[2J")
    run.mkdir()
    (run / "run.yaml").write_text("nam: old\n")
    for encoding in ("ascii", "utf-8"):
        found = braid_in(tmp_path, {"PYTHONIOENCODING": encoding}, "status")
        assert (found.returncode, found.stderr) == (0, b"")
        assert found.stdout.startswith(rb"bad\udcff\x1b[2J: 5 configuration errors:")
        assert found.stdout.count(b"\x1b") == 0


def test_columns_are_aligned_and_coloured_on_a_terminal_only() -> None:
    rows = [("merge", Cell("done", "green"), "fin\nish\x1b[2Jed"), ("a", Cell("stale"), "")]
    plain = "title\nstage  state  note\nmerge  done   fin\\nish\\x1b[2Jed\na      stale"
    assert table("title", ("stage", "state", "note"), rows, coloured=False) == plain
    coloured = table("title", ("stage", "state", "note"), rows, coloured=True)
    assert "merge  \x1b[32mdone\x1b[0m   fin\\nish" in coloured


def test_a_command_that_takes_long_says_what_it_does_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = threading.Event()

    def say(text: str, **_: object) -> None:
        print(text)
        done.set()

    monkeypatch.setattr("pipeline.text.say", say)
    with while_slow("reading runs/small", seconds=0.0):
        assert done.wait(PATIENCE_SECONDS)
    assert capsys.readouterr().out == "reading runs/small …\n"
    with while_slow("reading runs/small"):
        pass
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with while_slow("reading runs/small", seconds=0.0):
        pass
    assert capsys.readouterr() == ("", "")
