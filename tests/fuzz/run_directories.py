"""The fuzzer of run directories: damaged copies of real ones under the read-only commands.

The runs are of configs/smoke.yaml with the fake stages of tests/pipeline: one is done, one has a
failed expert, one was stopped by a gate. A case damages one of them in a few places and runs each
command on it. A command ends with exit code 0, or with one message that begins with `braid:`, and
changes no file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from pipeline import cli
from pipeline.commands.support import starting
from tests.pipeline.fake_launcher import fake_programs

from .worker import CONTROL, REPOSITORY, Case, FuzzStep, raised
from .yaml_traps import damaged_text

FAKES = {"cold_start": {"0": "end_early"}}
ENDINGS: dict[str, dict[str, dict[str, str]]] = {  # by run: the action of each stage's rank
    "done": FAKES,
    "failed": {**FAKES, "experts.spell_backward": {"0": "save_then_break"}},
    "stopped": {**FAKES, "gates.experts.chain_sum": {"0": "fall_short"}},
}
STAGES = [
    *("cold_start", "experts.chain_sum", "experts.spell_backward"),
    *("gates.experts.chain_sum", "merge", "evaluate", "export"),
]
TEXTS = ["", "x", "[/x]", "[red]", ":skull:", "\x1b[2J", "\x9b2J", "a\nb", "\u202ea", "\ud800"]
NUMBERS = [0, -1, 1, 2, 0.5, 1e308, -1e308, 10**18, 2**64, 10**400, float("inf"), float("nan")]
OTHERS: list[Any] = [None, True, [], {}, [1], ["x", None], {"x": 1}, {"": {}}, {"ended": []}]
NAMES = [
    *("step_3", "step_0", "step_-1", "step_x", "step_٣", "step_²", "step_2.bak", f"step_{10**200}"),
    *("attempt_0", "attempt_2", "attempt_٣", "attempt_99999999999999999999", ".hidden", "x.log"),
    *("[red]", "\x1b[2J", "a\nb", "\udcff", "x" * 200, "submitting", "results.json", "rank_0.log"),
]


def cases(seed: int, folder: Path, *, keep: bool = False) -> Case:
    """Return the function from a number to its case, which has a step for each command."""
    _make_runs(folder / "ended")
    return damaged_cases(f"runs {seed}", folder, _commands, damage, keep=keep)


def damaged_cases(
    name: str,
    folder: Path,
    commands: Callable[[Random, Path], list[list[str]]],
    damage: Callable[[Random, Path], str],
    *,
    keep: bool,
) -> Case:
    """Return the cases of `commands` on damaged copies of the runs in `folder`/ended.

    There is `whole`, and a directory with a run `damaged` for each ending. `name` seeds the cases.
    """
    ended = folder / "ended"
    endings = sorted(path.name for path in ended.iterdir() if (path / "damaged").is_dir())
    cli.command_parser = cache(cli.command_parser)  # building it takes longer than most commands
    runs = folder / "runs"
    shutil.copytree(ended / "whole", runs / "whole")

    def case(number: int) -> Iterator[FuzzStep]:
        random = Random(f"{name} {number}")
        damaged = runs / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        ending = ended / random.choice(endings)
        shutil.copytree(ending / "damaged", damaged, symlinks=True)
        done = [damage(random, damaged) for _ in range(random.choice([1, 1, 2, 4]))]
        if keep:
            print("\n".join(ascii(each) for each in done))
        # Slurm's answer about the jobs in a ledger would not depend on the seed alone.
        os.environ["PATH"] = ""
        before = snapshot(runs)
        for command in commands(random, damaged):
            step = ask(command, runs)
            if (after := snapshot(runs)) != before:
                names = [name for name in after | before if after.get(name) != before.get(name)]
                step = FuzzStep(command[0], "changed", "a command changed a file", ascii(names))
                before = after
            yield step

    return case


def ask(command: list[str], runs: Path) -> FuzzStep:
    """Run one command in this process. Return its outcome."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    name = command[0]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([name, "--runs-dir", str(runs), *command[1:]])
    except BaseException as error:
        return raised(name, error)
    text, message = (each.buffer.getvalue().decode() for each in (out, err))
    if code not in (0, 1) or (code == 1) != message.startswith("braid: "):
        where = f"exit code {code} without a message, or a message without it"
        return FuzzStep(name, "unclear", where, message[:2000])
    if CONTROL.search(message if name == "logs" else text + message):
        return FuzzStep(
            name, "control", f"{name} prints control characters", ascii(text + message)[:4000]
        )
    if command == ["status"] and "\nwhole: " not in f"\n{text}":
        return FuzzStep(name, "unclear", "status omits a whole run next to a damaged one", text)
    return FuzzStep(name, f"exit code {code}", detail=(text + message)[:4000])


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the metadata and content digest of every file below a directory."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        entry = path.lstat()
        kind, content = entry.st_mode, b""
        if stat.S_ISREG(kind):
            content = hashlib.sha256(path.read_bytes()).digest()
        elif stat.S_ISLNK(kind):
            content = os.fsencode(path.readlink())
        found[str(path)] = (kind, entry.st_ino, entry.st_size, entry.st_mtime_ns, content)
    return found


