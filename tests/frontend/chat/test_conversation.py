"""Chats to token ids: replies keep their sampled ids, and the ids decode to the text."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from headstart.cache import Namespace
from headstart.frontend.chat.conversation import ConversationMemory
from tests.tiny_tokenizers import CHATML, END_OF_TURN, TINY_TOKENIZERS, byte_tokens

TOKENIZERS = {name: make() for name, make in TINY_TOKENIZERS.items()}
BYTES = TOKENIZERS["byte_level"]
TEXTS = st.text(
    st.sampled_from("theo wr, \n日本👍é🏽\u200d👩") | st.characters(exclude_categories=["C"])
)
MESSAGES = [{"role": "user", "content": "hello there"}]


def tokens(text: str, tokenizer: PreTrainedTokenizerBase = BYTES) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def letters(text: str) -> list[int]:
    """Return the ids of the single letters of a string, which a model may sample."""
    return [token_id for letter in text for token_id in tokens(letter)]


def spell(token_ids: list[int], tokenizer: PreTrainedTokenizerBase = BYTES) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert isinstance(text, str)
    return text


class Turn(NamedTuple):
    """The arguments of `ConversationMemory.remember`."""

    prompt: str
    prompt_token_ids: list[int]
    reply: str
    reply_token_ids: list[int]


def turn(memory: ConversationMemory, messages: list[dict[str, Any]], *reply: Any) -> Turn:
    """Return a finished turn. reply: its text and its ids."""
    prompt = memory.render(messages)
    return Turn(prompt, memory.encode(prompt), *reply)


def next_prompt(memory: ConversationMemory, messages: list[dict[str, Any]], reply: str) -> str:
    answer = {"role": "assistant", "content": reply}
    return memory.render([*messages, answer, {"role": "user", "content": "and then?"}])


def test_an_empty_memory_gives_the_tokenizers_ids() -> None:
    memory = ConversationMemory(BYTES)
    prompt = memory.render(MESSAGES)
    assert memory.encode(prompt) == tokens(prompt)
    assert memory.encode("") == []


def test_a_reply_keeps_its_sampled_ids() -> None:
    memory = ConversationMemory(BYTES)
    sampled = letters("the other weather")
    assert sampled != tokens("the other weather")
    first = turn(memory, MESSAGES, "the other weather", sampled)
    memory.remember(*first)
    prompt = next_prompt(memory, MESSAGES, "the other weather")
    token_ids = memory.encode(prompt)
    expected = [*first.prompt_token_ids, *sampled]
    assert token_ids[: len(expected)] == expected
    assert spell(token_ids) == prompt


@pytest.mark.parametrize("name", ["metaspace", "prepended"])
def test_a_reply_that_begins_with_a_space_keeps_its_ids(name: str) -> None:
    """The text of the reply has the space or, as in other engines, does not have it."""
    tokenizer = TOKENIZERS[name]
    memory = ConversationMemory(tokenizer)
    sampled = tokenizer.convert_tokens_to_ids(["▁the", "▁t", "o", "g", "e", "t", "h", "e", "r"])
    for shown in (" the together", "the together"):
        memory.clear()
        finished = turn(memory, MESSAGES, shown, sampled)
        memory.remember(*finished)
        following = memory.encode(next_prompt(memory, MESSAGES, " the together"))
        assert following[: len(finished.prompt_token_ids) + 9] == [
            *finished.prompt_token_ids,
            *sampled,
        ]


def test_later_turns_keep_the_ids_of_all_replies() -> None:
    memory = ConversationMemory(BYTES)
    messages = list(MESSAGES)
    for reply in ("the weather", "then the other", "hello"):
        finished = turn(memory, messages, reply, [*letters(reply), *tokens(END_OF_TURN)])
        memory.remember(*finished)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "so"}]
        prompt = memory.render(messages)
        token_ids = memory.encode(prompt)
        expected = [*finished.prompt_token_ids, *finished.reply_token_ids]
        assert token_ids[: len(expected)] == expected
        assert spell(token_ids) == prompt


def test_a_reply_without_text_changes_no_prompt() -> None:
    """Ids beyond the tokenizer's vocabulary once became part of the next prompt."""
    memory = ConversationMemory(BYTES)
    prompt = letters("user: hello")
    memory.remember("user: hello", prompt, "", [100_000, 100_001])
    assert memory.encode("user: hello") == prompt


