"""An error for a form says where in it the fault is."""

import json
from typing import Any

import pytest

from headstart import StructuredOutputsParams
from headstart.engine.logits.vocabulary import Vocabulary
from headstart.errors import RequestError
from headstart.frontend.structured.grammar import GrammarCompiler, check_form
from headstart.frontend.structured.places import find_fault
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZER = TINY_TOKENIZERS["byte_level"]()
VOCABULARY = Vocabulary(TOKENIZER, len(TOKENIZER), frozenset())
ODD = {"not": {"type": "string"}}
REPEATS = "((a{100}){100}){100}"


def refusal(**form: Any) -> str:
    """What is said of a form, by the check that needs no model too where that refuses it."""
    wanted = StructuredOutputsParams(**form).form
    with pytest.raises(RequestError) as caught:
        GrammarCompiler(VOCABULARY).matcher(wanted)
    try:
        check_form(wanted)
    except RequestError as error:
        assert str(error) == str(caught.value)
    return str(caught.value)


def person(age: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "facts": {"type": "object", "properties": {"age": age}, "required": ["age"]},
        },
        "required": ["facts"],
    }


AGE = "#/properties/facts/properties/age"


@pytest.mark.parametrize(
    ("age", "reason", "pointer"),
    [
        (ODD, '"not" is not supported', "/not"),
        ({"if": {}, "then": {}}, '"if" and "then" are not supported', ""),
        ({"type": "strin"}, "Invalid type: strin", "/type"),
        ({"type": "string", "pattern": "a(b"}, "unclosed group at character 2 of", "/pattern"),
        (
            {"type": "number", "minimum": 3, "maximum": 1},
            "nothing satisfies it: minimum (3) is greater than maximum (1)",
            "",
        ),
        ({"allOf": [{"type": "string"}, {"type": "number"}]}, "nothing satisfies it:", "/allOf"),
        ({"type": "string", "minLength": -1}, "Expected positive integer", "/minLength"),
        ({"enum": 5}, "enum must be an array", "/enum"),
        ({"properties": {"a/b~c": 5}}, "schema must be", "/properties/a~1b~0c"),
        ({"required": [5]}, "Expected string for 'required' item", "/required"),
        ({"type": "array", "items": {"items": ODD}}, '"not"', "/items/items/not"),
        ({"anyOf": [{"type": "null"}, ODD]}, '"not"', "/anyOf/1/not"),
        ({"additionalProperties": ODD}, '"not"', "/additionalProperties/not"),
        ({"patternProperties": {"^a": ODD}}, '"not"', "/patternProperties/^a/not"),
        ({"$ref": "#/$defs/x"}, '"$ref" refers to #/$defs/x, which the schema does not', "/$ref"),
        ({"$ref": "http://a/b"}, "'http://a/b' is not in the schema, and nothing is", "/$ref"),
        (
            {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
            '"oneOf" is not supported where an answer may match more than one',
            "/oneOf",
        ),
    ],
)
def test_a_schema_s_fault_has_a_place(age: Any, reason: str, pointer: str) -> None:
    said = refusal(json=person(age))
    assert said.startswith(f"structured_outputs.json cannot be followed: {reason}")
    assert said.endswith(f", at {AGE}{pointer}")


def test_a_fault_that_shows_as_an_answer_is_followed_has_a_place() -> None:
    many = {f"p{at}": {"type": "boolean"} for at in range(1_500)}
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": many}}}
    said = refusal(json=schema | {"required": ["a"]}, disable_any_whitespace=True)
    assert said.endswith("optional properties of an object, at #/properties/a")


def test_the_place_of_a_definition_is_where_it_is_defined() -> None:
    schema = {
        "properties": {"a": {"items": {"$ref": "#/$defs/some%20day"}}, "b": {"$ref": "#"}},
        "$defs": {"unused": ODD, "some day": {"properties": {"x": {"$ref": "#/$defs/y"}}}},
    }
    schema["$defs"]["y"] = {"type": "string", "pattern": "("}  # type: ignore[index]
    assert refusal(json=schema).endswith(": (, at #/$defs/y/pattern")


def test_a_schema_within_itself_is_not_the_place_of_its_own_fault() -> None:
    said = refusal(json={"properties": {"child": {"$ref": "#"}, "b": ODD}})
    assert said.endswith('"not" is not supported, at #/properties/b/not')


def test_what_must_not_be_is_no_fault() -> None:
    never = {"properties": {"a": False, "b": {"items": False}, "c": ODD}}
    assert refusal(json=never).endswith(", at #/properties/c/not")


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft-07/schema#"])
def test_older_drafts_of_the_standard(draft: str) -> None:
    schema = {
        "$schema": f"http://json-schema.org/{draft}",
        "items": [{"$ref": "#/definitions/q"}],
        "definitions": {"q": {"type": "string", "pattern": "("}},
    }
    assert refusal(json=schema).endswith(", at #/definitions/q/pattern")


def test_the_pattern_of_white_space_is_named_itself() -> None:
    said = refusal(json={"type": "object"}, whitespace_pattern="(")
    assert said.startswith("structured_outputs.whitespace_pattern cannot be followed: unclosed")


def test_a_structure_s_schema_is_named_by_its_number() -> None:
    structures = [
        {"begin": f"<{at}>", "schema": schema, "end": "."} for at, schema in enumerate([{}, ODD])
    ]
    said = refusal(structural_tag={"structures": structures, "triggers": ["<"]})
    assert said.endswith('cannot be followed: "not" is not supported, at #/structures/1/schema/not')


# What is too large, and what only has such a word in it


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_how_deep_a_schema_may_be() -> None:
    form = StructuredOutputsParams(json=nested(124)).form
    GrammarCompiler(VOCABULARY).matcher(form)
    assert refusal(json=nested(125)) == (
        "structured_outputs.json cannot be followed: it is too deep; allowed: 124 objects and "
        "lists within one another"
    )


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": REPEATS}, "it is too large, such as by repeats of repeats (lexer error: too"),
        (
            {"json": {"allOf": [{"properties": {f"p{at}": {}}} for at in range(500)]}},
            "it is too large, such as by repeats of repeats (schema too large), at #/allOf",
        ),
        (
            {"json": {"type": "number", "multipleOf": 1e-30}},
            "Value for 'multipleOf' has too many digits: 10000000000000008, at #/multipleOf",
        ),
        (
            {"grammar": 'start: "a"{1,99999999999999}'},
            "error parsing signed integer: number too large to fit in target type",
        ),
        ({"grammar": "start: too_many_limits"}, 'unknown name: "too_many_limits", at line 1'),
    ],
)
def test_too_large_is_said_of_what_is_too_large(form: dict[str, Any], reason: str) -> None:
    assert refusal(**form).partition("cannot be followed: ")[2].startswith(reason)