def _make_runs(folder: Path) -> None:
    """Create the runs that cases copy."""
    config = REPOSITORY / "configs" / "smoke.yaml"
    wanted = [(folder / ending, "damaged", actions) for ending, actions in ENDINGS.items()]
    for runs, name, actions in [*wanted, (folder, "whole", FAKES)]:
        starting.PROGRAMS = fake_programs(actions)
        # The gate fails a run only where its on_failure is stop.
        stop = "stages.experts.gate.on_failure=stop"
        arguments = ["run", "--runs-dir", str(runs), "--name", name, str(config), stop]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            codes = [cli.main(arguments) for _ in range(2)]  # a failed stage has two attempts
        assert codes == [int(actions is not FAKES)] * 2, codes
        for path in sorted((runs / name).rglob("*.jsonl")):
            path.write_text("".join(map(_timeless, path.read_text().splitlines())))


def _timeless(line: str) -> str:
    """Return a line of a ledger or of metrics with fixed times."""
    fields = json.loads(line)
    stamp = "2026-01-01T00:00:00.000+00:00" if "stage" in fields else 1.7e9 + fields["step"]
    fields |= {"time": stamp, **({"seconds": 0.5} if "seconds" in fields else {})}
    return json.dumps(fields) + "\n"


def _commands(random: Random, damaged: Path) -> list[list[str]]:
    """Return the commands of a case."""
    stage, name = random.choice(STAGES), random.choice(["damaged", str(damaged)])
    log = random.choice([[], [], ["--rank", "1"], ["--engine", "0"]])
    runs = random.choice([["damaged", "whole"], ["whole", "damaged"]])
    return [
        ["status"],
        ["status", name],
        ["plan", str(damaged / "run.yaml"), *random.choice([[], [], ["--dot"]])],
        ["why", name, stage],
        ["diff", *runs],
        ["logs", name, stage, *log],
    ]


def damage_table(random: Random, run: Path) -> str:
    """Damage the bytes or the name of a Parquet file of a run; return a description."""
    files = sorted(path for path in run.rglob("*.parquet") if path.is_file())
    if not files:  # an earlier damage took them all
        return damage(random, run)
    path, act = random.choice(files), random.choice([_bytes, _bytes, _replaced, _renamed])
    return f"{act.__name__} {path.relative_to(run)}: {act(random, path)}"


def damage(random: Random, run: Path) -> str:
    """Damage a run in one place. Return a description of the damage."""
    known = sorted(path for path in run.rglob("*") if "job.json" not in path.name)
    files = [path for path in known if path.is_file() and not path.is_symlink()]
    path = random.choice([*files, random.choice(known)]) if random.random() < 0.5 else None
    # Most files are logs and locks, but most code reads the structured ones.
    structured = [p for p in files if p.suffix in (".json", ".jsonl", ".yaml")]
    path = path or random.choice(structured or files or [run])
    whole = [_replaced, _renamed, _with_another]
    inner = [_json, _json, _json, _line, _bytes] if path in files else [_with_another]
    act = random.choice(inner if random.random() < 0.8 else whole)
    return f"{act.__name__} {path.relative_to(run)}: {act(random, path)}"


