"""Prompts and options of any type: an answer, or an error with the reason."""

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import LLM, LoRARequest, SamplingParams
from headstart.engine.adapter_names import choose_adapters
from headstart.errors import AdapterError, ConfigError, HeadstartError, RequestError
from headstart.frontend.text import TextLimit
from headstart.validation import describe
from tests.tiny_models import save_tiny
from tests.tiny_tokenizers import TINY_TOKENIZERS
from tests.tiny_vision import IDS, save_tiny_vision

PARAMS = SamplingParams(max_tokens=2)
LONE = "\ud800"


def name_of(value: object) -> str:
    """Return a test's name for a value, the same in every process."""
    return re.sub(r" at 0x\w+", "", describe(value))[:40]


class Color(IntEnum):
    RED = 5


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("text"))
    TINY_TOKENIZERS["byte_level"]().save_pretrained(folder)
    llm = LLM(folder, num_blocks=20)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def vision_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(save_tiny_vision("llava", tmp_path_factory.mktemp("vision")), num_blocks=80)
    yield llm
    llm.close()


@pytest.fixture(scope="module", params=["text", "vision"])
def llm(request: pytest.FixtureRequest) -> LLM:
    llm: LLM = request.getfixturevalue(f"{request.param}_llm")
    return llm


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "a NoneType; allowed"),
        (7, "a int; allowed"),
        (2.5, "a float; allowed"),
        (b"ab", "a bytes; allowed"),
        (bytearray(b"ab"), "a bytearray; allowed"),
        ({1, 2}, "a set; allowed"),
        (object(), "a object; allowed"),
        ([], "empty"),
        ({}, "the keys \\[\\]"),
        ({"text": "a"}, "the keys \\['text'\\]"),
        ({"prompt": "a", 3: "b"}, "'prompt', 3"),
        ({"prompt": None}, "the prompt is None; allowed: a string"),
        ({"prompt_token_ids": None}, "the prompt is None; allowed: a string"),
        ({"prompt": ["a", "b"]}, "\\['a', 'b'\\], a list; allowed: a string"),
        ({"prompt": [5, 6]}, "\\[5, 6\\], a list; allowed: a string, or token ids under"),
        ({"prompt": 7, "prompt_token_ids": [5, 6]}, "the prompt is 7, a int"),
        ({"prompt": b"a"}, "a bytes; allowed: a string"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is 5, a int; allowed: a list of integers"),
        ({"prompt_token_ids": "ab"}, "'ab', a str; allowed: a list of integers"),
        ({"prompt_token_ids": b"ab"}, "a bytes; allowed: a list of integers"),
        ({"prompt_token_ids": {"a": 1}}, "a dict; allowed: a list of integers"),
        ({"prompt_token_ids": {5}}, "a set; allowed: a list of integers"),
        ({"prompt_token_ids": ["a"]}, "token id 'a' is not an integer"),
        ([5, True], "token id True is not an integer from 0 to"),
        ([5, 6.0], "token id 6.0 is not an integer from 0 to"),
        ([5, None], "token id None"),
        ([5, [6]], "token id \\[6\\]"),
        ([5, -1], "token id -1 is not an integer from 0 to"),
        ([10**5000, 5], "token id an integer of 16610 bits is not"),
        (range(2**70), "tokens; allowed: "),
        (range(10**15), "1000000000000000 tokens; allowed: "),
        (np.array([5.0]), "a ndarray; allowed"),
        (np.array([True]), "a ndarray; allowed"),
        (np.array([[5]]), "a ndarray; allowed"),
        (np.array([5, 2**40]), "token id 1099511627776"),
        ([np.bool_(True)], "token id .*True"),
        (torch.tensor([5.0]), "a Tensor; allowed"),
        (torch.tensor([True]), "a Tensor; allowed"),
        (torch.tensor(5), "a Tensor; allowed"),
        (f"a{LONE}b", "lone surrogate U\\+D800 at character 1"),
        ({"prompt": LONE}, "lone surrogate"),
        ({"prompt": LONE, "prompt_token_ids": [5]}, "lone surrogate"),
        ({"prompt": "a", "multi_modal_data": 3}, "multi_modal_data is 3; allowed"),
        ({"prompt": "a", "multi_modal_data": {"image": None}}, "None as its image"),
        ({"prompt": "a", "multi_modal_uuids": {"image": ["x"]}}, "uuids without images"),
    ],
    ids=lambda value: None if isinstance(value, str) else name_of(value),
)
def test_a_prompt_of_a_wrong_type_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    """Earlier, a prompt of None was the text "None", and a list of texts its repr."""
    with pytest.raises(RequestError, match=message):
        llm.frontend.prepare(prompt, PARAMS)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "token_ids",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        [np.int64(5), np.uint8(6)],
        [Color.RED, 6],
        np.array([5, 6]),
        np.array([5, 6], dtype=np.uint16),
        torch.tensor([5, 6]),
        torch.tensor([5, 6], dtype=torch.int32),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_integers_of_any_kind_are_token_ids(llm: LLM, token_ids: Any) -> None:
    for prompt in (token_ids, {"prompt_token_ids": token_ids}, {"prompt": None} | ask(token_ids)):
        group = llm.frontend.prepare(prompt, PARAMS)
        assert group.prompt_token_ids == [5, 6]
        assert all(type(token_id) is int for token_id in group.prompt_token_ids)
        assert group.prompt is None
    group = llm.frontend.prepare({"prompt": "a text", **ask(token_ids)}, PARAMS)
    assert (group.prompt, group.prompt_token_ids) == ("a text", [5, 6])


