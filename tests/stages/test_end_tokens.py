"""The tokens that end a response: which they are, and that no reward reads one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from parallel.errors import UserError
from parallel.settings import CHARACTERS, ModelSettings
from stages.data.conversations import closing_token
from stages.data.end_tokens import end_tokens, generation_ids
from stages.data.problem import Problem
from stages.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_named
from stages.domains import SamplingSettings
from stages.objectives.groups import groups_of
from stages.sampling.engines import StageEngines
from tests.byte_tokenizer import CHATML, save_glm, save_tokenizer
from tests.pipeline.checkpoint_headers import SMALL


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_glm(tmp_path_factory.mktemp("glm"))


def model(tokenizer: object, **update: Any) -> ModelSettings:
    update = {"vocabulary_size": 300, "tokenizer": str(tokenizer)} | update
    return SMALL.model_copy(update=update)


def ends(of: ModelSettings, eos: int = 0) -> tuple[int, ...]:
    return end_tokens(of, eos, tokenizer_named(of.tokenizer).encode)


def generation(directory: Path, ids: object) -> Path:
    directory.mkdir()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory


def test_they_are_the_tokenizer_s_and_those_of_the_checkpoint(glm: Path, tmp_path: Path) -> None:
    assert ends(model(glm)) == (0, 1, 3)
    assert ends(model(glm), eos=3) == (3, 0, 1)  # the tokenizer's is the main one
    base = generation(tmp_path / "base", 7)
    assert ends(model(glm, initial_weights=base)) == (0, 7)
    bare = tmp_path / "bare"
    bare.mkdir()
    assert ends(model(glm, initial_weights=bare)) == (0, 1, 3)
    assert ends(model(CHARACTERS), eos=1) == (1,)
    assert ends(model(CHARACTERS, initial_weights=generation(tmp_path / "no", None)), eos=1) == (1,)
    # An id that the model does not have is never sampled.
    beyond = generation(tmp_path / "beyond", [300, 299])
    assert ends(model(glm, initial_weights=beyond)) == (0, 299)


def test_the_key_overrides_them_by_text_or_id(glm: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    stated = model(glm, end_tokens=("<|observation|>", 5, "<|user|>", 3), initial_weights=gone)
    assert ends(stated) == (3, 5, 1)
    assert load_tokenizer(stated).end_tokens == (3, 5, 1)
    assert load_tokenizer(stated).end_token == 3
    for token, why in (("<|nobody|>", r"is \d+ tokens"), ("", "is 0 tokens"), (300, "not below")):
        with pytest.raises(UserError, match=rf"^model\.end_tokens: .*{why}"):
            ends(model(glm, end_tokens=(token,)))


def test_a_file_that_does_not_say_them_is_an_error(glm: Path, tmp_path: Path) -> None:
    for number, ids in enumerate(("</s>", [1, None], True, [-1], {"a": 1})):
        wrong = generation(tmp_path / str(number), ids)
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: .*set model"):
            generation_ids(wrong, str(glm))
        assert ends(model(glm, initial_weights=wrong, end_tokens=(2,))) == (2,)
    (tmp_path / "0" / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read: .*set model"):
        generation_ids(tmp_path / "0", str(glm))
    with pytest.raises(UserError, match=r"initial_weights: no such directory: .*gone.*restore it"):
        ends(model(glm, initial_weights=tmp_path / "gone"))
    assert generation_ids(tmp_path / "gone", CHARACTERS) is None


def test_engines_are_asked_to_stop_at_each_of_them() -> None:
    engines = mock.Mock(log=None)
    engines.tokenizer.end_tokens, engines._encode.return_value = (0, 3, 1), [5]
    groups = groups_of([Problem("sums", 0, "1+1", "2", {})], 1, 0)
    StageEngines.request(engines, groups, SamplingSettings(max_response_tokens=8))
    [task] = engines.scheduler.submit.call_args.args[0]
    assert task.request.sampling.end_tokens == (0, 3, 1)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_reward_reads_no_end_token_of_any_kind(glm: Path, by_name: bool) -> None:
    tokenizer = tokenizer_named(str(glm)) if by_name else load_tokenizer(model(glm))
    for name in ("<|endoftext|>", "<|user|>", "<|observation|>"):
        ids = tokenizer.encode(f"It is 4.{name}")
        assert tokenizer.decode(ids) == "It is 4."
        assert tokenizer.decode_prompt(ids) == f"It is 4.{name}"
    assert tokenizer.decode(tokenizer.encode("a<|system|>")) == "a<|system|>"
    characters = load_tokenizer(SMALL.model_copy(update={"end_tokens": (".", "[END]")}))
    assert characters.decode(characters.encode("12.[END]")) == "12"
    assert characters.end_token == characters.encode(".")[0]


def test_a_turn_is_closed_by_what_begins_the_next_or_the_main_one(
    glm: Path, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "a<|user|>"}, {"role": "assistant", "content": "b"}]

    def closed(tokenizer: Tokenizer, *main: int) -> int:
        tokenizer.end_tokens = tuple(dict.fromkeys([*main, *tokenizer.end_tokens]))
        return closing_token(tokenizer, said)

    assert closed(tokenizer_named(str(glm))) == 1
    assert closed(tokenizer_named(str(glm)), 3) == 1
    chatml = save_tokenizer(tmp_path / "chatml", CHATML, end="<|other|>")
    assert closed(tokenizer_named(str(chatml))) == 3
    refusing = CHATML + "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
    refusing = str(save_tokenizer(tmp_path / "refusing", refusing, end="<|im_start|>"))
    assert closed(tokenizer_named(refusing)) == 1
