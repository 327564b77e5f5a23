"""Bundles: what is in one, running one elsewhere, what differs, and archives that attack."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.errors import UserError
from pipeline.commands.support.runs import read_run
from pipeline.config.validate import load
from pipeline.run.bundle.reproduce import bundle_at, compare
from pipeline.run.directory import RunDirectory
from stages.rewards.kinds.python import PythonReward
from tests.pipeline.violations import config_with_rows  # noqa: F401 - the fixture `config`

Braid = Callable[..., tuple[int, str, str]]
GATE = "stages.experts.gate={domains: [sums], problems: 20}"


RIGHT = ("domains.words.rewards={right: {kind: math}}",)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A deterministic run with a gate and a secret."""
    secret = tmp_path / "key"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    url = "base_url: 'https://127.0.0.1:1/v1', model: m, rubric: 'grade {response}'"
    rewards = f"{{right: {{kind: math}}, judge: {{kind: judge, {url}, api_key_file: {secret}}}}}"
    return ["deterministic=true", f"domains.words.rewards={rewards}", GATE]


@pytest.fixture
def archive(braid: Braid, config: Path, options: list[str], tmp_path: Path) -> Path:
    assert braid("run", config, *options)[::2] == (0, "")
    path = tmp_path / "moved/small.tar.gz"
    path.parent.mkdir()
    code, out, err = braid("bundle", "small", "--to", path)
    assert (code, err) == (0, "")
    assert "reproduce it with: braid run" in out
    return path


def index(archive: Path) -> dict:
    with tarfile.open(archive) as packed:
        file = packed.extractfile("bundle.json")
        assert file is not None
        found: dict = json.loads(file.read())
        return found


def test_a_bundle_has_digests_reasons_and_no_secret(archive: Path, tmp_path: Path) -> None:
    found = index(archive)
    assert (found["format"], found["run"], found["deterministic"]) == (1, "small", True)
    assert found["routing"] == {"merge": {"sums": "experts.sums", "words": "experts.words"}}
    [data] = found["inputs"]
    assert (data["key"], data["copied"]) == ("domains.words.prompts.path", True)
    assert data["path"] == "data/words.prompts/rows.jsonl"
    [secret] = found["secrets"]
    assert secret["path"] == str(tmp_path / "key")
    stages = {each["name"]: each for each in found["stages"]}
    assert stages["cold_start"]["output"] == "cold_start"
    assert stages["merge"]["lineage"]["parents"]["experts.words"] == "experts.words"
    assert {"code", "versions"} <= stages["merge"]["lineage"].keys()
    [verdict] = found["decisions"]
    assert verdict["stage"] == "gates.experts.sums"
    assert verdict["cause"].startswith("passed: ")
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member)
            assert file is not None and b"s3cret" not in file.read()
            assert (member.mtime, member.uid, member.uname) == (
                0,
                0,
                "",
            )  # equal files, equal bytes


def test_a_bundle_runs_elsewhere_and_is_compared(
    braid: Braid, archive: Path, rows: Path, runs: Path, tmp_path: Path
) -> None:
    shutil.rmtree(runs)
    rows.unlink()
    for command in ("validate", "plan"):
        assert braid(command, archive)[0] == 0
    code, out, err = braid("run", archive)
    assert (code, err) == (0, "")
    # A fake export is empty, and so has no output to compare.
    assert "the output of 6 of 7 stages equals the bundle's" in out  # an export of no files
    assert braid("bundle", "--check", "small", archive)[0] == 0
    assert braid("run", archive.with_name("small"))[0] == 0  # what was unpacked
    assert sorted(path.name for path in archive.parent.iterdir()) == ["small", "small.tar.gz"]


def test_keys_of_later_versions_are_no_difference_to_a_bundle(
    braid: Braid, archive: Path, runs: Path
) -> None:
    assert braid("validate", archive)[0] == 0  # unpacks it
    file = archive.with_name("small") / "bundle.json"
    found = json.loads(file.read_text())
    for stage in found["stages"]:
        del stage["lineage"]["settings"]["model.head_precision"]
    file.write_text(json.dumps(found))
    shutil.rmtree(runs)
    assert braid("run", file.parent)[::2] == (0, "")


