"""Fields of vLLM's requests are supported, have no effect, or are refused with an alternative."""

import ast
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from headstart.server.bodies import Body
from headstart.server.errors import ApiError, as_api_error
from headstart.server.openai.schema import ChatCompletionRequest, CompletionRequest
from tests.house.source import ROOT
from tests.server.running import Running, running

SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "How old is Ben?"}]}
COMPLETION: dict[str, Any] = {"prompt": "Anna is 31. Ben"}
KINDS = {
    "ChatCompletionRequest": (ChatCompletionRequest, CHAT),
    "CompletionRequest": (CompletionRequest, COMPLETION),
}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}}


def refusal(kind: type[Body], body: Mapping[str, Any]) -> ApiError:
    """Return the server's error for a body."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    located = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return as_api_error(RequestValidationError(located))


@pytest.mark.parametrize("part", KINDS)
def test_every_field_of_vllm_is_known(part: str) -> None:
    kind, body = KINDS[part]
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    own = set(SURFACE[part]) - {"model_config", "field_names"}
    assert own <= fields | kind.accepted | kind.refused.keys()
    assert not fields & kind.accepted and fields & kind.refused.keys() <= {"best_of"}
    for name, source in SURFACE[part].items():
        if source not in (None, "...") and name not in (*body, "model_config", "field_names"):
            kind.model_validate({**body, name: ast.literal_eval(source)})


@pytest.mark.parametrize("part", KINDS)
def test_refused_and_ignored_names(part: str) -> None:
    kind, body = KINDS[part]
    for name in kind.accepted:
        assert kind.model_validate({**body, name: {"a": [1]}}) == kind.model_validate(body)
    for name in kind.refused.keys() - kind.model_fields.keys():
        note, allowed = kind.refused[name]
        for value in (None, *allowed):
            assert kind.model_validate({**body, name: value}) == kind.model_validate(body)
        error = refusal(kind, {**body, name: {"a": [1]}})
        assert (error.status, error.param) == (400, name)
        assert str(error).startswith(f"{name} is a list or an object; allowed: null")
        assert str(error).endswith(note)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"min_tokenz": 3}, "min_tokenz", "the request has the unknown field 'min_tokenz'; "
         "the nearest is min_tokens"),
        ({"use_beam_serch": True}, "use_beam_serch", "the request has the unknown field "
         "'use_beam_serch'; use_beam_search is not supported: there is no beam search over HTTP: "
         "sample with `n`, or call `LLM.beam_search` in Python"),
        ({"flurb": 3}, "flurb", "the request has the unknown field 'flurb'"),
        ({"x" * 10**6: 3}, "x" * 297 + "...", "the request has the unknown field"),
        ({"\ud800": 3}, "\\ud800", "the request has the unknown field '\\ud800'"),
        ({"use_beam_search": True}, "use_beam_search", "use_beam_search is true; allowed: null, "
         "false; there is no beam search"),
        ({"stream_options": {"include_usge": 1}}, "stream_options.include_usge",
         "stream_options has the unknown field 'include_usge'; the nearest is include_usage"),
        ({"tools": [{"type": "function", "function": {"nam": 1}}]}, "tools[0].function.nam",
         "tools[0].function has the unknown field 'nam'; the nearest is name"),
        ({"tool_choice": {"type": "function", "function": {"name": "a", "b": 1}}},
         "tool_choice.function.b", "tool_choice.function has the unknown field 'b'; allowed: name"),
        ({"messages": 3}, "messages", "messages: Input should be a valid list"),
        ({"stop": 3}, "stop",
         "stop: Input should be a valid string or Input should be a valid list"),
        ({"tool_choice": "a"}, "tool_choice",
         "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"tools": [{"type": "file_search", "ids": []}]}, "tools[0].type",
         "tools[0].type: 'file_search' does not run here; allowed: 'function' (your own tool)"),
    ],
)  # fmt: skip
def test_unknown_fields_are_refused_with_the_nearest_name(
    change: dict[str, Any], param: str, says: str
) -> None:
    """Regression: the error for a misspelled field was "extra inputs are not permitted"."""
    error = refusal(ChatCompletionRequest, {**CHAT, **change})
    assert error.param == param
    assert str(error).startswith(says)


@pytest.mark.parametrize(
    "name",
    [
        "detokenize",
        "output_kind",
        "similar_images",
        "skip_reading_prefix_cache",
        "prompt_token_ids",
    ],
)
def test_internal_fields_are_out_of_reach(name: str) -> None:
    """Only fields of vLLM's requests become fields of `SamplingParams`."""
    for kind, body in ((ChatCompletionRequest, CHAT), (CompletionRequest, {"prompt": "Hi"})):
        assert str(refusal(kind, {**body, name: True})).startswith(
            f"the request has the unknown field '{name}'"
        )


