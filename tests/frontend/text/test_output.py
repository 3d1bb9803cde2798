"""Ids to text: whole characters, no lost text, and the end of an answer."""

import itertools
from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from headstart import SamplingParams
from headstart.frontend.text import Detokenizer, OutputText, make_token_text
from tests.tiny_tokenizers import DECODED_TOKENIZERS, END_OF_TURN, TINY_TOKENIZERS, byte_tokens

TOKENIZERS = {name: make() for name, make in DECODED_TOKENIZERS.items()}
BYTES = TOKENIZERS["byte_level"]
NO_LIMIT = 10**9
TEXTS = st.text(
    st.sampled_from("the wor, \n日本語👍🏽é\u0301\u200d👩👧🇩🇪\u064b\u0e33")
    | st.characters(exclude_categories=["Cs"])
)
# Few letters, so that stop strings often begin and sometimes end.
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
def test_pieces_add_up_to_the_text(name: str, texts: list[str]) -> None:
    """Texts are tokenized one by one, so that characters and words extend over several tokens."""
    tokenizer = TOKENIZERS[name]
    token_ids = [token_id for text in texts for token_id in tokens(text, tokenizer)]
    result = pieces(tokenizer, token_ids, skip=True)
    assert "".join(result) == decode(tokenizer, token_ids)
    if "\ufffd" not in "".join(texts):
        assert not any("\ufffd" in piece for piece in result)
        assert result[-1] == ""


@given(
    st.lists(st.integers(0, len(BYTES) - 1), max_size=40),
    st.booleans(),
)
def test_pieces_of_any_ids_match_the_tokenizer(token_ids: list[int], skip: bool) -> None:
    """The ids may be invalid bytes, or special tokens within a character."""
    text = pieces(BYTES, token_ids, skip)
    assert "".join(text) == decode(BYTES, token_ids, skip)


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@pytest.mark.parametrize("text", ["👩‍👩‍👧", "日本語", "né", "🇩🇪"])
def test_characters_are_returned_once_complete(name: str, text: str) -> None:
    """A character is returned with its last token, unless this token begins another character."""
    tokenizer = TOKENIZERS[name]
    token_ids = tokens("a" + text + "b", tokenizer)
    detokenizer = Detokenizer(tokenizer)
    out = ""
    for count, token_id in enumerate(token_ids, 1):
        out += detokenizer.push(token_id)
        so_far = decode(tokenizer, token_ids[:count])
        if so_far.endswith("\ufffd"):
            assert ("a" + text).startswith(out)
        else:
            assert out == so_far
    assert out == "a" + text + "b"


@pytest.mark.parametrize("name", DECODED_TOKENIZERS)
@given(texts=st.lists(TEXTS, max_size=6), data=st.data(), skip=st.booleans())
def test_an_answer_continues_the_text_of_its_prompt(
    name: str, texts: list[str], data: st.DataObject, skip: bool
) -> None:
    """The answers of SentencePiece's tokenizers once lost the space before their first word."""
    tokenizer = TOKENIZERS[name]
    token_ids = [token_id for text in texts for token_id in tokens(text + END_OF_TURN, tokenizer)]
    count = data.draw(st.integers(0, len(token_ids)))
    prompt = decode(tokenizer, token_ids[:count], skip)
    whole = decode(tokenizer, token_ids, skip)
    assume("\ufffd" not in prompt + "".join(texts))
    detokenizer = Detokenizer(tokenizer, skip, token_ids[:count])
    pushed = "".join(map(detokenizer.push, token_ids[count:])) + detokenizer.finish()
    assert prompt + pushed == whole
    assert Detokenizer(tokenizer, skip, token_ids[:count]).finish(token_ids[count:]) == pushed


@pytest.mark.parametrize("name", DECODED_TOKENIZERS)
def test_texts_of_tokens_add_up_to_the_text(name: str) -> None:
    """All tokens but the first are within text, so their leading spaces are shown."""
    tokenizer = TOKENIZERS[name]
    first, *others = tokens("the other day they went there together", tokenizer)
    texts = make_token_text(tokenizer)
    whole = decode(tokenizer, [first]) + "".join(map(texts, others))
    assert whole == decode(tokenizer, [first, *others]) == "the other day they went there together"


def test_an_answer_completes_the_last_character_of_its_prompt() -> None:
    for name in ("byte_level", "metaspace"):
        token_ids = tokens("a日本語", TOKENIZERS[name])
        for count in range(1, len(token_ids)):
            prompt = decode(TOKENIZERS[name], token_ids[:count]).rstrip("\ufffd")
            detokenizer = Detokenizer(TOKENIZERS[name], True, token_ids[:count])
            pushed = "".join(map(detokenizer.push, token_ids[count:]))
            assert prompt + pushed == "a日本語"