def test_the_first_stage_that_differs_is_named(
    braid: Braid, archive: Path, config: Path, options: list[str], rows: Path, runs: Path
) -> None:
    shutil.rmtree(runs)
    rows.write_text(rows.read_text().replace("7+1=", "9+9="))
    otherwise = {name: {"0": "learn_otherwise"} for name in ("experts.words", "merge")}
    assert braid("run", config, *options, actions=otherwise)[::2] == (0, "")
    code, _, err = braid("bundle", "--check", "small", archive)
    assert code == 1
    first, cause, *rest = err.splitlines()
    assert "experts.words is the first stage that differs from the bundle's; 2 of 6" in first
    assert cause.startswith("  files of domains.words.prompts.path: ")
    assert rest == [
        "  differ as a consequence: merge",
        "  equal: cold_start, experts.sums, gates.experts.sums, evaluate",
    ]


def test_another_input_is_named_once_and_not_by_its_role_too(
    braid: Braid, archive: Path, config: Path, options: list[str], runs: Path
) -> None:
    shutil.rmtree(runs)
    otherwise = {name: {"0": "learn_otherwise"} for name in ("experts.words", "merge")}
    assert braid("run", config, *options, actions=otherwise)[::2] == (0, "")
    bundle = bundle_at(archive)
    assert bundle is not None
    with pytest.raises(UserError) as caught:
        compare(bundle, read_run(RunDirectory(runs / "small")), ["merge"])
    [cause] = [line.strip() for line in str(caught.value).splitlines() if " input " in line]
    assert cause.startswith("input experts.words: ")


def test_a_second_stage_that_differs_by_itself_is_named(
    braid: Braid, archive: Path, config: Path, options: list[str], runs: Path
) -> None:
    shutil.rmtree(runs)
    options = [*options, "domains.sums.optimizer.learning_rate=0.002"]
    otherwise = {name: {"0": "learn_otherwise"} for name in ("experts.sums", "experts.words")}
    assert braid("run", config, *options, actions=otherwise)[0] == 0
    err = braid("bundle", "--check", "small", archive)[2]
    assert "  setting optimizer.learning_rate: 0.001 in the bundle, 0.002 here\n" in err
    alone = "  experts.words differs too, and does not depend on it\n    nothing recorded differs"
    assert alone in err


def test_settings_that_will_make_a_stage_differ_are_named_before_it_runs(
    braid: Braid, archive: Path, runs: Path
) -> None:
    assert braid("validate", archive)[0] == 0
    shutil.rmtree(runs)
    inside = archive.parent / "small/config.yaml"
    inside.write_text(inside.read_text().replace("\nseed: 0\n", "\nseed: 1\n"))
    err = braid("run", archive.parent / "small", "--only", "cold_start")[2]
    assert err.startswith("warning: cold_start is the first stage that reads other settings than")
    assert "  seed: 0 in the bundle, 1 here\n" in err


def test_only_the_chosen_stages_are_compared(braid: Braid, archive: Path, runs: Path) -> None:
    shutil.rmtree(runs)
    code, out, _ = braid("run", archive, "--only", "cold_start")
    assert (code, "the output of all 1 stages equals" in out) == (0, True)
    code, _, err = braid("bundle", "--check", "small", archive)
    assert code == 1
    assert "experts.sums is the first stage that has no finished output yet; 1 of 6" in err