def test_the_templates_end_of_turn_is_not_repeated() -> None:
    """The last token of a reply is the end-of-turn token, which its text does not show."""
    memory = ConversationMemory(BYTES)
    end = tokens(END_OF_TURN)
    memory.remember(*turn(memory, MESSAGES, "hello", [*letters("hello"), *end]))
    prompt = next_prompt(memory, MESSAGES, "hello")
    token_ids = memory.encode(prompt)
    assert spell(token_ids) == prompt
    assert token_ids.count(end[0]) == prompt.count(END_OF_TURN) == 3


def test_special_tokens_shown_in_a_reply_are_stored() -> None:
    """With `skip_special_tokens=False`, the reply's special tokens come before the template's."""
    memory = ConversationMemory(BYTES)
    sampled = [*letters("hello"), *tokens(END_OF_TURN)]
    finished = turn(memory, MESSAGES, "hello" + END_OF_TURN, sampled)
    memory.remember(*finished)
    prompt = next_prompt(memory, MESSAGES, "hello" + END_OF_TURN)
    token_ids = memory.encode(prompt)
    assert token_ids[: len(finished.prompt_token_ids) + 6] == [*finished.prompt_token_ids, *sampled]
    assert spell(token_ids) == prompt


@pytest.mark.parametrize(
    ("shown", "sampled", "num_kept"),
    [
        ("the end", "the end of", 7),
        ("hello", "hello\nuser: ", 5),
        ("", "the end", 0),
        ("the 日", "the 日本", 7),
    ],
)
def test_ids_after_a_stop_string_are_dropped(shown: str, sampled: str, num_kept: int) -> None:
    memory = ConversationMemory(BYTES)
    finished = turn(memory, MESSAGES, shown, byte_tokens(BYTES, sampled))
    memory.remember(*finished)
    prompt = next_prompt(memory, MESSAGES, shown)
    token_ids = memory.encode(prompt)
    expected = [*finished.prompt_token_ids, *finished.reply_token_ids[:num_kept]]
    assert token_ids[: len(expected)] == expected
    assert spell(token_ids) == prompt


def test_an_unfinished_character_is_dropped() -> None:
    """A reply that `max_tokens` ends within a character has U+FFFD in its text."""
    memory = ConversationMemory(BYTES)
    sampled = byte_tokens(BYTES, "the 日")[:-1]
    shown = spell(sampled)
    assert shown == "the \ufffd"
    finished = turn(memory, MESSAGES, shown, sampled)
    memory.remember(*finished)
    prompt = next_prompt(memory, MESSAGES, shown)
    token_ids = memory.encode(prompt)
    expected = [*finished.prompt_token_ids, *sampled[:4]]
    assert token_ids[: len(expected)] == expected
    assert token_ids[len(expected)] != sampled[4]
    assert spell(token_ids) == prompt


