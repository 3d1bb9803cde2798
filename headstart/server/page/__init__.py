"""The page at `/` with the pool, the prefixes and a chat, and the API's description at `/docs`.

FastAPI's OpenAPI document lacks status codes, tags, field descriptions and examples. `texts.json`
has them. The key of an example is the field's name, or `schema.field` if the example applies to
only one schema.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from jinja2 import Environment, Template
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from headstart.server.errors import JsonResponse
from headstart.server.middleware import OPEN_PATHS

__all__ = ["mount"]


Schema = Mapping[str, Any]
_FOLDER = Path(__file__).parent
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
_SUCCESS = {"/metrics": {"text/plain": {"schema": {"type": "string"}}}, "/cache/live": _EVENTS}
"""Content types of successful answers in formats other than JSON, by path."""
_ERRORS = (400, 403, 413, 500, 503)
_POST_ERRORS = (404, 415, 429, 504)
_ERRORS_BY_PATH = {"/cache/reset": (409, 415), "/cache/advice": (429,)}
"""Error statuses of certain paths, in place of `_POST_ERRORS`."""
_ERROR_HEADERS = {401: ("WWW-Authenticate", "string"), 429: ("Retry-After", "integer")}


def complete_description(description: dict[str, Any], model: str) -> dict[str, Any]:
    """Add status codes, tags, summaries, descriptions and examples. model: the served name.

    Remove the status 422, which FastAPI lists but no path sends.
    """
    texts = json.loads((_FOLDER / "texts.json").read_text(encoding="utf-8"))
    parameters = {"/v1/models/{name}": model, "/cache/blocks/{block_id}": 0}
    for path, operations in description["paths"].items():
        tags = [next(tag for head, tag in texts["tags"].items() if path.startswith(head))]
        for method, operation in operations.items():
            operation["tags"] = tags
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
    content |= _EVENTS if path in _STREAMS else {}
    responses: dict[str, Any] = {
        "200": {"description": "Success", "content": _SUCCESS.get(path, content)}
    }
    statuses = {*_ERRORS, *_ERRORS_BY_PATH.get(path, _POST_ERRORS if method == "post" else ())}
    statuses |= set() if OPEN_PATHS.fullmatch(path) else {401}
    statuses |= {404} if "{" in path else set()
    kind = "MessagesErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
    for status in sorted(statuses):
        response: dict[str, Any] = {"description": texts[str(status)], "content": error}
        if status in _ERROR_HEADERS:
            name, form = _ERROR_HEADERS[status]
            response["headers"] = {name: {"required": True, "schema": {"type": form}}}
        responses[str(status)] = response
    return responses


def _allow_overlaps(schema: Any) -> None:
    """Replace `oneOf` without a discriminator by `anyOf`: a hosted tool may match two schemas."""
    parts = schema
    if isinstance(schema, dict):
        if "oneOf" in schema and "discriminator" not in schema:
            schema["anyOf"] = schema.pop("oneOf")
        parts = schema.values()
    if isinstance(schema, dict | list):
        for part in parts:
            _allow_overlaps(part)


def render_reference(description: Schema) -> str:
    """Return an OpenAPI description as an HTML page. Its bodies must be schema references."""
    schemas = description.get("components", {}).get("schemas", {})
    return _template().render(paths=description["paths"], schemas=schemas)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": _code, "kind": _kind, "prose": _prose}
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2)
    environment.globals["bodies"] = lambda operation: (
        operation.get("requestBody", {}).get("content", {}).values()
    )
    return environment.from_string((_FOLDER / "reference.html").read_text(encoding="utf-8"))


def _prose(text: str) -> Markup:
    """Return text as HTML, with `names in backticks` as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _code(value: object) -> Markup:
    return Markup("<code>{}</code>").format(json.dumps(value))


def _kind(schema: Schema) -> Markup:
    """Return the types and values that a schema allows, as HTML."""
    return Markup(" | ").join(dict.fromkeys(_kinds(schema))) or Markup("any")


def _kinds(schema: Schema) -> Iterator[Markup]:
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key, ()):
            yield from _kinds(part)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield Markup('<a href="#schema-{0}">{0}</a>').format(name)
    elif "enum" in schema or "const" in schema:
        yield from map(_code, schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "array":
        yield Markup("list of ({})").format(_kind(schema.get("items", {})))
    elif "type" in schema:
        yield escape(schema["type"])


_FILES = Path(__file__).parent / "files"
# Allow no content from other servers, and no script in a model's answer.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _Files(StaticFiles):
    """The page's files, with the page's headers, since a browser may open an SVG as a page."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def mount(app: FastAPI, *, with_pool: bool = True) -> None:
    """Serve the page and its files, and the API's description at `/docs` and `/openapi.json`.

    with_pool: False if the server has no pool or several. `/` then redirects to the description.
    """
    lock = threading.Lock()

    def describe() -> dict[str, Any]:
        with lock:  # `app.openapi` returns one dict, which `complete_description` changes
            return complete_description(app.openapi(), app.state.service.name)

    @app.get("/", include_in_schema=False)
    async def show_page(request: Request) -> Response:
        if not with_pool:
            return RedirectResponse("/docs")
        return FileResponse(_FILES / "index.html", headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def show_reference(request: Request) -> Response:
        text = await asyncio.to_thread(lambda: render_reference(describe()))
        return HTMLResponse(text, headers=_HEADERS)

    @app.get("/openapi.json", include_in_schema=False)
    async def show_description(request: Request) -> Response:
        return JsonResponse(await asyncio.to_thread(describe))

    app.mount("/page", _Files(directory=_FILES), name="page")
