"""The OpenAPI description: FastAPI's, with the answers, tags, texts and examples that it lacks.

`texts.json` has the texts: descriptions and examples of fields, by the name of the field, or by
schema and field where the type differs between schemas; examples of bodies, statuses, errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.server.middleware import OPEN_PATHS

__all__ = ["complete_description"]

_TEXTS = Path(__file__).with_name("texts.json")
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
_SUCCESS = {
    "/metrics": {"text/plain": {"schema": {"type": "string"}}},
    "/cache/live": _EVENTS,
}
"""Content types of a success, by the paths where it is not JSON."""
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


def complete_description(description: dict[str, Any], model: str) -> dict[str, Any]:
    """Add the answers that are sent, tags, readable names, descriptions and examples.

    FastAPI lists a 422 for wrong bodies, which no path sends. model: the served name.
    """
    texts = json.loads(_TEXTS.read_text(encoding="utf-8"))
    parameters = {"/v1/models/{name}": model, "/cache/blocks/{block_id}": 0}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            operation["tags"] = [next(tag for head, tag in _TAGS.items() if path.startswith(head))]
            operation["summary"] = operation["summary"].capitalize()
            operation["responses"] = _responses(path, method, texts["statuses"])
            if "requestBody" in operation:
                body = texts["bodies"][path]
                body |= {"model": model} if "model" in body else {}
                operation["requestBody"]["content"]["application/json"]["example"] = body
            if path in parameters:
                operation["parameters"][0]["example"] = parameters[path]
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(texts["schemas"])
    for title, schema in schemas.items():
        _allow_overlaps(schema)
        for name, field in schema.get("properties", {}).items():
            if name in texts["fields"]:
                field.setdefault("description", texts["fields"][name])
            for key in (name, f"{title}.{name}"):
                if key in texts["examples"]:
                    field["examples"] = [texts["examples"][key]]
    return description


def _responses(path: str, method: str, texts: dict[str, str]) -> dict[str, Any]:
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
        response: dict[str, Any] = {"description": texts[str(status)], "content": error}
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