def test_the_search_is_bounded() -> None:
    schema = {"properties": {f"p{at}": {"type": "null"} for at in range(99)} | {"q": ODD}}
    tried: list[str] = []

    def refuse(text: str) -> str:
        tried.append(text)
        return "odd" if "not" in json.loads(text) or "properties" in text else ""

    assert find_fault(json.dumps(schema), "odd", refuse, tries=40).pointer == "#"
    assert len(tried) == 40
    assert find_fault(json.dumps(schema), "odd", refuse, tries=400).pointer == "#/properties/q/not"


def test_a_place_is_searched_for_no_longer_than_it_is_worth() -> None:
    """One definition that is spelled in 850 ways was written out 850 times, and tried as often."""
    spelled = [
        "#/$defs/" + "".join(f"%{ord(one):02x}" if at >> bit & 1 else one for bit, one in letters)
        for letters in [list(enumerate("abcdefghij"))]
        for at in range(850)
    ]
    part = {**ODD, "anyOf": [{"$ref": pointer} for pointer in spelled]}
    schema = {"$defs": {"abcdefghij": {"enum": ["x" * 30_000]}}, "properties": {"p": part}}
    tried: list[str] = []

    def refuse(text: str) -> str:
        tried.append(text)
        return "Unimplemented keys" if '"not"' in text else ""

    fault = find_fault(json.dumps(schema), "Unimplemented keys", refuse, tries=2_000)
    assert fault.pointer == "#/properties/p/not"
    assert len(tried) < 20 and sum(map(len, tried)) < 2**20


