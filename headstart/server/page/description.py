"""The OpenAPI description: FastAPI's, with the answers, names, texts and examples that it lacks."""

from __future__ import annotations

from typing import Any

from headstart.server.middleware import OPEN_PATHS

__all__ = ["DESCRIPTIONS", "FIELD_EXAMPLES", "complete_description", "make_bodies"]

DESCRIPTIONS = {
    "action": "The command.",
    "add_generation_prompt": "Whether the prompt ends with the beginning of an answer.",
    "add_special_tokens": "Whether special tokens are added to a text.",
    "allowed_callers": "Accepted without effect.",
    "allowed_token_ids": "The only tokens that an answer may have.",
    "annotations": "Notes of an earlier answer, which are not read.",
    "arguments": "The arguments of the call, as JSON text.",
    "audio": "The voice and format of a spoken answer.",
    "background": "Must be false or null.",
    "bad_words": "Texts that an answer must not contain.",
    "best_of": "Must be null or equal to n.",
    "budget_tokens": "Accepted without effect.",
    "cache_control": "Marks the prompt up to here as worth keeping.",
    "cache_salt": "Only requests with the same salt share cached blocks.",
    "call_id": "The id of the call.",
    "caller": "The caller of the tool, which is the model.",
    "chat_template": "A Jinja template in place of the model's.",
    "chat_template_kwargs": "Variables for the chat template.",
    "choice": "The texts from which the answer is chosen.",
    "citations": "Citations of an earlier answer, or a setting that must be off.",
    "client_metadata": "Accepted without effect.",
    "command": "The words of the command.",
    "content": "A text, or a list of parts.",
    "context": "Context of the document or of the reasoning.",
    "context_management": "Edits of the conversation, which must keep everything.",
    "continue_final_message": "Whether the answer continues the last message.",
    "continuous_usage_stats": "Whether each event has the usage so far.",
    "ctx": "Details of the error.",
    "data": "The data, as text or in base64.",
    "defer_loading": "Accepted without effect: all tools are in the prompt.",
    "definition": "The grammar.",
    "description": "A description for the model.",
    "detail": "Accepted without effect.",
    "diagnostics": "Accepted without effect.",
    "disable_additional_properties": "Whether objects have only the properties of the schema.",
    "disable_any_whitespace": "Whether JSON is written without white space.",
    "disable_parallel_tool_use": "Whether the answer has one call at most.",
    "display": "Accepted without effect.",
    "documents": "Documents for chat templates that read them.",
    "eager_input_streaming": "Accepted without effect: arguments are always streamed.",
    "echo": "Whether the answer begins with the prompt.",
    "edits": "The edits.",
    "effort": "The effort of the reasoning, for chat templates that read it.",
    "enabled": "Must be false.",
    "encrypted_content": "Reasoning of an earlier answer; that of another server is left out.",
    "env": "Environment variables of the command.",
    "file_data": "The file, which is not read.",
    "file_id": "The id of a file on another server, which is not read.",
    "file_url": "The URL of a file, which is not fetched.",
    "filename": "The name of the file.",
    "format": "The format.",
    "frequency_penalty": "Lowers the logits of tokens by how often the answer has them; -2 to 2.",
    "function": "The function.",
    "function_call": "Older name of tool_choice.",
    "functions": "Older name of tools.",
    "generate_summary": "Accepted without effect.",
    "grammar": "A grammar that the answer follows.",
    "id": "The id of the item.",
    "ignore_eos": "Whether the answer continues after the end-of-text token.",
    "image_url": "The image, as a data: URL.",
    "include": "Further parts of the answer, which no answer here has.",
    "include_obfuscation": "Accepted without effect.",
    "include_stop_str_in_output": "Whether the answer ends with the stop text.",
    "include_usage": "Whether the last event has the usage.",
    "inference_geo": 'Must be "global" or null.',
    "input": "The input: a text, a list of items, or the arguments of a call.",
    "input_examples": "Accepted without effect.",
    "input_schema": "The JSON schema of the arguments.",
    "instructions": "The system prompt.",
    "is_error": "Whether the call failed.",
    "json": "A JSON schema that the answer follows.",
    "json_object": "Whether the answer is a JSON object.",
    "json_schema": "The JSON schema that the answer follows.",
    "keep": "The reasoning that is kept, which is all.",
    "loc": "The place of the error.",
    "logit_bias": "Numbers added to the logits, by token id.",
    "logprobs": "Log-probabilities: whether or how many, or those of an earlier answer.",
    "max_completion_tokens": "The largest number of tokens of the answer.",
    "max_output_tokens": "The largest number of tokens of the answer.",
    "max_tokens": "The largest number of tokens of the answer.",
    "max_tool_calls": "Accepted without effect: it limits hosted tools.",
    "media_type": "The media type, such as image/png.",
    "messages": "The conversation.",
    "metadata": "Notes of the client.",
    "min_p": "Leaves out tokens less probable than this share of the most probable.",
    "min_tokens": "The smallest number of tokens of the answer.",
    "modalities": "Text, and audio where the model speaks.",
    "mode": "The mode.",
    "model": "The name of the model, or of an adapter.",
    "msg": "The message of the error.",
    "n": "The number of answers.",
    "name": "The name.",
    "namespace": "The namespace of the tool.",
    "no_read": "Whether the whole prompt is computed, whatever is cached.",
    "no_store": "Whether nothing of the request is cached.",
    "output": "The result of the call.",
    "output_config": "The form of the answer, and the effort.",
    "output_schema": "Accepted without effect.",
    "parallel_tool_calls": "Whether the answer may have several calls.",
    "parameters": "The JSON schema of the arguments.",
    "parsed": "A copy of the text, which is not read.",
    "parsed_arguments": "A copy of the arguments, which is not read.",
    "phase": "Accepted without effect.",
    "presence_penalty": "Lowers the logits of tokens that the answer has; -2 to 2.",
    "previous_message_id": "Accepted without effect.",
    "previous_response_id": "The id of a stored response that the input continues.",
    "priority": "Requests with lower values run first.",
    "prompt": "A text, token ids, or a list of either.",
    "prompt_cache_breakpoint": "Accepted without effect: every full block is cached.",
    "prompt_cache_key": "Accepted without effect by a single engine.",
    "prompt_cache_options": "Options of the cache.",
    "prompt_cache_retention": "How long the prompt is worth keeping.",
    "prompt_logprobs": "The number of log-probabilities for each token of the prompt.",
    "reasoning": "Settings of the reasoning.",
    "reasoning_effort": "The effort of the reasoning, for chat templates that read it.",
    "refusal": "The text by which an answer was refused.",
    "regex": "A regular expression that the answer matches.",
    "repetition_penalty": "Divides the logits of tokens that were there before; 1 is none.",
    "reset_running_requests": "Whether running requests are computed again.",
    "reset_tiers": "Whether the tiers behind the pool are emptied, too.",
    "response_format": "The form of the answer.",
    "return_progress": "Whether a stream reports how much of the prompt is read.",
    "return_token_ids": "Whether the answer has its token ids.",
    "return_token_strs": "Whether the answer has the text of each token.",
    "return_tokens_as_token_ids": "Whether log-probabilities name tokens by their ids.",
    "role": "The author of the message.",
    "safety_identifier": "Accepted without effect.",
    "schema": "The JSON schema.",
    "scope": "Accepted without effect.",
    "seed": "The seed of the sampling.",
    "service_tier": "Accepted without effect: there is one tier.",
    "signature": "The signature of another server, which is not read.",
    "skip_special_tokens": "Whether the answer leaves out special tokens.",
    "source": "The data, or the origin of a search result.",
    "speed": 'Must be "standard" or null.',
    "status": "The state of the item.",
    "stop": "Texts that end the answer.",
    "stop_sequences": "Texts that end the answer.",
    "stop_token_ids": "Tokens that end the answer.",
    "store": "Whether the response is stored; without effect in chats and completions.",
    "stream": "Whether the answer comes as server-sent events.",
    "stream_options": "Options of the stream.",
    "strict": "Accepted without effect: forced calls and schemas are always followed.",
    "structural_tag": "Forms of parts of the answer.",
    "structured_outputs": "The form of the answer, as in vLLM.",
    "structures": "The forms of a structural tag.",
    "suffix": "Must be empty.",
    "summary": "A summary of the reasoning.",
    "syntax": "The kind of the grammar.",
    "system": "The system prompt.",
    "temperature": "The randomness of the sampling; 0 takes the most probable token.",
    "text": "The text, or the form of the text.",
    "thinking": "The reasoning, or its settings.",
    "timeout_ms": "The time limit of the command, in milliseconds.",
    "title": "The title.",
    "tokens": "Token ids.",
    "tool_choice": "Whether the answer may, must or must not call a tool.",
    "tool_name": "The name of the tool.",
    "tool_use_id": "The id of the call.",
    "tools": "The tools that the model may call.",
    "top_k": "Samples from this many of the most probable tokens.",
    "top_logprobs": "The number of alternatives for each token.",
    "top_p": "Samples from the most probable tokens with this probability together.",
    "triggers": "Texts that begin a structure.",
    "truncation": "Accepted without effect: no input is cut.",
    "ttl": "The time for which the prompt is worth keeping.",
    "type": "The type of the object.",
    "url": "The URL, which is not fetched.",
    "user": "A name of the user.",
    "user_id": "Accepted without effect.",
    "user_profile_id": "Accepted without effect.",
    "verbosity": "Accepted without effect.",
    "voice": "The voice of the answer.",
    "whitespace_pattern": "A regular expression for white space in JSON.",
    "working_directory": "The folder in which the command runs.",
    "workspace_id": "Accepted without effect.",
}


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