def test_an_unfinished_character_is_returned_at_the_end() -> None:
    *token_ids, _ = byte_tokens(BYTES, "a日")
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_are_shown_on_request() -> None:
    token_ids = tokens("a" + END_OF_TURN + "b")
    assert "".join(pieces(BYTES, token_ids, skip=True)) == "ab"
    assert "".join(pieces(BYTES, token_ids, skip=False)) == "a" + END_OF_TURN + "b"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.push(3) == detokenizer.finish() == ""


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    """The decoded window does not grow."""
    lengths = []
    tokenizer: Any = copy(BYTES)

    def decode(token_ids: list[int], **options: Any) -> Any:
        lengths.append(len(token_ids))
        return BYTES.decode(token_ids, **options)

    tokenizer.decode = decode
    pieces(tokenizer, tokens("the other 日本語 👍🏽 there, " * 30), skip=True)
    assert 0 < max(lengths) < 12


# Ends


def answer(
    token_ids: list[int],
    tokenizer: PreTrainedTokenizerBase | None = BYTES,
    *,
    eos: frozenset[int] = frozenset(),
    limit: int = NO_LIMIT,
    **options: Any,
) -> tuple[OutputText, str | None, list[str]]:
    """Push ids until the answer ends; return its text, the finish reason, and each shown text."""
    params = SamplingParams(**{"max_tokens": None, **options})
    text = OutputText(Detokenizer(tokenizer, params.skip_special_tokens), params, eos, limit)
    shown = []
    reason = None
    for count, token_id in enumerate(token_ids, 1):
        reason = text.push(token_id, count)
        shown.append(text.text)
        if reason is not None:
            break
    return text, reason, shown


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Search letter by letter; of two stop strings that end together, use the first in the list."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


@given(text=LETTERS, stops=STOPS, include=st.booleans())
def test_an_answer_of_letters_ends_at_its_first_stop_string(
    text: str, stops: list[str], include: bool
) -> None:
    """With a token for every byte, only one stop string is completed at a time."""
    token_ids = byte_tokens(BYTES, text)
    result, reason, shown = answer(token_ids, stop=stops, include_stop_str_in_output=include)
    expected = first_stop(text, stops)
    if expected is None:
        assert (reason, result.stop_reason) == (None, None)
    else:
        position, stop = expected
        complete = [s for s in stops if text[: position + len(stop)].endswith(s)]
        assert reason == "stop"
        assert result.stop_reason in complete
        assert isinstance(result.stop_reason, str)
        end = position + len(stop)
        assert result.text == text[: end if include else end - len(result.stop_reason)]
    assert_only_grows(shown, text)


def assert_only_grows(shown: list[str], text: str) -> None:
    """Assert that each text extends the previous text and begins the answer."""
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
    assert not shown or text.startswith(shown[-1])


