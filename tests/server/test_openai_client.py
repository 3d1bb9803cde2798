"""OpenAI's client against the server, over a socket."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headstart import LLM, SamplingParams
from headstart.cli.server import FIRST_QUESTION
from tests.clients import openai
from tests.engine.tiny_llm import draft_always
from tests.server.running import Running, running

PEOPLE = "Anna is 31 years old. Ben is 45 years old. Carl is 60 years old.\n" * 4


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Iterator[LLM]:
    llm = LLM("headstart-tiny", dtype="float32", num_blocks=256)
    yield llm
    llm.close()


MESSAGES = [{"role": "user", "content": PEOPLE + "What is the age of Ben?"}]


def test_an_answer_matches_the_engine(client: openai.OpenAI, expected: LLM) -> None:
    [oracle] = expected.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0))  # type: ignore[arg-type]
    for cached in (False, True):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_completion_tokens=24,
            temperature=0,
        )
        assert answer.choices[0].message.content == oracle.outputs[0].text
        assert answer.choices[0].finish_reason == oracle.outputs[0].finish_reason
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens == len(oracle.prompt_token_ids)
        assert usage.completion_tokens == len(oracle.outputs[0].token_ids)
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.rejected_prediction_tokens is not None
        if cached:
            assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_stream_matches_the_whole_answer(client: openai.OpenAI, expected: LLM) -> None:
    [oracle] = expected.chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0))  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == oracle.outputs[0].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(oracle.outputs[0].token_ids)


def test_a_prediction_is_drafted_and_counted() -> None:
    """A predicted output leaves the answer unchanged, and the usage counts its tokens."""
    options = {"max_tokens": 60, "temperature": 0, "model": "tiny", "messages": MESSAGES}
    with (
        running(speculation=15, enable_prefix_caching=False) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        draft_always(server.llm)
        plain = client.chat.completions.create(**options)
        text = plain.choices[0].message.content
        for content in (
            text,
            [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}],
        ):
            options["prediction"] = {"type": "content", "content": content}
            answer = client.chat.completions.create(**options)
            assert answer.choices[0].message.content == text
            assert answer.usage.completion_tokens == plain.usage.completion_tokens
            details = answer.usage.completion_tokens_details
            assert details.accepted_prediction_tokens >= plain.usage.completion_tokens - 4
        stream = client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert len(chunks) < plain.usage.completion_tokens
        assert last.usage.completion_tokens_details == details
        options["prediction"]["content"] = "Nothing of this is in the answer."
        answer = client.chat.completions.create(**options)
        assert answer.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        assert details.rejected_prediction_tokens > 0
        with pytest.raises(openai.BadRequestError, match=r"prediction\.type"):
            client.chat.completions.create(**options | {"prediction": {"type": "x", "content": ""}})


def test_several_answers_of_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["one two three", "four five six"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=3, temperature=1, seed=5, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(prompts[choice.index // 2]) for choice in answer.choices)
    stream = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=3, temperature=1, seed=5, echo=True,
        stream=True,
    )  # fmt: skip
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_several_prompts_are_added(server: Running, stream: bool) -> None:
    prompts = [[place + 80 * stream] * 40 for place in (71, 72, 73)]  # two full blocks each
    body = {"prompt": prompts, "max_tokens": 1, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    usages = []
    for batch in (prompts[:2], prompts):
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body | {"prompt": batch}, timeout=60).text
        usages.append(json.loads(answer.split("data: ")[-2] if stream else answer)["usage"])
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 2 * 39], "the last token is computed"
    assert [usage["prompt_tokens"] for usage in usages] == [80, 120]


def test_log_probabilities(client: openai.OpenAI, expected: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2)
    [oracle] = expected.chat(MESSAGES, params)  # type: ignore[arg-type]
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert oracle.outputs[0].logprobs is not None
    for token, wanted in zip(logprobs.content, oracle.outputs[0].logprobs, strict=True):
        assert token.logprob == pytest.approx(next(iter(wanted.values())).logprob, abs=1e-4)
        assert len(token.top_logprobs) == 2


def test_token_ids_are_echoed_and_a_prompt_can_be_scored(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model="tiny", prompt="one two three", echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    usage, logprobs = text.usage, text.choices[0].logprobs
    assert usage is not None and logprobs is not None and logprobs.tokens is not None
    assert usage.completion_tokens == 0 and len(logprobs.tokens) == usage.prompt_tokens
    assert text.choices[0].text == "one two three"
    ids = httpx.post(
        str(client.base_url) + "../tokenize", json={"model": "tiny", "prompt": "one two three"}
    )
    if ids.status_code == 200:
        again = client.completions.create(
            model="tiny",
            prompt=ids.json()["tokens"],
            echo=True,
            logprobs=1,
            max_tokens=0,
            temperature=0,
        )
        assert again.choices[0].text.strip() == "one two three"
        assert again.choices[0].logprobs == logprobs


def test_a_stream_has_all_log_probabilities_of_a_long_prompt() -> None:
    """Regression: an answer that hit the prompt was sent before another had computed all of it."""
    body: dict[str, Any] = {"prompt": [3, 4, 5, 6] * 30, "n": 2, "echo": True, "logprobs": 1}
    body |= {"model": "tiny", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    tokens: dict[int, list[str]] = {0: [], 1: []}
    with running(max_num_batched_tokens=32, max_num_seqs=4) as server:
        url = f"{server.url}/v1/completions"
        whole = httpx.post(url, json=body, timeout=60).json()["choices"]
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert tokens == {choice["index"]: choice["logprobs"]["tokens"] for choice in whole}
    assert len(tokens[0]) == len(tokens[1]) == 122


def test_all_tokens_of_a_stream_are_counted(client: openai.OpenAI, server: Running) -> None:
    def generated() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        return float(re.findall(r"vllm:generation_tokens_total{.*} (.*)", text)[0])

    before = generated()
    stream = client.completions.create(
        model="tiny", prompt="one two", max_tokens=7, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in stream:
        pass
    assert generated() == before + 7


def test_an_answer_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
    )
    text = answer.choices[0].message.content
    assert text is not None and 0 <= json.loads(text)["age"] <= 99


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "gpt"}, 404, "'gpt' does not exist"),
        ({"messages": []}, 400, "messages are empty"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "message 0"),
        ({"temperature": -1}, 400, "temperature is -1"),
        ({"max_tokens": 0}, 400, "max_tokens is 0"),
        ({"n": 10**30}, 400, "n is 1"),
        ({"top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
        ({"extra_body": {"frobnicate": 1}}, 400, "frobnicate"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "the prompt has"),
    ],
)
def test_bad_input_is_refused_with_openais_errors(
    client: openai.OpenAI, server: Running, change: dict[str, object], status: int, says: str
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4} | change
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert says in caught.value.message
    assert caught.value.request_id
    blocks, free = server.pool()
    assert free == blocks


def test_a_disconnected_client_ends_its_request(client: openai.OpenAI, server: Running) -> None:
    was_aborted = threading.Event()
    engine_abort = server.llm.engine.abort

    def abort(request_id: str) -> object:
        was_aborted.set()
        return engine_abort(request_id)

    server.llm.engine.abort = abort  # type: ignore[method-assign]
    try:
        stream = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
        assert was_aborted.wait(30)
    finally:
        server.llm.engine.abort = engine_abort  # type: ignore[method-assign]
    blocks, free = server.pool()
    assert free == blocks


def test_a_first_question_is_answered_in_bfloat16() -> None:
    """Regression: in bfloat16, a question with first names was answered "not in the document"."""
    llm = LLM("headstart-tiny", dtype="bfloat16", num_blocks=64)
    try:
        params = SamplingParams(max_tokens=16, temperature=0)
        [output] = llm.chat([{"role": "user", "content": FIRST_QUESTION}], params)
        assert output.outputs[0].text == "The age of Ben Jones is 45"
    finally:
        llm.close()


def test_a_first_question_has_a_sensible_answer(client: openai.OpenAI) -> None:
    """Without sampling options, the example of `headstart serve` is answered greedily."""
    turns: Any = [{"role": "user", "content": FIRST_QUESTION}]

    def ask(**more: Any) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=turns, **more)
        return answer.choices[0].message.content

    assert ask() == ask() == "The age of Ben Jones is 45"
    drawn = {ask(temperature=2.0, max_tokens=16, seed=seed) for seed in range(3)}
    assert len(drawn) > 1