_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
_SUCCESS = {
    "/metrics": {"text/plain": {"schema": {"type": "string"}}},
    "/cache/live": _EVENTS,
}
"""Content types of a success, by the paths where it is not JSON."""
_STATUSES = {
    400: "The request is malformed, or a value is not allowed",
    401: "The API key is missing or unknown",
    403: "The key may not use this path, or the host or origin is not allowed",
    404: "The model or object does not exist",
    409: "Requests are running",
    413: "The body is too large",
    415: "The body is compressed",
    429: "The tenant has too many requests",
    500: "The server failed; its log has the reason",
    503: "The server is stopping, or no engine runs",
    504: "The request took longer than the server allows",
}
_ALWAYS = (400, 403, 413, 500, 503)
_CALLS = (404, 415, 429, 504)
_OTHERS = {"/cache/reset": (409, 415), "/cache/advice": (429,)}
"""Further statuses of paths that differ from the calls of a model and from plain reads."""
_HEADERS = {401: ("WWW-Authenticate", "string"), 429: ("Retry-After", "integer")}
_TAGS = {
    "/v1/messages": "Anthropic",
    "/v1/responses": "Responses",
    "/v1/": "OpenAI",
    "/tokenize": "Tokens",
    "/detokenize": "Tokens",
    "/cache": "Cache",
    "/": "Monitoring",
}
"""The tag of a path by its prefix; the first that fits counts."""


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


