"""Examples of request bodies and of fields, for the OpenAPI description and its page."""

from __future__ import annotations

from typing import Any

__all__ = ["FIELD_EXAMPLES", "make_bodies"]

_QUESTION = "Anna Smith is 31. Ben Jones is 45. How old is Ben Jones?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CLAUDE_TOOLS = [
    {"name": "get_weather", "description": "Weather of a city.", "input_schema": _SCHEMA}
]
_RESPONSES_TOOLS = [{"type": "function", **_FUNCTION}]

FIELD_EXAMPLES: dict[str, Any] = {
    "CachePromptRequest.tools": _TOOLS,
    "ChatCompletionRequest.tools": _TOOLS,
    "CountTokensRequest.tools": _CLAUDE_TOOLS,
    "InputTokensRequest.tools": _RESPONSES_TOOLS,
    "MessagesRequest.tools": _CLAUDE_TOOLS,
    "ResponsesRequest.tools": _RESPONSES_TOOLS,
    "TokenizeRequest.tools": _TOOLS,
    "InputTokensRequest.text": {"format": {"type": "json_object"}},
    "ResponsesRequest.text": {"format": {"type": "json_object"}},
    "ChatCompletionRequest.tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "CountTokensRequest.tool_choice": {"type": "tool", "name": "get_weather"},
    "InputTokensRequest.tool_choice": {"type": "function", "name": "get_weather"},
    "MessagesRequest.tool_choice": {"type": "tool", "name": "get_weather"},
    "ResponsesRequest.tool_choice": {"type": "function", "name": "get_weather"},
    "allowed_token_ids": [42, 43],
    "arguments": '{"city": "Paris"}',
    "bad_words": ["secret"],
    "cache_salt": "team-7",
    "call_id": "call_1",
    "chat_template_kwargs": {"enable_thinking": False},
    "choice": ["yes", "no"],
    "command": ["ls", "-l"],
    "documents": [{"title": "People", "text": "Ben is 45 years old."}],
    "frequency_penalty": 0.5,
    "grammar": 'root ::= "yes" | "no"',
    "image_url": "data:image/png;base64,iVBORw0KGgo=",
    "input_schema": _SCHEMA,
    "json_schema": {"name": "place", "schema": _SCHEMA},
    "logit_bias": {"42": -100},
    "messages": _MESSAGES,
    "min_p": 0.05,
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "parameters": _SCHEMA,
    "presence_penalty": 0.5,
    "prompt_cache_key": "support-bot",
    "regex": "[0-9]{4}",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "schema": _SCHEMA,
    "seed": 7,
    "stop": ["\n\n"],
    "stop_sequences": ["\n\n"],
    "stop_token_ids": [2],
    "structured_outputs": {"choice": ["yes", "no"]},
    "system": "Answer in one sentence.",
    "temperature": 0.7,
    "tokens": [1, 2, 3],
    "top_k": 40,
    "top_p": 0.9,
    "whitespace_pattern": "[ ]?",
}
"""Values by field name, or by schema and field where the type differs between schemas."""


def make_bodies(model: str) -> dict[str, dict[str, Any]]:
    """Return a body that the server of this model answers, by the path of its operation."""
    chat = {"model": model, "messages": _MESSAGES}
    return {
        "/v1/chat/completions": {**chat, "max_tokens": 32},
        "/v1/completions": {"model": model, "prompt": "Ben is 45 years old.", "max_tokens": 32},
        "/v1/messages": {**chat, "max_tokens": 32},
        "/v1/messages/count_tokens": chat,
        "/v1/responses": {"model": model, "input": _QUESTION, "max_output_tokens": 32},
        "/v1/responses/input_tokens": {"model": model, "input": _QUESTION},
        "/tokenize": {"model": model, "prompt": _QUESTION},
        "/detokenize": {"model": model, "tokens": FIELD_EXAMPLES["tokens"]},
        "/cache/explain": chat,
        "/cache/prewarm": chat,
        "/cache/reset": {"reset_running_requests": False},
    }