def ask(token_ids: Any) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids}


@pytest.mark.parametrize("field", ["request_id", "salt", "adapter"])
@pytest.mark.parametrize("value", ["", LONE, f"a{LONE}", 3, True, b"a", ["a"], {}, 2.5, object()])
def test_names_are_nonempty_text(llm: LLM, field: str, value: Any) -> None:
    """Earlier, a salt with a lone surrogate was accepted, and events of its blocks failed."""
    with pytest.raises(RequestError, match=field):
        llm.frontend.prepare([5], PARAMS, **{field: value})
    with pytest.raises(RequestError, match=field):
        llm.chats.prepare([{"role": "user", "content": "a"}], PARAMS, **{field: value})


@pytest.mark.parametrize("priority", ["a", True, 1.5, 2**63, [1], None])
def test_a_priority_is_an_integer(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match=r"priority is .*; allowed"):
        llm.frontend.prepare([5], PARAMS, priority=priority)


def test_a_prompt_may_have_a_salt(llm: LLM) -> None:
    group = llm.frontend.prepare({"prompt_token_ids": [5], "cache_salt": "a"}, PARAMS)
    assert group.namespace.salt == "a"
    with pytest.raises(RequestError, match="cache_salt is 'a' in the prompt and 'b' in the call"):
        llm.frontend.prepare({"prompt_token_ids": [5], "cache_salt": "a"}, PARAMS, salt="b")
    with pytest.raises(RequestError, match="cache_salt"):
        llm.frontend.prepare({"prompt_token_ids": [5], "cache_salt": 3}, PARAMS)


@pytest.mark.parametrize("params", [None, {}, {"max_tokens": 3}, SamplingParams, [PARAMS]])
def test_sampling_parameters_are_of_their_class(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="allowed: a SamplingParams"):
        llm.frontend.prepare([5], params)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 50)
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.just(LONE)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(["prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids"])
MAPPINGS = st.dictionaries(KEYS, JSON | st.fixed_dictionaries({"image": JSON}), min_size=1)


@settings(max_examples=100)
@given(prompt=JSON | MAPPINGS | st.lists(st.integers(0, 60)), name=JSON, salt=st.none() | JSON)
def test_any_prompt_is_accepted_or_refused(llm: LLM, prompt: Any, name: Any, salt: Any) -> None:
    try:
        group = llm.frontend.prepare(prompt, PARAMS, request_id=name, salt=salt)
    except HeadstartError as error:
        str(error).encode()
    else:
        assert all(type(token_id) is int for token_id in group.prompt_token_ids)
        assert group.prompt is None or isinstance(group.prompt, str)


PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image", "image_url", "audio"]) | JSON},
        optional={"text": JSON, "image": JSON, "image_url": JSON, "uuid": JSON},
    )
    | JSON,
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant"]) | JSON,
            "content": PARTS | JSON | st.text(),
        },
        optional={"name": JSON, "tool_calls": JSON},
    )
    | JSON,
    max_size=3,
)


@settings(max_examples=100)
@given(messages=MESSAGES | JSON)
def test_any_conversation_is_accepted_or_refused(llm: LLM, messages: Any) -> None:
    try:
        llm.stream_chat(messages, PARAMS)
    except HeadstartError as error:
        str(error).encode()


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "a NoneType; allowed"),
        (3, "a int; allowed"),
        (bytearray(b"ab"), "a bytearray; allowed"),
        (iter([]), "a list_iterator; allowed"),
        ([None], "message 0 is a NoneType"),
        ([{"role": LONE, "content": "a"}], "the role of message 0 has the lone surrogate"),
        ([{"role": "user", "content": LONE}], "message 0 has the lone surrogate U\\+D800"),
        ([{"role": "user", "content": [{"type": "text", "text": LONE}]}], "lone surrogate"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "a"}]}], "type 'dict'"),
        ([{"role": "user", "content": nested(5000)}], "message 0 has a part of type 'list'"),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "a dict as its content"),
        ([{"role": "user", "content": [None]}], "type 'NoneType'"),
    ],
    ids=lambda value: None if isinstance(value, str) else name_of(value),
)
def test_a_conversation_of_a_wrong_shape_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.stream_chat(messages, PARAMS)


def test_only_images_may_contain_image_markers(vision_llm: LLM) -> None:
    """The role of a message has the code points that mark an image in a rendered text."""
    for role in ("\ufdd0ab 2x2\ufdd1", "\ufdd0", "\ufdd1"):
        with pytest.raises(RequestError, match="U\\+FDD0 or U\\+FDD1"):
            vision_llm.stream_chat([{"role": role, "content": "a"}], PARAMS)


