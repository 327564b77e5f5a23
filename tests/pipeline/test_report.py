"""`braid report` without a browser: what it writes, when, and what it says where it cannot."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.parquet as parquet
import pytest

from pipeline.report.compare.comparison import Role as ModelRole
from pipeline.report.drawing import Role as EdgeRole
from pipeline.report.page import file, redaction
from pipeline.report.page.recorded import chosen_problems
from pipeline.report.page.redaction import redact
from pipeline.report.page.timelines import own_seconds
from pipeline.report.page.training import MOST_POINTS, curves
from pipeline.run.directory import RunDirectory
from pipeline.run.routing import StepLoads, churn, read_loads
from pipeline.run.timeline import Phase
from stages.sampling.recording import LOADS
from stages.sampling.sample_files import samples_file, write_samples, write_table
from stages.settings import RunSettings
from tests.pipeline.recorded_runs import HEALTHY, STAGE, log, sample
from tests.pipeline.recorded_runs import recorded as recorded  # fixtures
from tests.pipeline.recorded_runs import small as small

Braid = Callable[..., tuple[int, str, str]]


def data(report: Path) -> dict[str, Any]:
    """Return the data in a report."""
    found = re.search(r'<script id="data"[^>]*>([^<]*)<', report.read_text())
    assert found is not None
    document: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return document


def test_a_report_is_one_file_without_an_address(recorded: Path, braid: Braid) -> None:
    code, out, err = braid("report", "small")
    assert code == 0, err
    assert out.startswith(f"{recorded / 'report.html'}: ")
    text = (recorded / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "MIT License" in text or "The MIT License" in text  # of the charts
    assert len(data(recorded / "report.html")["samples"][STAGE]["columns"]["step"]) == 8


def test_the_settings_are_those_that_differ_from_their_defaults(small: Path, braid: Braid) -> None:
    braid("report", "small")
    settings = data(small / "report.html")["settings"]
    assert "layout:\n  ranks: 2\n  expert: 2\n" in settings
    assert "kind: grpo" in settings  # which block it is
    assert "deterministic" not in settings


def test_a_run_before_its_first_step_has_a_report(
    runs: Path, settings: RunSettings, config: Path, braid: Braid
) -> None:
    braid("run", config, "--dry-run")
    assert braid("report", "small")[0] == 1  # there is none
    small = runs / "small"
    small.mkdir(parents=True)
    (small / "run.yaml").write_text(json.dumps(settings.model_dump(mode="json")))
    code, _, err = braid("report", "small")
    assert code == 0, err
    found = data(small / "report.html")
    assert {stage["state"] for stage in found["stages"]} == {"pending"}
    assert found["samples"] == found["curves"] == {}


@pytest.mark.usefixtures("small")
def test_only_a_file_is_replaced(tmp_path: Path, braid: Braid) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("", tmp_path, tmp_path / "pipe"):
        code, _, err = braid("report", "small", "--output", path)
        assert code == 2 and "is not a file that could be replaced" in err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "file").write_text("no folder")
    code, _, err = braid("report", "small", "--output", tmp_path / "file" / "report.html")
    assert code == 1 and "write it elsewhere with: --output FILE" in err
    (tmp_path / "link").symlink_to(tmp_path / "linked.html")
    assert braid("report", "small", "--output", tmp_path / "link")[0] == 0
    assert data(tmp_path / "link") and not (tmp_path / "link").is_symlink()
    assert not (tmp_path / "linked.html").exists()  # it may be any file of this user


def test_the_demo_is_written_without_a_run(
    tmp_path: Path, braid: Braid, monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert braid("report", "--demo")[0] == 0
    demo = data(tmp_path / "braid-demo.html")
    braid("report", "small")
    assert demo.keys() == data(recorded / "report.html").keys()  # of this version
    [name] = [stage["name"] for stage in demo["stages"] if stage["kind"] == "distill"]
    assert demo["samples"][name]["tokens"] and demo["routing"][name]["owned"]
    assert "name no RUN" in braid("report", "small", "--demo")[2]
    assert "name a RUN" in braid("report")[2]


@pytest.mark.usefixtures("small")
def test_missing_charts_are_named_with_the_command_that_brings_them(
    braid: Braid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "CHARTS", tmp_path / "nowhere")
    code, _, err = braid("report", "small")
    assert code == 1
    assert "python -m tools.vendor" in err


def test_a_watched_run_is_written_again_once_a_stage_has_saved(
    small: Path, braid: Braid, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = iter([True] * 2)
    monkeypatch.setattr("pipeline.commands.report._is_running", lambda _: next(running, False))

    def save(_: float) -> None:
        checkpoint = small / "stages" / STAGE / "checkpoints" / "step_9"
        checkpoint.mkdir()
        (checkpoint / "checksums.json").write_text('{"digest": "e", "files": {}}')

    monkeypatch.setattr("pipeline.commands.report.time.sleep", save)
    code, out, err = braid("report", "small", "--watch")
    assert code == 0, err
    assert out.count("report.html") == 2


def test_a_long_curve_keeps_its_newest_step() -> None:
    lines = [{"step": step, "time": 0.0, "loss": step / 3} for step in range(1, 2 * MOST_POINTS)]
    found = curves(lines)
    assert len(found["step"]) <= MOST_POINTS + 1
    assert found["step"][-1] == lines[-1]["step"]
    assert found["metrics"]["loss"][0] == 0.333333


SECRET = "a s3cret"  # in every text that a prompt, a response or an answer may be quoted in


def plant(run: Path) -> None:
    """Write SECRET into every place of a run that a report shows a text of, or an error about."""
    expert, evaluate = (run / "stages" / name for name in (STAGE, "evaluate"))
    hostile: dict[str, Any] = {"reward_failure": SECRET, "answer": SECRET}
    hostile |= {"reward_messages": {SECRET: SECRET}, "reward_parts": {SECRET: 0.5}}
    row = sample(4, SECRET, None, **hostile, finish_reason=SECRET)
    write_samples(samples_file(expert / "rollouts", 4), [row, {**row, "domain": SECRET}])
    answer = evaluate / "samples" / SECRET / "sums_000000.parquet"
    write_samples(answer, [sample(0, SECRET, 1.0, problem=SECRET)])
    for number, column in ((5, "step"), (6, "reward"), (7, "tokens")):  # Arrow quotes what is none
        table = pyarrow.table({"step": [number], "domain": ["sums"]} | {column: [SECRET]})
        parquet.write_table(table, samples_file(expert / "rollouts", number))
    (expert / "rollouts" / "step_000008.parquet").write_text(SECRET)
    loads = {"step": 1, "domain": SECRET, "layer": 0, "slots": [1, 1]}
    write_table(expert / "routing" / "step_000001.parquet", [loads], LOADS)
    log(run, [HEALTHY] * 30 + [{**HEALTHY, SECRET: 1.0, f"kl/{SECRET}": 2.0, "domain": SECRET}])
    ledger = RunDirectory(run).ledger
    for stage in (STAGE, "evaluate"):
        (run / "stages" / stage / "manifest.json").unlink()
        for state in ("running", "failed"):
            ledger.append(stage, state, SECRET, 2, 1.0)
    ledger.append("cold_start", "running", SECRET, 2)
    lines = [{"process": SECRET, "time": 1.0}, {"phase": 1, "time": 2.0, "name": SECRET}]
    lines.append({"phase": 2, "time": 3.0, "name": "wait", "waits_for": SECRET, "step": SECRET})
    timeline = RunDirectory(run).stage(STAGE).timeline(2, 0)
    timeline.parent.mkdir(parents=True, exist_ok=True)
    timeline.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_redacted_report_quotes_nothing(recorded: Path, braid: Braid) -> None:
    shutil.copytree(recorded, recorded.with_name("other"))
    plant(recorded)
    plant(recorded.with_name("other"))
    found = {}
    for options in ((), ("--redact",)):
        code, _, err = braid("report", "small", "other", *options)
        assert code == 0, err
        found[options] = data(recorded / "report.html")
    assert json.dumps(found[()]).count("s3cret") >= 30
    redacted = found["--redact",]
    assert "s3cret" not in json.dumps(redacted)
    assert redacted.keys() == found[()].keys()
    # What is no text of a sample stays: states, curves, scores and the files that are damaged.
    assert [each["state"] for each in redacted["stages"]] == [
        each["state"] for each in found[()]["stages"]
    ]
    [kept, whole] = [found[key]["curves"][STAGE]["metrics"] for key in (("--redact",), ())]
    assert kept == {name: values for name, values in whole.items() if "s3cret" not in name}
    [kept, whole] = [found[key]["samples"][STAGE]["columns"] for key in (("--redact",), ())]
    assert kept["reward"] == whole["reward"] and kept["problem"] == whole["problem"]
    assert redacted["samples"][STAGE]["parts"].keys() == {"exact"}
    assert sum("step_00000" in text for text in redacted["damaged"]) >= 4


def test_problems_of_a_redacted_report_are_numbered(recorded: Path, braid: Braid) -> None:
    """A hash of a prompt without a salt tells whoever guesses the prompt that it was one."""
    keys = {sha256(prompt.encode()).hexdigest() for prompt in "abcd"}
    answer = recorded / "stages" / "evaluate" / "samples" / "cold_start" / "sums_000000.parquet"
    write_samples(answer, [sample(0, prompt, 1.0) for prompt in "dxa"])
    for options in ((), ("--samples", 4)):
        code, _, err = braid("report", "small", "--redact", *options)
        assert code == 0, err
        found = data(recorded / "report.html")
        text = json.dumps(found)
        assert not [key for key in keys if key[:8] in text or key[-8:] in text]
        numbers = {
            number for own in found["samples"].values() for number in own["names"]["problem"]
        }
        assert numbers == {str(number) for number in range(len(numbers))}
    braid("report", "small", "--redact")
    samples = data(recorded / "report.html")["samples"]
    assert samples[STAGE]["names"]["problem"] == ["0", "1", "2", "3"]  # a, b, c, d
    assert samples["evaluate"]["names"]["problem"] == ["3", "4", "0"]  # d, x, a


def test_a_new_field_of_a_report_is_left_out_until_it_is_allowed() -> None:
    document = {"made": "now", "prompts": ["a"], "samples": {"x": {"columns": {"prompt": [0]}}}}
    assert redact(document, []) == {"made": "now", "samples": {}}
    gate = {"stages": [{"name": "gate", "reasons": [SECRET], "cause": SECRET, "kind": SECRET}]}
    left_out = redaction.LEFT_OUT
    roles = [*get_args(EdgeRole), *get_args(ModelRole)]
    assert redact({"edges": [{"role": role} for role in roles]}, []) == {
        "edges": [{"role": role} for role in roles]
    }
    assert redact(gate, []) == {
        "stages": [{"name": "gate", "reasons": [left_out], "cause": left_out, "kind": left_out}]
    }
    known = redact({"samples": {"sft": {"columns": {"prompt": [0], "step": [1]}}}}, [])
    assert known == {"samples": {"sft": {"columns": {"step": [1]}}}}


def test_a_damaged_file_is_named_and_nothing_after_it(tmp_path: Path) -> None:
    """A message that begins with the content of a file may end in the name of none."""
    file = tmp_path / "metrics.jsonl"
    file.touch()
    texts = [f"{file}: line 3: {SECRET}", f"{SECRET}.json: not a number", SECRET]
    named = f"{file}: damaged {redaction.LEFT_OUT}"
    assert redact({"damaged": texts}, []) == {
        "damaged": [named, redaction.LEFT_OUT, redaction.LEFT_OUT]
    }


def test_a_setting_that_is_a_sentence_is_left_out() -> None:
    settings = {"rubric": "Is it so?", "path": "data/a.jsonl", "每": "好", "steps": [3, None, "x"]}
    left_out = redaction.LEFT_OUT
    assert redaction.plain_setting(settings) == {
        **{"rubric": left_out, "path": "data/a.jsonl", left_out: left_out},
        "steps": [3, None, "x"],
    }


def test_phases_that_processes_enter_stay_in_a_redacted_report() -> None:
    found: dict[str, set[str]] = {"phase": set(), "waits_for": set()}
    for floor in ("stages", "parallel"):
        for path in Path(floor).rglob("*.py"):
            text = path.read_text()
            found["phase"] |= set(re.findall(r'with phase\("([^"]+)"', text))
            found["waits_for"] |= set(re.findall(r'waits_for="([^"]+)"', text))
    step = Path("stages/sampling/step.py").read_text().partition("PHASES = {")[2].partition("}")[0]
    found["phase"] |= set(re.findall(r': "([^"]+)"', step))
    assert len(found["phase"]) >= 8 and len(found["waits_for"]) >= 4
    assert "rollout" in found["phase"] and found["phase"] <= set(redaction.PHASES)
    assert found["waits_for"] <= set(redaction.PEERS)


DEEP = "[" * 100_000 + "]" * 100_000
TIMELINE = [
    *(b"\xff", DEEP.encode(), b'{"phase": 1, "time": 1e400, "name": "x"}', b"[]"),
    *(b'{"phase": [], "time": 1, "name": "x"}', b'{"phase": 1, "time": "1", "name": "x"}'),
    *(b'{"phase": 1, "time": NaN, "name": "x"}', b'{"phase": 1, "time": 1, "name": []}'),
    b'{"phase": 1, "time": 1%s, "name": "x"}' % (b"0" * 400),
    *(b'{"phase": 1, "time": 1, "name": "x", "step": []}', b'{"process": 1, "time": {}}'),
]


def test_damaged_lines_of_a_timeline_are_ignored(recorded: Path, braid: Braid) -> None:
    directory = RunDirectory(recorded).stage(STAGE)
    timeline = directory.timeline(1, 0)
    good = [{"phase": 7, "time": 5.0, "name": "step", "step": 3}, {"phase": 7, "time": 9.0}]
    text = b"\n".join([*TIMELINE, *(json.dumps(line).encode() for line in good)])
    timeline.write_bytes(text)
    timeline.with_name("timeline_x.jsonl").write_bytes(text)
    timeline.with_name("timeline_1.jsonl").write_bytes(text)
    code, _, err = braid("report", "small")
    assert code == 0, err
    found = data(recorded / "report.html")["timelines"][STAGE]
    assert found.keys() == {"rank 0", "rank 1"}
    assert found["rank 0"]["phases"] == [["step", 5.0, 9.0, None, 3]]


def write_loads(path: Path, **columns: Any) -> None:
    row = {"step": 1, "domain": "sums", "layer": 0, "slots": [1, 1]} | columns
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: [value] for name, value in row.items() if value != "missing"}
    parquet.write_table(pyarrow.table(kept), path)


@pytest.mark.parametrize(
    "column",
    [{"slots": "missing"}, {"slots": None}, {"slots": ["x"]}, {"domain": 3}, {"step": "x"}],
)
def test_damaged_loads_of_experts_cost_their_own_block(
    column: dict[str, Any], recorded: Path, braid: Braid
) -> None:
    path = recorded / "stages" / STAGE / "routing" / "step_000001.parquet"
    write_loads(path, **column)
    code, _, err = braid("report", "small")
    assert code == 0, err
    found = data(recorded / "report.html")
    assert found["routing"] == {} and found["samples"][STAGE]["of"] == 8
    [why] = found["damaged"]
    assert why.startswith(f"{path}: damaged: ")
    assert braid("look", "small", STAGE, "--experts")[0] == 1


def test_loads_of_two_shapes_are_damaged(recorded: Path, braid: Braid) -> None:
    for step, slots in ((1, [1, 1]), (2, [1, 1, 1])):
        path = recorded / "stages" / STAGE / "routing" / f"step_00000{step}.parquet"
        write_loads(path, step=step, slots=slots)
    assert braid("report", "small")[0] == 0
    [why] = data(recorded / "report.html")["damaged"]
    assert why.endswith("damaged: steps of different models")


@pytest.mark.parametrize(
    "file",
    [
        *("rollouts/step_000002.parquet", "routing/step_000001.parquet"),
        *("metrics.jsonl", "attempt_1/timeline_0.jsonl"),
    ],
)
def test_a_pipe_in_place_of_a_file_costs_its_own_block(
    file: str, recorded: Path, braid: Braid
) -> None:
    path = recorded / "stages" / STAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    code, _, err = braid("report", "small")
    assert code == 0, err
    found = data(recorded / "report.html")
    assert any(f"{path}: not a regular file" in why for why in found["damaged"])
    assert found["samples"][STAGE]["of"] == (6 if "rollouts" in file else 8)
    assert (STAGE in found["curves"]) == (file != "metrics.jsonl")


def test_a_file_larger_than_memory_costs_its_own_block(recorded: Path, braid: Braid) -> None:
    timeline = RunDirectory(recorded).stage(STAGE).timeline(1, 0)
    timeline.parent.mkdir(parents=True, exist_ok=True)
    with timeline.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert braid("report", "small")[0] == 0
    assert f"{timeline}: larger than 1024 MiB" in data(recorded / "report.html")["damaged"]


def test_ids_outside_the_vocabulary_are_shown_as_numbers(recorded: Path, braid: Braid) -> None:
    row = sample(4, "a", 1, response_tokens=[5, 80, -1], trainer_logprobs=[-1.0] * 3)
    write_samples(samples_file(recorded / "stages" / STAGE / "rollouts", 4), [row])
    code, _, err = braid("report", "small")
    assert code == 0, err
    vocabulary = data(recorded / "report.html")["vocabulary"]
    assert vocabulary == {"5": "3", "80": "[UNKNOWN_80]", "-1": "[UNKNOWN_-1]"}


def test_an_attempt_of_an_absurd_number_is_not_counted_up_to(small: Path, braid: Braid) -> None:
    (small / "stages" / STAGE / "attempt_99999999999999999999").mkdir()
    assert braid("report", "small")[0] == 0
    assert braid("compare", "small")[0] == 0


def test_other_runs_of_one_name_are_told_apart(small: Path, runs: Path, braid: Braid) -> None:
    copies = [runs.parent / where / "small" for where in ("one", "two")]
    for copy in copies:
        shutil.copytree(small, copy)
    code, _, err = braid("report", "small", *copies)
    assert code == 0, err
    assert list(data(small / "report.html")["others"]) == [str(copy) for copy in copies]


def test_guards_say_when_they_fired(small: Path, braid: Braid) -> None:
    low = {**HEALTHY, "entropy": 0.001}
    log(small, [HEALTHY] * 3 + [low] * 7 + [HEALTHY] + [low] * 4)
    braid("report", "small")
    guards = data(small / "report.html")["guards"][STAGE]
    [guard] = [each for each in guards if each["name"] == "entropy_collapse"]
    assert guard["fired"] == [8]  # the fifth of seven; four are too few


A, B, C = "a00000001", "b00000002", "c00000000"


@pytest.mark.parametrize(("most", "kept"), [(9, None), (8, [C, A]), (5, [C]), (1, [C])])
def test_problems_are_chosen_by_the_end_of_their_keys(most: int, kept: list[str] | None) -> None:
    assert chosen_problems([Counter({A: 2, B: 1, C: 5}), Counter({A: 1})], most) == kept


def test_the_experts_of_evenly_spaced_steps_are_read(small: Path) -> None:
    directory = RunDirectory(small).stage(STAGE)
    for step in range(1, 8):
        row = {"step": step, "domain": "sums", "layer": 0, "slots": [1, 1]}
        write_table(directory.routing / f"step_{step:06d}.parquet", [row], LOADS)
    assert [each.step for each in read_loads(directory, 3)] == [1, 4, 7]
    assert [each.step for each in read_loads(directory)] == [*range(1, 8)]


def test_churn_is_the_share_of_slots_that_moved() -> None:
    steps = [[[2, 2], [4, 0]], [[2, 2], [2, 2]], [[0, 4], [2, 2]]]  # by layer and expert
    loads = [StepLoads(number, {"sums": slots}) for number, slots in enumerate(steps)]
    assert churn(loads) == [(1, 0.25), (2, 0.25)]


def test_a_phase_counts_without_those_inside_it() -> None:
    phases = [
        Phase("rank 0", "step", 0.0, 10.0),
        Phase("rank 0", "rollout", 1.0, 7.0),
        Phase("rank 0", "wait", 2.0, 6.0),
        Phase("rank 0", "step", 10.0, 11.0),
        Phase("rank 0", "wait", 11.0),  # lasts
    ]
    assert own_seconds(phases) == {"step": 5.0, "rollout": 2.0, "wait": 4.0}
