"""The page at `/docs`: every path of the API with a form that calls it, and every field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup, escape

__all__ = ["render_reference"]

Schema = Mapping[str, Any]


def render_reference(description: Schema) -> str:
    """Return a page of an OpenAPI description, whose bodies are references to its schemas."""
    schemas = description.get("components", {}).get("schemas", {})
    return _template().render(paths=description["paths"], schemas=schemas)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": _code, "kind": _kind, "prose": _prose, "pretty": _pretty}
    environment.globals["bodies"] = lambda operation: (
        operation.get("requestBody", {}).get("content", {}).values()
    )
    text = Path(__file__).with_name("reference.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2)


def _prose(text: str) -> Markup:
    """Return a text as HTML, with `names in backticks` as code."""
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