# Length


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    text_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = text_llm.get_tokenizer()
    assert tokenizer is not None
    limit = TextLimit(tokenizer, text_llm.engine.max_model_len).max_bytes
    encode = tokenizer.encode

    def encode_short(text: str, **options: Any) -> Any:
        assert len(text) < 100, "a long text is tokenized"
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode_short)
    for text in ("x" * (limit + 1), "é" * (limit // 2 + 1)):
        conversation = [{"role": "user", "content": text}]
        for prepare, prompt in (
            (text_llm.frontend.prepare, text),
            (text_llm.frontend.prepare, {"prompt": text}),
            (text_llm.stream_chat, conversation),
        ):
            with pytest.raises(RequestError, match=f"bytes of text; allowed: {limit:,} at most"):
                prepare(prompt, PARAMS)  # type: ignore[arg-type]


def test_more_messages_than_tokens_are_refused(text_llm: LLM) -> None:
    longest = text_llm.engine.max_model_len
    message = {"role": "user", "content": ""}
    with pytest.raises(RequestError, match=f"{longest + 1:,} messages; allowed: {longest:,} at mo"):
        text_llm.stream_chat([message] * (longest + 1), PARAMS)


@pytest.mark.parametrize("name", TINY_TOKENIZERS)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("the other ﬁ①  "))
    | st.lists(st.sampled_from(["the other ", "    ", "<|im_start|>", "weather"])).map("".join)
)
def test_no_text_that_fits_is_refused(name: str, text: str) -> None:
    """A model accepts every text that has no more tokens than its context."""
    tokenizer = TINY_TOKENIZERS[name]()
    count = len(tokenizer.encode(text, add_special_tokens=False))
    TextLimit(tokenizer, max(count, 1)).check("the prompt", text)


# Adapters and sampling


@pytest.mark.parametrize(
    "options",
    [
        {"lora_name": None, "lora_path": "a"},
        {"lora_name": "", "lora_path": "a"},
        {"lora_name": 3, "lora_path": "a"},
        {"lora_name": LONE, "lora_path": "a"},
        {"lora_name": ["a"], "lora_path": "a"},
        {"lora_name": "a", "lora_path": None},
        {"lora_name": "a", "lora_path": 3},
        {"lora_name": "a", "lora_path": ""},
    ],
)
def test_a_lora_request_has_a_name_and_a_path(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"lora_name|lora_path"):
        LoRARequest(lora_int_id=1, **options)


@pytest.mark.parametrize("choice", [3, [3], b"a", [b"a"], {"a": 1}, [["a"]], 2.5])
def test_an_invalid_adapter_choice_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError):
        choose_adapters(choice, None, 1)


@pytest.mark.parametrize("path", [3, None, LONE, "/x" * 4000, "~no-user-has-this-name/a", "a\0b"])
def test_an_adapter_in_no_folder_is_refused(text_llm: LLM, path: Any) -> None:
    with pytest.raises(AdapterError) as caught:
        text_llm.load_adapter("a", path)
    str(caught.value).encode()


@pytest.mark.parametrize("name", ["", LONE, 3, None, ["a"]])
def test_an_adapter_without_a_name_is_refused(text_llm: LLM, name: Any) -> None:
    with pytest.raises(ConfigError, match="name"):
        text_llm.load_adapter(name, "a")


@given(st.dictionaries(st.sampled_from(list(SamplingParams.__dataclass_fields__)), JSON))
def test_any_sampling_parameters_are_accepted_or_refused(options: dict[str, Any]) -> None:
    try:
        SamplingParams(**options)
    except RequestError as error:
        str(error).encode()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 10**400),
        ("repetition_penalty", 10**400),
        ("seed", 10**5000),
        ("seed", -(2**65)),
        ("n", 10**5000),
        ("top_p", -(10**5000)),
        ("stop", LONE),
        ("stop", ["a", LONE]),
        ("stop_token_ids", [-(10**5000)]),
        ("ignore_eos", 10**5000),
    ],
    ids=name_of,
)
def test_integers_without_bounds_and_half_characters_are_refused(option: str, value: Any) -> None:
    """Python does not format integers of more than 4,300 digits, so the error message failed."""
    with pytest.raises(RequestError, match=option):
        SamplingParams(**{option: value})


def test_a_placeholder_is_found_in_arrays_of_token_ids(vision_llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 placeholders"):
        vision_llm.frontend.prepare(np.array([IDS["<image>"]]), PARAMS)  # type: ignore[arg-type]


@pytest.mark.parametrize("lora_int_id", [0, -1, None, True, "1", 1.0])
def test_the_id_of_an_adapter_is_a_whole_number_from_1(lora_int_id: Any) -> None:
    """The id must be a positive integer, as in vLLM."""
    with pytest.raises(RequestError, match=r"lora_int_id is .*; allowed: a whole number"):
        LoRARequest("a", lora_int_id, "b")