@pytest.mark.parametrize("reply", ["the other \n\n", "other\t", " ", "the  "])
@pytest.mark.parametrize("trims", [True, False])
def test_white_space_at_the_end_of_a_reply(reply: str, trims: bool) -> None:
    """A template that trims replies matches all but the space; another template matches all."""
    template = CHATML.replace("['content']", "['content'] | trim") if trims else CHATML
    memory = ConversationMemory(TINY_TOKENIZERS["byte_level"](chat_template=template))
    finished = turn(memory, MESSAGES, reply, letters(reply))
    memory.remember(*finished)
    prompt = next_prompt(memory, MESSAGES, reply)
    token_ids = memory.encode(prompt)
    expected = [*finished.prompt_token_ids, *letters(reply.rstrip() if trims else reply)]
    assert token_ids[: len(expected)] == expected
    assert spell(token_ids) == prompt


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
@pytest.mark.parametrize("rest", [" and then", "and then", "\nuser: and", "日本", " "])
def test_a_reply_may_be_followed_by_plain_text(name: str, rest: str) -> None:
    """A template without special tokens writes nothing between the reply and the rest."""
    tokenizer = TOKENIZERS[name]
    memory = ConversationMemory(tokenizer)
    prompt, reply = tokens("user: hello\nyou:", tokenizer), byte_tokens(tokenizer, "other")
    shown = spell([*prompt, *reply], tokenizer)[len("user: hello\nyou:") :]
    memory.remember("user: hello\nyou:", prompt, shown, reply)
    text = "user: hello\nyou:" + shown + rest
    token_ids = memory.encode(text)
    assert token_ids[: len(prompt) + len(reply)] == [*prompt, *reply]
    assert spell(token_ids, tokenizer) == text


def test_bytes_that_break_the_prompts_last_character_are_dropped() -> None:
    """SentencePiece decodes a run of bytes to characters only if all bytes are valid."""
    tokenizer = TOKENIZERS["metaspace"]
    memory = ConversationMemory(tokenizer)
    prompt = tokens("日", tokenizer)
    [stray, *_] = tokens("日", tokenizer)[1:]
    reply = [stray, *tokens("the", tokenizer)]
    memory.remember("日", prompt, spell(reply, tokenizer), reply)
    for text in ("日\ufffd the", "日\ufffd\ufffd\ufffd the", "日 the"):
        assert memory.encode(text)[: len(prompt) + 1] != [*prompt, stray]
        assert spell(memory.encode(text), tokenizer) == text


def test_a_changed_reply_keeps_the_prompts_ids() -> None:
    """If the template or the user changes a reply, the prompt's ids stay the same.

    If all were tokenized again, the prompt's last token would merge with the reply's first, as
    two line feeds are one token.
    """
    memory = ConversationMemory(BYTES)
    finished = turn(memory, MESSAGES, "hello", letters("hello"))
    assert finished.prompt.endswith("assistant\n")
    assert len(tokens("\n\n")) == 1
    memory.remember(*finished)
    prompt = next_prompt(memory, MESSAGES, "\n\nthe other")
    token_ids = memory.encode(prompt)
    assert token_ids[: len(finished.prompt_token_ids)] == finished.prompt_token_ids
    assert tokens(prompt)[: len(finished.prompt_token_ids)] != finished.prompt_token_ids
    assert spell(token_ids) == prompt


def test_the_later_of_two_tokenizations_of_a_reply_is_stored() -> None:
    memory = ConversationMemory(BYTES)
    memory.remember(*turn(memory, MESSAGES, "the other", letters("the other")))
    finished = turn(memory, MESSAGES, "the other", tokens("the other"))
    memory.remember(*finished)
    prompt = next_prompt(memory, MESSAGES, "the other")
    assert memory.encode(prompt) == tokens(prompt)


def test_salts_share_nothing() -> None:
    memory = ConversationMemory(BYTES)
    finished = turn(memory, MESSAGES, "the other", letters("the other"))
    memory.remember(*finished, Namespace(None, "a"))
    prompt = next_prompt(memory, MESSAGES, "the other")
    for stranger in (None, "", "b", "a" + finished.prompt[:1]):
        assert memory.encode(prompt, Namespace(None, stranger)) == tokens(prompt)
    assert memory.encode(prompt, Namespace(None, "a")) != tokens(prompt)


def test_a_salt_and_a_text_are_separated() -> None:
    """Salt "ab" with text "c" differs from salt "a" with text "bc", and from "abc" unsalted."""
    memory = ConversationMemory(BYTES)
    texts = {"ab": "c the other", "a": "bc the other", None: "abc the other", "": "other"}
    for salt, text in texts.items():
        memory.remember(text, letters(text), "", [], Namespace(None, salt))
    for salt in texts:
        for text in texts.values():
            expected = letters(text) if text == texts[salt] else tokens(text)
            assert memory.encode(text, Namespace(None, salt)) == expected