def _json(random: Random, path: Path) -> str:
    """Change a value or a key in a JSON file, or in a line of a JSON Lines file."""
    lines = path.read_text(errors="replace").split("\n") if path.suffix == ".jsonl" else []
    at = random.randrange(len(lines)) if lines else 0
    try:
        tree = json.loads(lines[at] if lines else path.read_text())
    except (ValueError, OSError, RecursionError):  # of an earlier damage
        return _bytes(random, path)
    nodes = [(None, None), *_nodes(tree)]
    holder, name = random.choice(nodes)
    value = _value(random)
    if holder is None:
        tree = value
    elif isinstance(holder, dict) and random.random() < 0.2:
        kept = holder.pop(name)
        if random.random() < 0.7:
            holder[random.choice(TEXTS)] = kept
    else:
        holder[name] = value
    # A placeholder: json.dumps does not write such depths.
    text = json.dumps(tree).replace('"deep"', _deep(random))
    path.write_text("\n".join([*lines[:at], text, *lines[at + 1 :]]) if lines else text)
    return f"{name}"


def _value(random: Random) -> Any:
    return random.choice([random.choice(values) for values in (TEXTS, NUMBERS, OTHERS, ["deep"])])


def _deep(random: Random) -> str:
    depth = random.choice([100, 1000, 100_000])
    opening, closing = random.choice([("[", "]"), ('{"a":', "}")])
    return opening * depth + "1" + closing * depth


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every node of a JSON value as its container and its key in it."""
    names: Any = tree if isinstance(tree, dict) else ()
    for name in range(len(tree)) if isinstance(tree, list) else names:
        yield tree, name
        yield from _nodes(tree[name])


def _line(random: Random, path: Path) -> str:
    """Delete, repeat or replace lines, or add one."""
    lines = path.read_bytes().split(b"\n")
    event: dict[str, Any] = {"time": "2026-01-01T00:00:00+00:00"}
    event |= {"state": random.choice(["done", "failed", "running", "submitted", "x"])}
    event |= {"stage": random.choice(STAGES), "cause": random.choice(TEXTS), "attempt": 1}
    event |= {"job": random.choice(["7", *TEXTS])} if random.random() < 0.3 else {}
    event |= {"seconds": random.choice(NUMBERS)} if random.random() < 0.5 else {}
    metrics = {"step": random.choice(NUMBERS), "steps": 2, "time": 1.7e9, "loss": _value(random)}
    news = [json.dumps(event).encode(), json.dumps(metrics).encode(), b"\xff", b"null", b"[]", b"{"]
    at = random.randrange(len(lines))
    line = random.choice([lines[at], *news, *news])
    path.write_bytes(b"\n".join([*lines[:at], line, *lines[random.choice([at, at, at + 1]) :]]))
    return ascii(line[:200])


def _bytes(random: Random, path: Path) -> str:
    path.write_bytes(damaged_text(random, path.read_bytes()))
    return "bytes"


def _replaced(random: Random, path: Path) -> str:
    """Replace a file with something else."""
    _remove(path)
    kinds = ["nothing", "nothing", "folder", "fifo", "loop", "dangling", "zero", "empty"]
    kind = random.choice(kinds)
    links = {"loop": path.name, "dangling": "nowhere", "zero": "/dev/zero"}
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    return kind


def _renamed(random: Random, path: Path) -> str:
    new = path.with_name(random.choice(NAMES))
    if new != path:
        _remove(new)
    path.rename(new)
    return ascii(new.name)


def _with_another(random: Random, path: Path) -> str:
    """Add a file or a directory next to it, or in it."""
    new = (path if path.is_dir() else path.parent) / random.choice(NAMES)
    if os.path.lexists(new):
        return "nothing"
    if path.is_file() and random.random() < 0.5:
        shutil.copy(path, new)
    elif random.random() < 0.5:
        new.mkdir()
    else:
        new.write_bytes(b"\xff\x00x")
    return ascii(new.name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