_MESSAGE = _text("The problem, the value and what is allowed.")
_SCHEMAS: dict[str, dict[str, Any]] = {
    "ErrorResponse": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "description": "The error.",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _MESSAGE,
                    "type": _text("The kind of error, such as invalid_request_error."),
                    "param": _text("The wrong field.", type=["string", "null"]),
                    "code": _text("The reason for programs.", type=["string", "null"]),
                },
            }
        },
    },
    "MessagesErrorResponse": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": _text("Always error.", const="error"),
            "error": {
                "type": "object",
                "description": "The error.",
                "required": ["type", "message"],
                "properties": {
                    "type": _text("The kind of error, such as invalid_request_error."),
                    "message": _MESSAGE,
                },
            },
            "request_id": _text("The id of the request."),
        },
    },
}


def complete_description(description: dict[str, Any], model: str) -> dict[str, Any]:
    """Add the answers that are sent, tags, readable names, descriptions and examples.

    FastAPI lists a 422 for wrong bodies, which no path sends. model: the served name.
    """
    bodies = make_bodies(model)
    parameters = {"/v1/models/{name}": model, "/cache/blocks/{block_id}": 0}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            operation["tags"] = [next(tag for head, tag in _TAGS.items() if path.startswith(head))]
            operation["summary"] = operation["summary"].capitalize()
            operation["responses"] = _responses(path, method)
            if "requestBody" in operation:
                operation["requestBody"]["content"]["application/json"]["example"] = bodies[path]
            if path in parameters:
                operation["parameters"][0]["example"] = parameters[path]
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(_SCHEMAS)
    for title, schema in schemas.items():
        _allow_overlaps(schema)
        for name, field in schema.get("properties", {}).items():
            if name in DESCRIPTIONS:
                field.setdefault("description", DESCRIPTIONS[name])
            example = FIELD_EXAMPLES.get(f"{title}.{name}", FIELD_EXAMPLES.get(name))
            if example is not None:
                field["examples"] = [example]
    return description


def _responses(path: str, method: str) -> dict[str, Any]:
    """Return the responses of an operation by status."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMS:
        content |= _EVENTS
    responses: dict[str, Any] = {
        "200": {"description": "Success", "content": _SUCCESS.get(path, content)}
    }
    statuses = {*_ALWAYS, *_OTHERS.get(path, _CALLS if method == "post" else ())}
    if not OPEN_PATHS.fullmatch(path):
        statuses.add(401)
    if "{" in path:
        statuses.add(404)
    kind = "MessagesErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    for status in sorted(statuses):
        response: dict[str, Any] = {"description": _STATUSES[status], "content": error}
        if status in _HEADERS:
            name, form = _HEADERS[status]
            response["headers"] = {name: {"required": True, "schema": {"type": form}}}
        responses[str(status)] = response
    return responses


def _allow_overlaps(schema: Any) -> None:
    """Turn `oneOf` without a discriminator into `anyOf`: hosted tools may have any type."""
    if isinstance(schema, dict):
        if "oneOf" in schema and "discriminator" not in schema:
            schema["anyOf"] = schema.pop("oneOf")
        for part in schema.values():
            _allow_overlaps(part)
    elif isinstance(schema, list):
        for part in schema:
            _allow_overlaps(part)
