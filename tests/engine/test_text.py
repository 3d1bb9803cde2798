"""Ids to text: whole characters, nothing lost, and an answer that ends where it should."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from headstart.engine.detokenizer import Detokenizer
from tests.tiny_tokenizers import END_OF_TURN, TINY_TOKENIZERS

TOKENIZERS = {name: make() for name, make in TINY_TOKENIZERS.items()}
BYTES = TOKENIZERS["byte_level"]
NO_LIMIT = 10**9
TEXTS = st.text(
    st.sampled_from("the wor, \n日本語👍🏽é\u0301\u200d👩👧🇩🇪\u064b\u0e33")
    | st.characters(exclude_categories=["Cs"])
)
# Few letters, so that stop strings are often begun and sometimes finished.
LETTERS = st.text("abé👍", max_size=40)
STOPS = st.lists(st.text("abé👍", min_size=1, max_size=4), min_size=1, max_size=3)


def tokens(text: str, tokenizer: PreTrainedTokenizerBase = BYTES) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip: bool = True) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=skip)
    assert isinstance(text, str)
    return text


def pieces(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


# Detokenizer


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@given(texts=st.lists(TEXTS, max_size=6))
def test_pieces_together_are_the_text(name: str, texts: list[str]) -> None:
    """Texts tokenised one by one: characters over several tokens, words that a model may split."""
    tokenizer = TOKENIZERS[name]
    token_ids = [token_id for text in texts for token_id in tokens(text, tokenizer)]
    found = pieces(tokenizer, token_ids, skip=True)
    assert "".join(found) == decode(tokenizer, token_ids)
    if "\ufffd" not in "".join(texts):
        assert not any("\ufffd" in piece for piece in found)
        assert found[-1] == ""


@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=40),
    st.booleans(),
)
def test_pieces_of_any_ids_are_what_the_tokenizer_decodes(token_ids: list[int], skip: bool) -> None:
    """Bytes that make no character, special tokens in the midst of one."""
    found = pieces(BYTES, token_ids, skip)
    assert "".join(found) == decode(BYTES, token_ids, skip)


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@pytest.mark.parametrize("text", ["👩‍👩‍👧", "日本語", "né", "🇩🇪"])
def test_every_character_comes_out_with_its_last_token(name: str, text: str) -> None:
    """Not before, and no later: what is out after any token are the characters it completed."""
    tokenizer = TOKENIZERS[name]
    token_ids = tokens("a" + text + "b", tokenizer)
    detokenizer = Detokenizer(tokenizer)
    out = ""
    for count, token_id in enumerate(token_ids, 1):
        out += detokenizer.push(token_id)
        assert out == decode(tokenizer, token_ids[:count]).rstrip("\ufffd")
    assert out == "a" + text + "b"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    *token_ids, _ = byte_tokens("a日")
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def byte_tokens(text: str) -> list[int]:
    """One token for each byte, in the byte-level vocabulary: ids by the byte's place in it."""
    return [token_id for byte in text.encode() for token_id in BYTE_IDS[byte]]


BYTE_IDS = {
    byte: [token_id]
    for token_id in range(len(BYTES))
    for byte in range(256)
    if BYTES.convert_ids_to_tokens(token_id) == chr(byte)
}


def test_special_tokens_are_shown_if_asked_for() -> None:
    token_ids = tokens("a" + END_OF_TURN + "b")
    assert "".join(pieces(BYTES, token_ids, skip=True)) == "ab"
    assert "".join(pieces(BYTES, token_ids, skip=False)) == "a" + END_OF_TURN + "b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.push(3) == detokenizer.finish() == ""


def test_the_work_for_a_token_does_not_grow_with_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window that is decoded again stays as short at the end as at the beginning."""
    lengths = []
    decode_all = Detokenizer._decode

    def counting(self: Detokenizer, token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode_all(self, token_ids)

    monkeypatch.setattr(Detokenizer, "_decode", counting)
    pieces(BYTES, tokens("the other 日本語 👍🏽 there, " * 30), skip=True)
    assert max(lengths) < 12
