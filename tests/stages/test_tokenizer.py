"""The character tokenizer, alone and as transformers loads it."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from parallel.settings import ModelSettings
from pipeline.config.tokenizers import template_digest
from stages.data.tokenizer import (
    CHARACTERS,
    CHAT_TEMPLATE,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    TokenizerError,
    import_without_torch,
    load_tokenizer,
)
from tests.byte_tokenizer import CHATML, save_tokenizer
from tests.runs import REPOSITORY

RESPONSE = "<3,-4,3>3"


def test_ids_are_fixed() -> None:
    tokenizer = CharacterTokenizer()
    assert (tokenizer.pad_token, tokenizer.end_token, tokenizer.vocabulary_size) == (0, 1, 80)
    assert tokenizer.encode("09az ") == [2, 11, 12, 37, 64]
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS


def test_decoding_stops_at_the_end_and_shows_stray_special_ids() -> None:
    tokenizer = CharacterTokenizer()
    ids = [*tokenizer.encode(RESPONSE), tokenizer.end_token, *tokenizer.encode("junk")]
    assert tokenizer.decode(ids) == RESPONSE
    assert tokenizer.decode([*tokenizer.encode("1"), 0, 79]) == "1[PAD][RESERVED_79]"
    assert tokenizer.decode_prompt(tokenizer.encode("1[END]2")) == "1[END]2"


def test_only_its_name_spells_a_special_token() -> None:
    tokenizer = CharacterTokenizer()
    assert tokenizer.encode("1[END][RESERVED_79][PAD]2") == [3, 1, 79, 0, 4]
    for text in ("[RESERVED_80]", "[end]", "[", "END]"):
        with pytest.raises(TokenizerError, match="is not in the vocabulary"):
            tokenizer.encode(text)


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"character 'é' of 'caf.' is not in the vocabulary"):
        CharacterTokenizer().encode("café")


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_transformers_loads_the_same_ids(tmp_path: Path, beside_a_model: bool) -> None:
    from transformers import AutoTokenizer, Qwen3MoeConfig

    ours = CharacterTokenizer()
    if beside_a_model:  # the model's type must not make AutoTokenizer choose another class
        Qwen3MoeConfig(vocab_size=80).save_pretrained(tmp_path)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    assert len(theirs) == theirs.vocab_size == ours.vocabulary_size
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ours.pad_token, ours.end_token)
    for text in ["", "c4-1-7+7=", RESPONSE, "  two  spaces ", CHARACTERS]:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.decode([2, 0, 79]) == ours.decode([2, 0, 79])
    assert theirs.decode([2, 0, 79, 1], skip_special_tokens=True) == "0"
    with pytest.raises(Exception, match="UNK"):
        theirs("é")


CHAT = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "so?"},
]


def test_the_exported_template_is_the_character_tokenizer_s(tmp_path: Path) -> None:
    ours = CharacterTokenizer()
    ours.save(tmp_path)
    theirs = HuggingFaceTokenizer(tmp_path)
    for count in range(1, 5):
        for prompt in (False, True):
            text = ours.render(CHAT[:count], prompt)
            assert theirs.render(CHAT[:count], prompt) == text
            assert theirs.encode(text) == ours.encode(text)
    assert ours.render(CHAT[1:3], True) == "user: 1+1 assistant: 2[END]assistant: "
    assert template_digest(tmp_path) == sha256(CHAT_TEMPLATE.encode()).hexdigest()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words, whose ids leave gaps and whose end token is its last id."""
    return save_words(tmp_path_factory.mktemp("words"))


