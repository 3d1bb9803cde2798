"""The page at `/docs`: every path of the API with a form that calls it, and every field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

__all__ = ["render_reference"]

Schema = Mapping[str, Any]
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>headstart: the HTTP API</title>
<link rel="icon" href="page/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page/page.css">
<script type="module" src="page/reference.js"></script>
</head>
<body class="reference">
<header><h1>headstart</h1><p class="quiet">The HTTP API, as in
<a href="openapi.json">openapi.json</a></p>
<label>API key, if the server asks for one
<input id="key" type="password" autocomplete="off"></label></header>
<main>
"""


def render_reference(description: Schema) -> str:
    """A page of an OpenAPI description, whose bodies are references to its schemas."""
    paths = [
        _operation(method, path, operation)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    ]
    schemas = description.get("components", {}).get("schemas", {})
    shown = [_schema(name, schema) for name, schema in schemas.items() if "properties" in schema]
    return "".join([_HEAD, *paths, *shown, "</main>\n</body>\n</html>\n"])


def _operation(method: str, path: str, operation: Schema) -> str:
    rows = [(one["name"], _kind(one["schema"]), "") for one in operation.get("parameters", ())]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows.append(("body", _kind(content["schema"]), ""))
    rows.append(("answers", escape(_answers(operation["responses"])), ""))
    tags = ", ".join(operation.get("tags", ()))
    about = f'<p class="quiet">{escape(operation.get("summary", ""))} · {escape(tags)}</p>\n'
    text = about + _text(operation.get("description", ""))
    form = _form(method.upper(), path, operation)
    return _section(f"{method.upper()} {path}", f"{method}-{path}", text, rows, form)


def _answers(responses: Schema) -> str:
    """Return the content types of a success, and the other statuses."""
    types = " or ".join(responses["200"]["content"])
    return f"200: {types}; {', '.join(status for status in responses if status != '200')}"


def _form(method: str, path: str, operation: Schema) -> str:
    """A form that calls the operation, with its examples as the values; see `reference.js`."""
    name = escape(f"{method} {path}")
    for parameter in operation.get("parameters", ()):
        if "example" in parameter:
            path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
    fields = f'<label>Path <input name="path" value="{escape(path)}"></label>\n'
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = json.dumps(content.get("example", {}), indent=2)
        rows = min(body.count("\n") + 1, 12)
        text = f'<textarea name="body" rows="{rows}" spellcheck="false">\n{escape(body)}</textarea>'
        fields += f"<label>Body {text}</label>\n"
    return (
        f'<details><summary>Try it</summary><form class="try" data-method="{method}">\n{fields}'
        '<div class="row"><button type="submit">Send</button>'
        '<button type="button" class="plain" hidden>Stop</button></div>\n'
        f'<p><output></output></p><pre tabindex="0" role="region" aria-label="Answer of {name}" '
        "hidden></pre>\n</form></details>\n"
    )


def _schema(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (key, _kind(field), _about(field, key in required))
        for key, field in schema["properties"].items()
    ]
    return _section(name, f"schema-{name}", _text(schema.get("description", "")), rows)


def _section(
    title: str, place: str, text: str, rows: Iterable[tuple[str, str, str]], form: str = ""
) -> str:
    """Return a section; kinds, texts and the form are HTML already."""
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + (f"<td>{kind}</td><td>{more}</td>" if more else f'<td colspan="2">{kind}</td>')
        + "</tr>\n"
        for name, kind, more in rows
    )
    table = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Fields of {escape(title)}">'
        f"<table><tbody>\n{cells}</tbody></table></div>\n"
    )
    return (
        f'<section id="{escape(place)}"><h2><code>{escape(title)}</code></h2>\n'
        f"{text}{table if cells else ''}{form}</section>\n"
    )


def _text(description: str) -> str:
    paragraphs = description.strip().split("\n\n")
    return "".join(f"<p>{_prose(one)}</p>\n" for one in paragraphs if one)


def _prose(text: str) -> str:
    """Return a text as HTML, with `names in backticks` as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _about(field: Schema, is_required: bool) -> str:
    examples = [f"Example: {_code(one)}." for one in field.get("examples", ())]
    texts = [_prose(field.get("description", "")), _default(field, is_required), *examples]
    return " ".join(filter(None, texts))


def _default(field: Schema, is_required: bool) -> str:
    if is_required:
        return "Required."
    default = field.get("default")
    return "" if default is None else f"Default: {_code(default)}."


def _code(value: object) -> str:
    return f"<code>{escape(json.dumps(value))}</code>"


def _kind(schema: Schema) -> str:
    """What a value may be, as HTML."""
    return " | ".join(dict.fromkeys(_kinds(schema))) or "any"


def _kinds(schema: Schema) -> Iterator[str]:
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key, ()):
            yield from _kinds(one)
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        yield f'<a href="#schema-{name}">{name}</a>'
    elif "enum" in schema or "const" in schema:
        for value in schema.get("enum", [schema.get("const")]):
            yield _code(value)
    elif schema.get("type") == "array":
        yield f"list of ({_kind(schema.get('items', {}))})"
    elif "type" in schema:
        yield escape(schema["type"])