def test_the_least_recently_used_text_is_evicted() -> None:
    memory = ConversationMemory(BYTES, max_texts=2)

    def remember(text: str) -> None:
        memory.remember(text, letters(text), "", [])

    for text in ("the", "other", "the", "weather"):
        remember(text)
    assert len(memory) == 2
    assert memory.encode("other") == tokens("other") != letters("other")
    assert memory.encode("the") == letters("the")  # used: now "weather" is the oldest
    remember("other")
    assert memory.encode("weather") == tokens("weather") != letters("weather")
    assert memory.encode("the") == letters("the")
    assert memory.encode("other") == letters("other")


# Invariants


@given(st.data(), st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), st.integers(1, 8))
def test_the_longest_stored_prefix_is_found(
    data: st.DataObject, turns: list[tuple[str, str]], capacity: int
) -> None:
    """The result equals a linear search of the texts that fit into the memory."""
    memory = ConversationMemory(BYTES, max_texts=capacity)
    expected: dict[str, list[int]] = {}
    for prompt, reply in turns:
        text = prompt + reply
        memory.remember(text, byte_tokens(BYTES, text), "", [])
        expected.pop(text, None)
        expected[text] = byte_tokens(BYTES, text)
    stored = list(expected)[-capacity:]
    assert len(memory) == len(stored)
    wanted = data.draw(st.sampled_from(stored)) + data.draw(TEXTS)
    longest = max((text for text in stored if wanted.startswith(text)), key=len)
    assert memory.encode(wanted) == expected[longest] + tokens(wanted[len(longest) :])


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@given(data=st.data())
def test_ids_decode_to_the_text_with_any_memory(name: str, data: st.DataObject) -> None:
    """Replies may have any ids, end anywhere, and be shown with or without special tokens.

    The tokenizer of Llama 2 decodes extra spaces, which are then the same in both texts.
    """
    tokenizer = TOKENIZERS[name]
    memory = ConversationMemory(tokenizer)
    messages = [{"role": "user", "content": data.draw(TEXTS)}]
    for _ in range(3):
        prompt = memory.render(messages)
        token_ids = memory.encode(prompt)
        anew = spell(tokens(prompt, tokenizer), tokenizer)
        assert spell(token_ids, tokenizer) == anew
        assert name == "prepended" or anew == prompt
        sampled = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
        shown = tokenizer.decode(sampled, skip_special_tokens=data.draw(st.booleans()))
        assert isinstance(shown, str)
        shown = shown[: data.draw(st.integers(0, len(shown)))]
        memory.remember(prompt, token_ids, shown, sampled)
        messages += [
            {"role": "assistant", "content": shown},
            {"role": "user", "content": data.draw(TEXTS)},
        ]


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@given(data=st.data())
def test_a_reply_of_complete_characters_is_stored_completely(
    name: str, data: st.DataObject
) -> None:
    """Replies whose ids differ from the tokenizer's ids for the same text are stored completely."""
    tokenizer = TOKENIZERS[name]
    memory = ConversationMemory(tokenizer)
    prompt = memory.render(MESSAGES)
    plain = TEXTS.filter(lambda text: "<|" not in text)  # the text of a special token is not shown
    pieces = data.draw(st.lists(plain, max_size=6))
    sampled = [token_id for piece in pieces for token_id in tokens(piece, tokenizer)]
    sampled = byte_tokens(tokenizer, "other") + sampled
    shown = tokenizer.decode(sampled, skip_special_tokens=True)
    assert isinstance(shown, str)
    prompt_ids = memory.encode(prompt)
    reply = [*sampled, *tokens(END_OF_TURN, tokenizer)]
    memory.remember(prompt, prompt_ids, shown, reply)
    in_context = spell([*prompt_ids, *sampled], tokenizer)[len(spell(prompt_ids, tokenizer)) :]
    following = memory.encode(prompt + in_context + END_OF_TURN + "\n<|im_start|>user\nso")
    assert following[: len(prompt_ids) + len(sampled)] == [*prompt_ids, *sampled]