def test_a_definition_that_is_tried_alone_is_cut_short_where_it_is_large() -> None:
    large = {"enum": ["x" * 2**20]}
    schema = {"$defs": {"large": large}, "properties": {"p": {**ODD, "$ref": "#/$defs/large"}}}
    fault = find_fault(json.dumps(schema), "odd", lambda text: "odd", tries=2_000)
    assert fault.pointer == "#"


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"$schema": "http://foo", "properties": {"a": {"type": "string"}}}, "#/$schema"),
        ({"properties": {"z": {"$ref": "#/allOf/-1"}}, "allOf": [{}]}, "#"),
        ({"properties": {"a\nb\u202e": ODD}}, "#/properties/a\\u000ab\\u202e/not"),
        ({"properties": {"a": {"multipleOf": 982_451_653}}}, "#/properties/a/multipleOf"),
    ],
)
def test_odd_places_are_told_in_one_line(schema: dict[str, Any], pointer: str) -> None:
    said = refusal(json=schema)
    assert said.endswith(f", at {pointer}")
    assert said.isprintable()


@pytest.mark.parametrize("value", [982_451_653, 1_000_003, 1.000003, 1e300, 10**9])
def test_too_many_remainders_are_refused_at_once(value: float) -> None:
    """Their masks took minutes, and nothing could stop that."""
    assert '"multipleOf" is' in refusal(json={"multipleOf": value})


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" %json {"type": "integer", "multipleOf": 99999989}',
        'start: a b\na: %json{"multipleOf":997}\nb: %json {"items": {"multipleOf": 991}}',
    ],
)
def test_schemas_within_a_grammar_are_held_to_the_same(grammar: str) -> None:
    """Two such requests held all threads for forms, for ever, and took gigabytes."""
    assert '"multipleOf" is' in refusal(grammar=grammar)


def test_a_name_that_is_spelled_in_escapes_is_the_same_name() -> None:
    assert '"multipleOf" is' in refusal(json='{"multiple\\u004ff": 99999989}')


def test_numbers_that_have_to_be_multiples_of_several_are_counted_together() -> None:
    parts = [{"multipleOf": value} for value in (997, 991)]
    assert "with others beside it" in refusal(json={"type": "integer", "allOf": parts})
    apart = {"type": "object", "properties": dict(zip("ab", parts, strict=True))}
    check_form(StructuredOutputsParams(json=apart).form)


@pytest.mark.parametrize("start", ["?start:", "!start:", "start[lazy]:", "start :"])
def test_all_of_lark_s_starts_are_lark(start: str) -> None:
    check_form(StructuredOutputsParams(grammar=f'{start} "a" | "b"').form)


def test_what_the_library_says_in_several_lines_is_one_sentence() -> None:
    assert refusal(regex="(?P<n>a)(?P<n>b)").endswith(
        "duplicate capture group name at character 5 of the expression: (?P<n>a)(?P<n>b)"
    )
    panic = 'start: list::0x0\nlist::_: "a" list::set_bit(0)'
    assert "backtrace" not in refusal(grammar=panic)


@pytest.mark.parametrize(
    "hold", [lambda ref: ref, lambda ref: {"properties": {"a": ref, "b": True}, "type": "object"}]
)
def test_a_fault_at_the_end_of_a_long_chain_has_its_place(hold: Any) -> None:
    """Each schema of the chain was tried with the rest of it, until the time was over."""
    length, tried = 500, []

    def refuse(text: str) -> str:
        tried.append(text)
        return "Invalid type" if "strng" in text else ""

    chain = {f"d{at}": hold({"$ref": f"#/$defs/d{at + 1}"}) for at in range(length)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{length}": {"type": "strng"}}}
    fault = find_fault(json.dumps(schema), "Invalid type", refuse, tries=2_000)
    assert fault.pointer == f"#/$defs/d{length}/type"
    assert len(tried) < 20
