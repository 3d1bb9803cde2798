"""JSON schemas of clients' tools and models: annotations and recursive references."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from headstart import RequestError, StructuredOutputsParams
from headstart.engine.structured_outputs import FORMATS
from headstart.frontend.grammar import check_constraint

llguidance = pytest.importorskip("llguidance")

ANNOTATIONS = [
    *("int32", "int64", "float", "double", "password", "byte", "binary", "idn-email"),
    *("idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex", "color"),
]


def check(schema: Any) -> None:
    check_constraint(StructuredOutputsParams(json=schema).constraint)


def validate(schema: dict[str, Any]) -> str:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return str(llguidance.LLMatcher.validate_grammar(grammar))


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_format_that_is_not_enforced_is_an_annotation(name: str) -> None:
    """Earlier, a tool with the format `uri-reference` was refused."""
    check({"properties": {"a": {"type": "string", "format": name}, "b": {"format": name}}})
    check({"type": ["string", "null"], "format": name, "minLength": 3})


def test_formats_that_llguidance_enforces_reach_it() -> None:
    for name in ANNOTATIONS:
        assert "Unknown format" in validate({"type": "string", "format": name})
    for name in FORMATS:
        assert not validate({"type": "string", "format": name})
        form = StructuredOutputsParams(json={"type": "string", "format": name}).constraint
        assert json.loads(form.text)["format"] == name


def test_only_the_keyword_format_is_an_annotation() -> None:
    schema = {
        "properties": {"format": {"const": {"format": "color"}}},
        "required": ["format"],
        "default": {"format": "color"},
    }
    assert json.loads(StructuredOutputsParams(json=schema).constraint.text) == schema


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": [NODE], "minItems": 1}]},
        {"$defs": {"node": {**NODE, "properties": {"next": {"$ref": "#/$defs/node"}}}}}
        | {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "required": ["a"]},
    ],
)
def test_a_schema_with_endless_recursion_is_refused(schema: dict[str, Any]) -> None:
    """Earlier, its answers continued until `max_tokens`."""
    assert not validate(schema)
    with pytest.raises(RequestError, match=r"structured_outputs.json .* recurses without end"):
        check(schema)
    with pytest.raises(RequestError, match=r"structured_outputs.grammar .* recurses without end"):
        check_constraint(
            StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}").constraint
        )
    tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
    with pytest.raises(RequestError, match=r"structural_tag .* recurses without end"):
        check_constraint(StructuredOutputsParams(structural_tag=tag).constraint)


@pytest.mark.parametrize(
    "schema",
    [
        {**NODE, "required": []},
        {**NODE, "type": ["object", "null"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [NODE, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
        | {"required": ["a"]},
        {"$defs": {"never": {"$ref": "#/$defs/never"}}, "type": "string"},
    ],
)
def test_a_schema_with_finite_recursion_is_accepted(schema: dict[str, Any]) -> None:
    check(schema)


def test_a_long_chain_of_references_ends() -> None:
    names = [f"d{place}" for place in range(300)]
    chain = {name: {"$ref": f"#/$defs/{other}"} for name, other in pairwise(names)}
    check({"$defs": {**chain, names[-1]: {"type": "null"}}, "$ref": "#/$defs/d0"})
    with pytest.raises(RequestError, match="recurses without end"):
        check({"$defs": {**chain, names[-1]: {"$ref": "#/$defs/d0"}}, "$ref": "#/$defs/d0"})