def test_a_stage_that_is_not_compared_is_named(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    broken = {"gates.experts.sums": {"0": "break_down"}}
    given = ("run", config, *RIGHT, GATE, "deterministic=true")
    assert braid(*given, actions=broken)[0] == 1
    assert braid("bundle", "small", "--to", tmp_path / "b")[0] == 0
    shutil.rmtree(runs)
    only = ("--only", "cold_start", "--only", "experts.sums", "--only", "gates.experts.sums")
    assert braid(*given, *only)[::2] == (0, "")
    args = ("bundle", "--check", "small", tmp_path / "b")
    assert braid(*given, "--only", "experts.words")[::2] == (0, "")
    code, out, _ = braid(*args)
    assert code == 0
    assert "the output of 3 of 7 stages equals the bundle's; not compared, since the bundle" in out
    assert " has no finished output of them: gates.experts.sums, merge, evaluate, export\n" in out


def test_half_finished_and_stale_stages_have_no_output(
    braid: Braid, config: Path, rows: Path, tmp_path: Path
) -> None:
    half = {"merge": {"0": "save_then_break"}}
    assert braid("run", config, *RIGHT, actions=half)[0] == 1
    rows.write_text(rows.read_text().replace("7+1=", "9+9="))
    out = braid("bundle", "small", "--to", tmp_path / "b")[1]
    assert "not finished or stale, so without an output to compare: experts.words" in out
    found = json.loads((tmp_path / "b/bundle.json").read_text())
    outputs = {each["name"]: each["output"] for each in found["stages"]}
    assert outputs["cold_start"] == "cold_start"
    assert outputs["experts.words"] is outputs["merge"] is None


def test_changed_and_missing_inputs_are_named_before_anything_runs(
    braid: Braid, archive: Path, runs: Path, rows: Path
) -> None:
    assert braid("validate", archive)[0] == 0
    shutil.rmtree(runs)
    data = archive.parent / "small/data/words.prompts/rows.jsonl"
    data.write_text(data.read_text().replace("7+1=", "9+9="))
    code, _, err = braid("run", archive)
    assert code == 1
    assert "domains.words.prompts.path: " in err
    named = "its content differs; restore it; experts.words is the first stage that reads it"
    assert named in err
    assert "braid run " in err and "small/config.yaml, then braid bundle --check RUN" in err
    data.unlink()
    assert "missing; restore it" in braid("run", archive)[2]
    assert not runs.exists()
    assert braid("validate", archive, f"domains.words.prompts.path={rows}")[0] == 0


def test_a_run_that_is_not_deterministic_is_not_compared(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    assert braid("run", config, *RIGHT)[0] == 0
    out = braid("bundle", "small", "--to", tmp_path / "b")[1]
    assert "not deterministic: true, so its digests cannot be compared" in out
    code, out, _ = braid("bundle", "--check", "small", tmp_path / "b")
    assert (code, "not compared" in out) == (0, True)


def test_weights_are_named_or_copied(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    assert braid("run", config, *RIGHT, "--name", "first")[0] == 0
    outside = runs / "first/stages/cold_start"
    given = f"stages.experts.from={outside}"
    assert braid("run", config, *RIGHT, given)[0] == 0
    by_reference, copy = tmp_path / "reference", tmp_path / "copy"
    assert braid("bundle", "small", "--to", by_reference)[0] == 0
    assert braid("bundle", "small", "--to", copy, "--weights", "copy")[0] == 0
    inputs = json.loads((by_reference / "bundle.json").read_text())["inputs"]
    [found] = [each for each in inputs if each["kind"] == "model"]
    assert (found["path"], found["copied"], found["digest"]) == (str(outside), False, "cold_start")
    assert (copy / "weights/0/checkpoints/step_2/checksums.json").exists()
    assert braid("run", copy, "--name", "third")[0] == 0
    shutil.rmtree(outside)
    code, _, err = braid("plan", by_reference, "--name", "fourth")
    assert code == 1
    assert f"stages.experts.from: {outside}: missing; restore it, or name its copy" in err
    assert braid("plan", copy, "--name", "third")[0] == 0


def test_patterns_and_directories_of_data_are_copied(
    braid: Braid, config: Path, rows: Path, tmp_path: Path
) -> None:
    below = rows.parent / "b"
    below.mkdir()
    shutil.copy(rows, below / "more.jsonl")
    for number, path in enumerate((rows.parent, rows.parent / "*/*.jsonl")):
        options = [f"domains.words.prompts.path='{path}'", "--name", f"n{number}"]
        assert braid("run", config, *options, *RIGHT)[0] == 0
        to = tmp_path / f"bundle{number}"
        assert braid("bundle", f"n{number}", "--to", to)[0] == 0
        assert braid("validate", to)[0] == 0
        assert len(list((to / "data").rglob("*.jsonl"))) == 2 - number


def test_rewards_of_two_directories_are_copied_apart(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    """Modules of one name are found by the directory that each is imported from."""
    options = []
    for number, domain in enumerate(("sums", "words")):
        path = tmp_path / f"code_of_{domain}"
        path.mkdir()
        (path / "grading.py").write_text(f"def grade(problem, response):\n    return {number}.0\n")
        reward = f"{{kind: python, function: 'grading:grade', path: '{path}'}}"
        options.append(f"domains.{domain}.rewards={{own: {reward}}}")
    assert braid("run", config, *options)[::2] == (0, "")
    to = tmp_path / "bundle"
    assert braid("bundle", "small", "--to", to)[::2] == (0, "")
    copied = sorted((to / "code").rglob("*.py"))
    assert [each.relative_to(to / "code").as_posix() for each in copied] == [
        "0/grading.py",
        "1/grading.py",
    ]
    settings = load(next(to.glob("*.yaml")), to_start=False)
    for number, domain in enumerate(("sums", "words")):
        reward = settings.domains[domain].rewards["own"]
        assert isinstance(reward, PythonReward) and reward.path is not None
        assert f"return {number}.0" in (reward.path / "grading.py").read_text()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("/tmp/braid_attack", tarfile.REGTYPE, "a path outside the bundle"),
        ("../attack", tarfile.REGTYPE, "a path outside the bundle"),
        ("data/../../attack", tarfile.REGTYPE, "a path outside the bundle"),
        ("link", tarfile.SYMTYPE, "links and devices are refused"),
        ("link", tarfile.LNKTYPE, "links and devices are refused"),
        ("pipe", tarfile.FIFOTYPE, "links and devices are refused"),
        ("bundle.json", tarfile.REGTYPE, "cannot be unpacked"),
    ],
)
def test_an_archive_that_would_write_elsewhere_is_refused(
    name: str, kind: bytes, message: str, braid: Braid, tmp_path: Path
) -> None:
    path = tmp_path / "in/evil.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as packed:
        good = tarfile.TarInfo("bundle.json")
        good.size = 2
        packed.addfile(good, io.BytesIO(b"{}"))
        bad = tarfile.TarInfo(name)
        bad.type, bad.linkname, bad.size = kind, "/etc/passwd", 2 if kind == tarfile.REGTYPE else 0
        packed.addfile(bad, io.BytesIO(b"{}"))
    before = set(tmp_path.rglob("*"))
    code, _, err = braid("validate", path)
    assert code == 1
    assert message in err
    assert set(tmp_path.rglob("*")) == before
    assert not Path("/tmp/braid_attack").exists()


def test_what_is_no_bundle_is_said_to_be_none(
    braid: Braid, archive: Path, config: Path, tmp_path: Path
) -> None:
    assert "neither a configuration nor a bundle" in braid("run", tmp_path / "moved")[2]
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(archive.read_bytes()[:200])
    assert "cannot be unpacked" in braid("run", broken)[2]
    other = tmp_path / "moved/other.tar.gz"
    shutil.copy(archive, other)
    (tmp_path / "moved/other").mkdir()
    assert "exists and is not unpacked from" in braid("run", other)[2]
    assert braid("validate", archive)[0] == 0
    inside = archive.parent / "small/bundle.json"
    inside.write_text(inside.read_text().replace('"format": 1', '"format": 2'))
    assert "format 2, and this version reads 1" in braid("run", archive.parent / "small")[2]
    inside.write_text("{")
    assert "damaged; bundle the run again" in braid("run", archive.parent / "small")[2]
    assert "exists; choose another path" in braid("bundle", "small", "--to", archive)[2]
    assert "no bundle there" in braid("bundle", "--check", "small", config)[2]
    assert "compares" in braid("bundle", "small", archive)[2]
    for name in (".", "/", ".tar.gz", ".tgz"):
        assert "not a bundle's name; choose another" in braid("bundle", "small", "--to", name)[2]
    unnamed = Path(shutil.copy(archive, tmp_path / ".tar.gz"))
    assert f"{unnamed}: unpacked to its name without .tar.gz" in braid("run", unnamed)[2]


def test_a_copied_input_that_links_outside_is_refused(braid: Braid, archive: Path) -> None:
    assert braid("validate", archive)[0] == 0
    data = archive.parent / "small/data/words.prompts/rows.jsonl"
    data.unlink()
    data.symlink_to("/etc/passwd")
    assert "outside the bundle" in braid("run", archive.parent / "small")[2]


def test_early_stops_and_overrides_are_in_the_bundle(
    braid: Braid, config: Path, tmp_path: Path
) -> None:
    actions = {"experts.words": {"0": "end_early"}, "gates.experts.sums": {"0": "fall_short"}}
    assert braid("run", config, *RIGHT, GATE, actions=actions)[0] == 1
    reason = "noise of the problems"
    assert braid("gate", "override", "small", "gates.experts.sums", "--reason", reason)[0] == 0
    assert braid("resume", "small")[0] == 0
    assert braid("bundle", "small", "--to", tmp_path / "b")[0] == 0
    found = json.loads((tmp_path / "b/bundle.json").read_text())
    causes = {each["line"]: each["cause"] for each in found["decisions"]}
    assert "good enough at step 1" in causes.values()
    assert any(cause.startswith(f"overridden: {reason}") for cause in causes.values())
    lines = (tmp_path / "runs/small/ledger.jsonl").read_text().splitlines()
    assert all(json.loads(lines[line - 1])["cause"] == cause for line, cause in causes.items())
    assert "braid gate override small gates.experts.sums --reason ..." in found["commands"]


def test_a_gate_that_stopped_is_compared_with_its_verdict(
    braid: Braid, config: Path, runs: Path, tmp_path: Path
) -> None:
    """Scores that stop the run would pass a lower bound, so the verdict counts beside them."""
    short = {"gates.experts.sums": {"0": "fall_short"}}
    given = (*RIGHT, "deterministic=true")
    assert braid("run", config, *given, GATE, actions=short)[0] == 1
    code, out, _ = braid("bundle", "small", "--to", tmp_path / "b")
    assert code == 0
    assert "so without an output to compare: merge, evaluate, export\n" in out
    found = json.loads((tmp_path / "b/bundle.json").read_text())["stages"]
    [gate] = [each for each in found if each["kind"] == "gate"]
    assert gate["state"] == "failed"
    assert gate["output"] is not None
    shutil.rmtree(runs)
    lower = GATE.replace("20", "20, min_gain: -1")
    assert braid("run", config, *given, lower, actions=short)[0] == 0
    err = braid("bundle", "--check", "small", tmp_path / "b")[2]
    assert "gates.experts.sums is the first stage that differs from the bundle's" in err
    assert "  setting gate.min_gain: 0.0 in the bundle, -1.0 here\n" in err


def test_an_archive_with_damaged_bytes_is_one_error(
    braid: Braid, archive: Path, tmp_path: Path
) -> None:
    whole = archive.read_bytes()
    for place in range(64, len(whole) - 8, len(whole) // 23):  # behind the name in gzip's header
        broken = tmp_path / f"broken{place}.tar.gz"
        broken.write_bytes(whole[:place] + bytes(255 - each for each in whole[place : place + 9])
            + whole[place + 9 :])  # fmt: skip
        code, _, err = braid("validate", broken)
        assert code == 1
        assert "cannot be unpacked" in err


def test_a_bundle_that_fails_leaves_nothing(
    braid: Braid, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert braid("run", config, *RIGHT)[0] == 0

    def full(directory: Path, archive: Path) -> None:
        archive.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(archive))

    monkeypatch.setattr("pipeline.run.bundle.writer._pack", full)
    (tmp_path / "to").mkdir()
    code, _, err = braid("bundle", "small", "--to", tmp_path / "to/b.tar.gz")
    assert (code, "No space left" in err) == (1, True)
    assert not list((tmp_path / "to").iterdir())
