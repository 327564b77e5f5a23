"""The character tokenizer, alone and as transformers loads it."""

from pathlib import Path

import pytest

from stages.tokenizer import CHARACTERS, CharacterTokenizer

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


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(ValueError, match=r"character 'é' of 'caf.' is not in the vocabulary"):
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
