"""The OpenAPI description: FastAPI's, with the answers, names and texts that it lacks."""

from __future__ import annotations

from typing import Any

from headstart.server.middleware import OPEN_PATHS
from headstart.server.page.examples import FIELD_EXAMPLES, make_bodies
from headstart.server.page.fields import DESCRIPTIONS

__all__ = ["complete_description"]

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
