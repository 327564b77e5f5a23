"""Hugging Face data sets on disk as rows of `braid init`: their layouts, splits and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet as parquet
import pytest

from parallel.errors import UserError
from pipeline.config.validate import load
from pipeline.new_run.data_sets import rows_of, source_of
from stages.data.settings import FileSettings
from tests.pipeline.conftest import Braid
from tests.pipeline.hugging_face_directories import TINY, published
from tests.pipeline.test_init import said

GSM8K = [{"question": f"How many are {n} and 4?", "answer": str(n + 4)} for n in range(60)]
Rows = Sequence[dict[str, Any]]


def written(path: Path, rows: Rows) -> Path:
    """Write a shard as `datasets` does: JSON lines, Parquet, or a stream of Arrow batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist([*rows])
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    return path


def saved_to_disk(directory: Path, splits: Sequence[str]) -> Path:
    """Write the layout of `DatasetDict.save_to_disk`."""
    directory.mkdir(parents=True)
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": [*splits]}))
    for split in splits:
        for shard in range(2):
            name = f"data-{shard:05d}-of-00002.arrow"
            written(directory / split / name, GSM8K[30 * shard : 30 * shard + 30])
        files = [{"filename": f"data-{shard:05d}-of-00002.arrow"} for shard in range(2)]
        state = {"_data_files": files, "_split": split, "_fingerprint": "1"}
        (directory / split / "state.json").write_text(json.dumps(state))
        (directory / split / "dataset_info.json").write_text('{"features": {}}')
        # What `map` left there is another data set.
        written(directory / split / "cache-0123456789abcdef.arrow", [{"input_ids": [1]}])
    return directory


LAYOUTS = {
    "data/train-00000-of-00002.parquet": "parquet",
    "main/train-00000-of-00002.parquet": "parquet",
    "default/train/0000.parquet": "parquet",
    "train/a.jsonl": "jsonl",
    "gsm8k_train.jsonl": "jsonl",
    "0.0.0/gsm8k-train-00000-of-00002.arrow": "arrow",
    "data/train_sft-00000-of-00001.parquet": "parquet",
}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_split_of_every_layout_is_found_by_name(name: str, several: bool, tmp_path: Path) -> None:
    files = [written(tmp_path / name, GSM8K[:3])]
    if several:
        path = Path(name)
        shard = path.name.replace("00000-of", "00001-of").replace("0000.", "0001.")
        shard = shard if shard != path.name else f"{path.stem}_1{path.suffix}"
        files.append(written(tmp_path / path.parent / shard, GSM8K[3:6]))
    split = "train_sft" if "train_sft" in name else "train"
    test = name.replace("train", "test")
    written(tmp_path / test, GSM8K[6:9])
    rows = rows_of("--domains math", f"{tmp_path}:{split}")
    assert source_of(rows) == LAYOUTS[name]
    assert FileSettings(source=source_of(rows), path=rows).files() == sorted(files)
    other = "test_sft" if "train_sft" in name else "test"
    with pytest.raises(UserError, match=f"has the splits {split}, {other}; name one: .*:{split}"):
        rows_of(f"--domains math={tmp_path}", str(tmp_path))


def test_errors_of_data_sets(tmp_path: Path) -> None:
    def error(stated: str) -> str:
        with pytest.raises(UserError) as caught:
            rows_of(f"--domains math={stated}", stated)
        return str(caught.value)

    written(tmp_path / "main/train-00000-of-00001.parquet", GSM8K[:3])
    written(tmp_path / "main/test-00000-of-00001.parquet", GSM8K[:3])
    assert 'has no split tran; did you mean "train"?' in error(f"{tmp_path}:tran")
    written(tmp_path / "socratic/train-00000-of-00001.parquet", GSM8K[:3])
    fix = f"has the subsets main, socratic; name one: {tmp_path}/socratic:train"
    assert error(f"{tmp_path}:train").endswith(fix)
    (tmp_path / "empty").mkdir()
    assert "no file of *.parquet, *.arrow, *.jsonl in " in error(f"{tmp_path}/empty")
    assert "no file matches " in error(f"{tmp_path}/empty/*.jsonl")
    assert "no such file: " in error(f"{tmp_path}/absent.jsonl")
    assert "write hf:OWNER/NAME" in error("hf:gsm8k:train")


def test_a_relative_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = written(tmp_path / "gsm/train.jsonl", GSM8K[:3])
    monkeypatch.chdir(tmp_path)
    assert rows_of("--domains math", "gsm:train").absolute() == rows
    assert rows_of("--domains math", "gs*/*.jsonl") == Path("gs*/*.jsonl")


def test_the_hub_without_a_network_says_how_to_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("Name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    option = "--domains math=hf:openai/gsm8k/main:train"
    with pytest.raises(UserError) as caught:
        rows_of(option, "hf:openai/gsm8k/main:train")
    assert str(caught.value) == (
        f"{option}: cannot download openai/gsm8k: Name or service not known; on a machine with a "
        "network run hf download openai/gsm8k --repo-type dataset --local-dir DIRECTORY, copy "
        "DIRECTORY here, and name it: DIRECTORY/main:train"
    )
    wanted = written(tmp_path / "main/train-00000-of-00001.parquet", GSM8K)

    def downloaded(data_set: str, **options: Any) -> str:
        assert (data_set, options["repo_type"]) == ("openai/gsm8k", "dataset")
        assert "main/*.parquet" in options["allow_patterns"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    assert rows_of(option, "hf:openai/gsm8k/main:train") == wanted


def test_a_run_of_a_data_set_saved_to_disk(braid: Braid, tmp_path: Path) -> None:
    saved = saved_to_disk(tmp_path / "gsm8k", ["train", "test"])
    weights = published(tmp_path / "model", TINY)
    run = tmp_path / "mine.yaml"
    options = ["--model", str(weights), "--domains", f"math={saved}:train", "--output", str(run)]
    report = said(braid, *options, "--columns", "prompt=question")
    assert report["rows"]["math"]["rows"] == 60
    prompts = load(run).domains["math"].prompts.model_dump()
    assert (prompts["source"], prompts["path"]) == ("arrow", saved / "train")
    code, _, err = braid("validate", run)
    assert code == 0, err