def save_words(folder: Path, **tokens: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<bos>": 0, "one": 2, "two": 3, "plus": 4, "</s>": 9}
    backend = Tokenizer(models.WordLevel(ids, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, **({"eos_token": "</s>", "bos_token": "<bos>"} | tokens)
    ).save_pretrained(folder)
    return folder


def model(tokenizer: Path | str, vocabulary: int = 10) -> ModelSettings:
    return ModelSettings.model_construct(tokenizer=str(tokenizer), vocabulary_size=vocabulary)


def test_a_directory_s_tokenizer_adds_no_special_tokens(words: Path) -> None:
    tokenizer = load_tokenizer(model(words))
    assert (tokenizer.end_token, tokenizer.pad_token, tokenizer.vocabulary_size) == (9, 9, 10)
    assert tokenizer.encode("one plus two") == [2, 4, 3]
    assert tokenizer.encode("<bos> one</s>") == [0, 2, 9]
    assert tokenizer.decode([2, 4, 3, 9, 2]) == "one plus two"
    assert tokenizer.decode([0, 2]) == "<bos> one"
    # Where the end token ends every turn, as Qwen's does, a prompt has several.
    assert tokenizer.decode_prompt([2, 4, 3, 9, 2]) == "one plus two </s> one"
    assert tokenizer.decode([2, 7, 12, 3]) == "one[UNKNOWN_7][UNKNOWN_12]two"
    with pytest.raises(TokenizerError, match=r"words.* has no chat template, which chat messages"):
        tokenizer.render(CHAT, generation_prompt=True)


def test_a_saved_tokenizer_loads_equal(words: Path, tmp_path: Path) -> None:
    load_tokenizer(model(words)).save(tmp_path)
    again = load_tokenizer(model(tmp_path))
    assert again.encode("one</s>") == [2, 9]


def test_an_unusable_tokenizer_is_an_error(words: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"vocabulary_size: 9 is less than the 10 ids of the"):
        load_tokenizer(model(words, vocabulary=9))
    with pytest.raises(TokenizerError, match=r"vocabulary_size: 79 is less than the 80 ids"):
        load_tokenizer(model("characters", vocabulary=79))
    with pytest.raises(TokenizerError, match=r"model\.tokenizer: no such directory: .*nowhere"):
        load_tokenizer(model(tmp_path / "nowhere"))
    with pytest.raises(TokenizerError, match="transformers cannot load"):
        load_tokenizer(model(tmp_path))
    endless = save_words(tmp_path / "endless", eos_token=None)
    with pytest.raises(TokenizerError, match="has no end token; set eos_token in its"):
        load_tokenizer(model(endless))


def test_an_end_token_that_only_the_config_names_is_an_error(tmp_path: Path) -> None:
    config = save_tokenizer(tmp_path, CHATML) / "tokenizer_config.json"
    stated = json.loads(config.read_text()) | {"eos_token": "<|nobody|>"}
    config.write_text(json.dumps(stated))
    with pytest.raises(
        TokenizerError, match=r"no token '<\|nobody\|>', which the eos_token of its"
    ):
        load_tokenizer(model(tmp_path, 310))
    # As published checkpoints list tokens that tokenizer.json lacks.
    listed = {"310": {"content": "<|nobody|>", "special": True}}
    config.write_text(json.dumps(stated | {"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(model(tmp_path, 311))
    assert tokenizer.decode_prompt([tokenizer.end_token]) == "<|nobody|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no way') }}", r"\.\.\.: no way$"),
        ("{{ 'a' * 10 ** 15 }}", r"\.\.\.: MemoryError\(\)$"),
    ],
)
def test_a_template_s_error_is_short_and_says_why(
    tmp_path: Path, template: str, message: str
) -> None:
    tokenizer = load_tokenizer(model(save_tokenizer(tmp_path, template), 300))
    with pytest.raises(TokenizerError, match=message) as error:
        tokenizer.render([{"role": "user", "content": "long " * 100_000}], generation_prompt=True)
    assert len(str(error.value)) < 1000


def test_several_templates_without_a_default_are_an_error(tmp_path: Path) -> None:
    config = save_tokenizer(tmp_path, CHATML) / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": CHATML}]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": templates}))
    tokenizer = load_tokenizer(model(tmp_path, 300))
    with pytest.raises(TokenizerError, match=r"^model\.tokenizer: .*no default specified"):
        tokenizer.render(CHAT, generation_prompt=True)


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "BertTokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("beside", ["nothing", "qwen3_moe"])
def test_tokenizer_json_decides_whatever_class_the_config_names(
    tmp_path: Path, name: str, beside: str
) -> None:
    config = save_tokenizer(tmp_path, CHATML) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    if beside == "qwen3_moe":
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(model(tmp_path, 300))
    for text in ("what is the  sum", " of\n\n12 + 3\t<|im_end|>"):
        assert tokenizer.encode(text) == raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode_prompt(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, r"turns the text 'What is .*' into 'what is the"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "7"}, "content": ""}}, "0123456"),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, r"third\\n'"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, "spaces"),
        ({"decoder": None}, "turns the text"),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused_by_name(
    tmp_path: Path, damage: dict[str, Any], message: str
) -> None:
    path = save_tokenizer(tmp_path, CHATML) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(TokenizerError, match=rf"^model\.tokenizer: {tmp_path} .*{message}"):
        load_tokenizer(model(tmp_path, 300))


def test_a_tokenizer_that_composes_characters_is_not_refused(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, CHATML) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    tokenizer = load_tokenizer(model(tmp_path, 300))
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == "caf\u00e9"


def test_a_text_without_ids_is_an_error_that_names_it(words: Path) -> None:
    with pytest.raises(TokenizerError, match=r"words.* has no ids for 'one three': WordLevel"):
        load_tokenizer(model(words)).encode("one three")


def test_a_tokenizer_is_equal_without_torch(words: Path) -> None:
    program = (
        "import json, sys\n"
        "from stages.data.tokenizer import import_without_torch, tokenizer_named\n"
        "import_without_torch(sys.argv[1])\n"
        "ids = tokenizer_named(sys.argv[1]).encode('one plus two')\n"
        "print(json.dumps([ids, 'torch' in sys.modules]))\n"
    )
    command = [sys.executable, "-c", program, str(words)]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert (json.loads(printed.stdout), printed.stderr) == ([[2, 4, 3], False], "")


def test_torch_stays_where_it_is_imported() -> None:
    import_without_torch("a/directory")
    assert sys.modules["torch"] is torch


def test_torch_is_found_again_where_transformers_cannot_be_imported() -> None:
    program = """
import sys
from stages.data.tokenizer import import_without_torch
sys.modules["transformers"] = None
try:
    import_without_torch("a/directory")
except ImportError:
    print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, cwd=REPOSITORY, text=True) == "False\n"