@given(texts=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_stop_strings_are_found_across_tokens(
    texts: list[str], stops: list[str], include: bool
) -> None:
    """No stop string is in the text or missed, and shown text is never removed."""
    token_ids = [token_id for text in texts for token_id in tokens(text)]
    text = "".join(texts)
    result, reason, shown = answer(token_ids, stop=stops, include_stop_str_in_output=include)
    assert (reason == "stop") == any(stop in text for stop in stops)
    if reason == "stop":
        assert isinstance(result.stop_reason, str)
        whole = result.text if include else result.text + result.stop_reason
        assert text.startswith(whole) and whole.endswith(result.stop_reason)
        before = whole.removesuffix(result.stop_reason)
        assert not any(stop in before for stop in stops)
    assert_only_grows(shown, text)


@given(text=LETTERS, stops=STOPS)
def test_only_a_possible_start_of_a_stop_string_is_withheld(text: str, stops: list[str]) -> None:
    """The text shown ends just before the longest tail that begins a stop string."""
    token_ids = tokens(text)
    _, _, shown = answer(token_ids, stop=stops)
    for count, out in enumerate(shown, 1):
        so_far = decode(BYTES, token_ids[:count])
        if any(stop in so_far for stop in stops) or so_far.endswith("\ufffd"):
            break
        tails = [so_far[i:] for i in range(len(so_far) + 1)]
        held = next(tail for tail in tails if any(stop.startswith(tail) for stop in stops))
        assert out == so_far.removesuffix(held)


def test_withheld_text_is_returned_at_the_end() -> None:
    text, reason, shown = answer(byte_tokens(BYTES, "abcab"), stop="abd", max_tokens=5)
    assert shown == ["", "", "abc", "abc", "abcab"]
    assert (reason, text.stop_reason) == ("length", None)


def test_the_stop_string_that_begins_first_counts() -> None:
    """One token completes both stop strings."""
    [token_id] = tokens("the")
    text, _, _ = answer([token_id], stop=["he", "th"])
    assert (text.text, text.stop_reason) == ("", "th")


def test_the_eos_token_is_not_part_of_the_text() -> None:
    [end] = tokens(END_OF_TURN)
    text, reason, _ = answer([*tokens("hello"), end, *tokens("more")], eos=frozenset([end]))
    assert (text.text, reason, text.stop_reason) == ("hello", "stop", None)
    text, reason, _ = answer(
        [*tokens("hello"), end], eos=frozenset([end]), skip_special_tokens=False
    )
    assert (text.text, reason) == ("hello", "stop")


def test_the_eos_token_may_be_ignored() -> None:
    [end] = tokens(END_OF_TURN)
    text, reason, _ = answer(
        [*tokens("a"), end, *tokens("b")], eos=frozenset([end]), ignore_eos=True
    )
    assert (text.text, reason) == ("ab", None)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_id_ends_the_answer(include: bool, text: str) -> None:
    [last] = tokens("b")
    result, reason, _ = answer(
        byte_tokens(BYTES, "abc"),
        stop_token_ids=[last],
        include_stop_str_in_output=include,
    )
    assert (result.text, reason, result.stop_reason) == (text, "stop", last)


def test_a_stop_id_counts_with_ignore_eos() -> None:
    """vLLM's `ignore_eos` applies only to the end-of-text tokens of the model."""
    [end] = tokens(END_OF_TURN)
    text, reason, _ = answer([end], eos=frozenset([end]), ignore_eos=True, stop_token_ids=[end])
    assert (reason, text.stop_reason) == ("stop", end)


def test_withheld_text_is_returned_at_the_eos_token() -> None:
    [end] = tokens(END_OF_TURN)
    text, _, _ = answer([*byte_tokens(BYTES, "ab"), end], eos=frozenset([end]), stop="bc")
    assert text.text == "ab"


@pytest.mark.parametrize(
    ("options", "length"),
    [({"max_tokens": 3}, 3), ({"limit": 4}, 4), ({"max_tokens": 3, "limit": 2}, 2)],
)
def test_an_answer_has_at_most_max_tokens(options: dict[str, Any], length: int) -> None:
    text, reason, _ = answer(byte_tokens(BYTES, "abcdef"), **options)
    assert (text.text, reason) == ("abcdef"[:length], "length")


def test_a_stop_in_the_last_token_is_a_stop() -> None:
    """The finish reason is not "length", because the answer is complete."""
    [end] = tokens(END_OF_TURN)
    _, reason, _ = answer([*tokens("a"), end], eos=frozenset([end]), max_tokens=2)
    assert reason == "stop"
    _, reason, _ = answer(byte_tokens(BYTES, "ab"), stop="b", max_tokens=2)
    assert reason == "stop"


def test_an_unfinished_character_is_shown_when_the_answer_ends() -> None:
    text, reason, shown = answer(byte_tokens(BYTES, "a日"), max_tokens=3)
    assert (text.text, reason) == ("a\ufffd", "length")
    assert shown == ["a", "a", "a\ufffd"]
    [end] = tokens(END_OF_TURN)
    token_ids = [*byte_tokens(BYTES, "a日")[:-1], end]
    text, reason, shown = answer(token_ids, eos=frozenset([end]))
    assert (text.text, reason) == ("a\ufffd", "stop")


def test_nothing_ends_an_answer_before_min_tokens() -> None:
    [stop] = tokens("a")
    token_ids = byte_tokens(BYTES, "aaaa")
    _, reason, shown = answer(token_ids, stop_token_ids=[stop], min_tokens=3)
    assert (reason, len(shown)) == ("stop", 3)
    _, reason, shown = answer(token_ids, eos=frozenset([stop]), min_tokens=3)
    assert (reason, len(shown)) == ("stop", 3)
    text, reason, shown = answer(token_ids, stop="a", min_tokens=3)
    assert (reason, len(shown), text.text) == ("stop", 3, "aa")


def test_stop_ids_work_without_a_tokenizer() -> None:
    text, reason, _ = answer([5, 6, 7], tokenizer=None, stop_token_ids=[6])
    assert (text.text, reason, text.stop_reason) == ("", "stop", 6)
