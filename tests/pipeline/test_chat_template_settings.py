"""The settings of a chat template: further arguments, and the date of the run's first start."""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import date, timedelta
from pathlib import Path

import pytest

from pipeline.commands.support import configuration, starting
from pipeline.config.read import ConfigError
from pipeline.config.validate import load
from pipeline.run.lineage import changes, read_manifest, write_manifest
from pipeline.run.run import Run
from stages.data.tokenizer import load_tokenizer, tokenizer_named
from tests.byte_tokenizer import CHATML, save_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }} {{ style }}" + CHATML
CHAT = [{"role": "user", "content": "hi"}]
TODAY = date.today()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer", DATED)


def configured(tmp_path: Path, directory: Path, *overrides: str, fork: str | None = None) -> Run:
    """Return the run that `braid run` would start or resume."""
    given = [f"model.tokenizer={directory}", "model.vocabulary_size=300", *overrides]
    config = Path("configs/smoke.yaml")
    arguments = Namespace(config=config, runs_dir=tmp_path, name=None, overrides=given, fork=fork)
    return configuration.load_configured_run(arguments)


def test_the_date_of_the_first_start_is_kept_and_read(tmp_path: Path, directory: Path) -> None:
    run = configured(tmp_path, directory)
    assert run.settings.model.chat_template_date == TODAY
    yesterday = TODAY - timedelta(days=1)
    model = run.settings.model.model_copy(update={"chat_template_date": yesterday})
    run = Run(run.path, run.settings.model_copy(update={"model": model}))
    run.path.mkdir()
    run.write_settings()
    again = configured(tmp_path, directory)
    assert again.settings.model.chat_template_date == yesterday
    shown = load_tokenizer(again.settings.model).render(CHAT, generation_prompt=False)
    assert shown.startswith(yesterday.strftime("%d %b %Y"))
    other = configured(tmp_path, directory, "name=other", fork=run.name)
    assert other.settings.model.chat_template_date == yesterday
    fixed = configured(tmp_path, directory, "model.chat_template_date=2026-02-03")
    assert fixed.settings.model.chat_template_date == date(2026, 2, 3)
    # The date is in the lineage of every stage that reads the model's settings.
    [stage, *_] = fixed.stages
    assert stage.reads["model.chat_template_date"] == "2026-02-03"


def test_a_run_that_an_older_version_started_gets_no_date(tmp_path: Path, directory: Path) -> None:
    run = configured(tmp_path, directory)
    model = run.settings.model.model_copy(update={"chat_template_date": None})
    run = Run(run.path, run.settings.model_copy(update={"model": model}))
    run.path.mkdir()
    run.write_settings()
    assert configured(tmp_path, directory).settings.model.chat_template_date is None


def test_a_fork_says_why_stages_of_an_undated_run_are_not_reused(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage is reused where both runs record one date."""
    dates: tuple[date | None, ...] = (None, TODAY - timedelta(days=3))
    for name, day in zip(("undated", "recorded"), dates, strict=True):
        run = configured(tmp_path, directory, f"name={name}")
        model = run.settings.model.model_copy(update={"chat_template_date": day})
        run = Run(run.path, run.settings.model_copy(update={"model": model}))
        run.path.mkdir()
        run.write_settings()
        first = run.stages[0]
        checkpoint = run.stage(first.name).path / "checkpoints" / f"step_{first.steps}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        (checkpoint / "checksums.json").write_text('{"digest": "d", "files": {}}')
        write_manifest(run.stage(first.name), run.lineage(first))
        run.ledger.append(first.name, "done", "finished", 1)
        other = configured(tmp_path, directory, f"name={name}-fork", fork=name)
        starting.reuse_from(other, run)
        said = capsys.readouterr().out
        assert other.settings.model.chat_template_date == (day or TODAY)
        if day is None:
            assert f"not reused: {first.name}: its chat template showed the day on which it" in said
        else:
            assert f": {first.name}\n" in said and "not reused" not in said


def test_a_template_without_a_date_has_none(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "tokenizer", CHATML)
    assert configured(tmp_path, directory).settings.model.chat_template_date is None


def test_arguments_reach_the_template_and_unknown_ones_are_errors(
    tmp_path: Path, directory: Path
) -> None:
    run = configured(tmp_path, directory, "model.chat_template_arguments={style: terse}")
    text = load_tokenizer(run.settings.model).render(CHAT, generation_prompt=False)
    assert text.startswith(f"{TODAY.strftime('%d %b %Y')} terse<|im_start|>user")
    for name, message in (
        ("stile", "does not read stile; remove it"),
        ("tools", "tools is reserved for the messages and their rendering"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.chat_template_arguments: .*{message}"):
            configured(tmp_path, directory, f"model.chat_template_arguments={{{name}: 1}}")
    with pytest.raises(ConfigError, match="template of characters does not read style"):
        load(Path("configs/smoke.yaml"), ["model.chat_template_arguments={style: 1}"])


def test_a_tokenizer_with_more_ids_than_the_model_is_an_error_before_the_start(
    tmp_path: Path, directory: Path
) -> None:
    size = tokenizer_named(str(directory)).vocabulary_size
    assert configured(tmp_path, directory, f"model.vocabulary_size={size}")
    with pytest.raises(ConfigError, match=rf"vocabulary_size: {size - 1} is less than the {size}"):
        configured(tmp_path, directory, f"model.vocabulary_size={size - 1}")


@pytest.mark.parametrize("style", [None, "terse"])
def test_a_manifest_of_before_these_keys_is_not_stale(
    tmp_path: Path, directory: Path, style: str | None
) -> None:
    """A recorded stage has none of the keys; one with arguments has them below their mapping."""
    given = [] if style is None else [f"model.chat_template_arguments={{style: {style}}}"]
    undated = save_tokenizer(tmp_path / "undated", "{{ style }}" + CHATML)
    run = configured(tmp_path, undated, *given)
    stage = run.stage(run.stages[0].name)
    stage.path.mkdir(parents=True)
    now = run.lineage(run.stages[0])
    write_manifest(stage, now)
    if style is None:
        manifest = json.loads(stage.manifest.read_text())
        for key in ("model.chat_template_arguments", "model.chat_template_date"):
            del manifest["settings"][key]
        stage.manifest.write_text(json.dumps(manifest))
    recorded = read_manifest(stage)
    assert recorded is not None
    assert [*changes(recorded, now)] == []
    other = configured(tmp_path, undated, "model.chat_template_arguments={style: long}")
    assert any("style" in line for line in changes(recorded, other.lineage(other.stages[0])))