def test_a_body_without_its_prompt() -> None:
    assert str(refusal(ChatCompletionRequest, {})) == "messages: Field required"


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    content = json.dumps({"max_tokens": 2, "temperature": 0, **body}).encode()
    return httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("chat/completions", CHAT | {"response_format": FORM}, "response_format",
         "response_format cannot be followed: type must be a string or array of strings"),
        ("completions", COMPLETION | {"response_format": FORM}, "response_format",
         "response_format cannot be followed: type must be"),
        ("chat/completions", CHAT | {"structured_outputs": {"regex": "("}}, "structured_outputs",
         "structured_outputs.regex cannot be followed: "),
        ("chat/completions", CHAT | {"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "a"}},
            {"type": "function", "function": {"name": "b", "parameters": {"type": 7}}}]},
         "tools[1]", "tools[1] cannot be followed: type must be a string or array of strings"),
        ("chat/completions", CHAT | {"temperature": -1}, "temperature", "temperature is -1"),
        ("chat/completions", CHAT | {"min_tokens": 5}, "min_tokens", "min_tokens is 5; allowed: "),
        ("completions", COMPLETION | {"best_of": 3}, "best_of",
         "best_of is 3; allowed: null, or 1 (the value of n)"),
        ("completions", {"prompt": []}, "prompt", "prompt has 0 entries"),
        ("completions", COMPLETION | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs",
         "prompt_logprobs is 1 and stream is true"),
        ("completions", COMPLETION | {"logprobs": 21}, "logprobs", "logprobs: Input should be"),
        ("chat/completions", CHAT | {"prompt_logprobs": -1}, "prompt_logprobs",
         "prompt_logprobs: Input should be greater than or equal to 0"),
        ("chat/completions", CHAT | {"response_format": {"type": "structural_tag"}},
         "response_format", "response_format.structures is missing"),
        ("responses", {"input": "a", "model": "tiny"}, "max_tokens",
         "max_tokens is 2; allowed: null; use `max_output_tokens`"),
        ("responses", {"input": "a", "model": "tiny", "max_tokens": None,
                       "text": {"format": {**FORM["json_schema"], "type": "json_schema"}}},
         "text.format", "text.format cannot be followed: type must be"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_it_is_for(
    server: Running, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(says)


def test_a_too_long_prompt_has_openais_error_code(server: Running) -> None:
    error = post(server, "completions", prompt=[5] * 5_000).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "the prompt has 5000 tokens; allowed: 4095 at most, so that one token of an "
        "answer fits (max_model_len 4096); this model's maximum context length is 4096 tokens"
    )


@pytest.mark.parametrize("most", [8, 9, 100_000])
def test_an_answer_ends_at_the_end_of_the_context(server: Running, most: int) -> None:
    """The limit applies to any `max_tokens`, as many clients always send the same large number."""
    answer = post(
        server, "completions", prompt=[5] * 4_088, max_tokens=most, ignore_eos=True
    ).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


def test_token_ids_and_log_probabilities_match_vllm(server: Running) -> None:
    wanted = {"return_token_ids": True, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    text = post(server, "completions", **COMPLETION, **wanted, logprobs=1).json()
    assert text["model"] == "tiny"  # absent from the body
    [choice] = text["choices"]
    ids = choice["token_ids"]
    assert (len(ids), choice["stop_reason"]) == (2, None)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) + 1 == len(choice["prompt_token_ids"])
    for token_id, entry in zip(choice["prompt_token_ids"][1:], others, strict=True):
        assert entry[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
    more = {"echo": True, "logprobs": 2, "prompt_logprobs": 0}
    [choice] = post(server, "completions", **COMPLETION, **more).json()["choices"]
    assert {len(item) for item in choice["logprobs"]["top_logprobs"][1:]} == {2}
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"], "the prompt's first token has text, and no number"
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert {len(item) for item in choice["prompt_logprobs"][1:]} == {1}
    chat = post(server, "chat/completions", **CHAT, **wanted, logprobs=True).json()
    [choice] = chat["choices"]
    tokens = [item["token"] for item in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])


def test_text_offsets_of_a_stream_include_withheld_text(server: Running) -> None:
    """Text that may begin a stop string is withheld, but its tokens are sent."""
    body = COMPLETION | {"max_tokens": 24, "logprobs": 1, "temperature": 1.5, "seed": 7}
    [whole] = post(server, "completions", **body, ignore_eos=True).json()["choices"]
    body |= {"ignore_eos": True, "stop": [f"{char}\N{SNOWMAN}" for char in set(whole["text"])][:8]}
    [whole] = post(server, "completions", **body).json()["choices"]
    offsets = []
    for line in post(server, "completions", **body, stream=True).text.splitlines():
        if line.startswith("data: {"):
            offsets += json.loads(line[6:])["choices"][0]["logprobs"]["text_offset"]
    assert offsets == whole["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)]
)
def test_a_stream_sends_token_ids_and_usage_incrementally(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    wanted: dict[str, Any] = {"return_token_ids": True, "max_tokens": 4}
    whole = post(server, path, **body, **wanted).json()
    text = post(server, path, **body, **wanted, stream=True, stream_options=options).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ids = [token_id for chunk in chunks for choice in chunk["choices"]
           for token_id in choice.get("token_ids", ())]  # fmt: skip
    assert ids == whole["choices"][0]["token_ids"]
    prompts = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids")
               for chunk in chunks if chunk["choices"]]  # fmt: skip
    expected = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    assert prompts == [expected, *[None] * (len(prompts) - 1)]
    count = 0
    for chunk in chunks:  # tokens that come soon after one another may share a chunk
        count += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
        assert count <= chunk["usage"]["completion_tokens"] <= 4
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and count == counts[-1] == 4


def test_vllms_structured_output_forms_are_accepted(server: Running) -> None:
    tag = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}]}
    form = {"type": "structural_tag", "triggers": ["<a"], **tag}
    assert post(server, "chat/completions", **CHAT, response_format=form).status_code == 200
    schema = {"type": "object", "properties": {}}
    closed = {"disable_additional_properties": True, "disable_any_whitespace": True}
    body = {**CHAT, "structured_outputs": {"json": schema, **closed}}
    answer = post(server, "chat/completions", **body, max_tokens=9).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {}


def test_documents_reach_the_template_and_a_model_may_have_aliases() -> None:
    template = "{% for one in documents %}{{ one.text }}. {% endfor %}{{ messages[0].content }}"
    with running(chat_template=template, model_alias=("other",)) as server:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "other"]
        documents = [{"title": "a", "text": "Ben is 45"}]
        body = {**CHAT, "documents": documents, "return_token_ids": True, "model": "other"}
        response = post(server, "chat/completions", **body)
        spelled = httpx.post(
            f"{server.url}/detokenize", json={"tokens": response.json()["prompt_token_ids"]}
        )
        assert spelled.json()["prompt"] == "Ben is 45. How old is Ben?"
        refused = post(server, "chat/completions", **body | {"model": "gpt"}).json()
        assert refused["error"]["message"].endswith("allowed: 'tiny', 'other'")


NARRATED = "{% for one in messages if one.role == 'narrator' %}<{{ one.content }}>{% endfor %}"


def test_a_template_of_a_request_is_explained_as_the_chat_renders_it() -> None:
    """Regression: `/cache/explain` refused a request's template."""
    chat = {"messages": [{"role": "narrator", "content": "Ben is 45"}], "chat_template": NARRATED}
    with running(trust_request_chat_template=True) as server:
        body = {**chat, "max_tokens": 1, "return_token_ids": True}
        answer = post(server, "chat/completions", **body).json()
        spelled = httpx.post(
            f"{server.url}/detokenize", json={"tokens": answer["prompt_token_ids"]}
        )
        assert spelled.json()["prompt"] == "<Ben is 45>"
        explained = httpx.post(f"{server.url}/cache/explain", json=body).json()
        count = len(answer["prompt_token_ids"])
        assert (explained["prompt_tokens"], explained["cached_tokens"]) == (count, count - 1)


@pytest.mark.parametrize(
    "path", ["v1/chat/completions", "tokenize", "cache/explain", "cache/prewarm"]
)
def test_a_template_of_a_request_is_refused_by_default(server: Running, path: str) -> None:
    body = {"messages": CHAT["messages"], "chat_template": NARRATED}
    response = httpx.post(f"{server.url}/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_require_a_stream(
    server: Running, path: str, stream: dict[str, Any]
) -> None:
    """Regression: they were ignored silently, and clients waited for the usage."""
    body = CHAT if path.startswith("chat") else COMPLETION
    response = post(server, path, **body, **stream, stream_options={"include_usage": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")
    assert response.json()["error"]["message"].startswith("stream_options is set without a stream")
    assert post(server, path, **body, **stream, stream_options=None).status_code == 200


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"allowed_token_ids": [5], "structured_outputs": {"choice": ["zzz"]}}, "ban every"),
        ({"bad_words": ["zzz"], "structured_outputs": {"choice": ["zzz"]}}, "every token is"),
        ({"bad_words": ["zzz"], "response_format": {"type": "json_object"}}, None),
    ],
)
def test_contradicting_options_are_a_client_error(
    server: Running, wishes: dict[str, Any], says: str | None
) -> None:
    """Regression: the status was 500."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 5, **wishes}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == (200 if says is None else 400), answer.text
    assert says is None or says in answer.json()["error"]["message"]
    blocks, free = server.pool()
    assert blocks == free
