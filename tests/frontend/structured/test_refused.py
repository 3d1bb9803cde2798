"""Refused constraints: by headstart's limits, or with llguidance's message in one line."""

from typing import Any

import pytest

from headstart import StructuredOutputsParams
from headstart.engine.logits import Vocabulary
from headstart.errors import RequestError
from headstart.frontend.grammar import GrammarCompiler, check_constraint
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZER = TINY_TOKENIZERS["byte_level"]()
VOCABULARY = Vocabulary(TOKENIZER, len(TOKENIZER), frozenset())


def refusal(**form: Any) -> str:
    """Return the error for a constraint; if the check without a model refuses it, compare both."""
    wanted = StructuredOutputsParams(**form).constraint
    with pytest.raises(RequestError) as caught:
        GrammarCompiler(VOCABULARY).matcher(wanted)
    try:
        check_constraint(wanted)
    except RequestError as error:
        assert str(error) == str(caught.value)
    return str(caught.value)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def test_the_depth_of_a_schema_is_bounded() -> None:
    GrammarCompiler(VOCABULARY).matcher(StructuredOutputsParams(json=nested(124)).constraint)
    assert "recursion limit exceeded" in refusal(json=nested(125))


def test_a_constraint_with_too_many_first_tokens_is_refused() -> None:
    many = {f"p{i}": {"type": "boolean"} for i in range(1_500)}
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": many}}}
    error = refusal(json=schema | {"required": ["a"]}, disable_any_whitespace=True)
    assert "max is 4100" in error


def test_the_pattern_of_white_space_is_bounded() -> None:
    assert "unclosed group" in refusal(json={"type": "object"}, whitespace_pattern="(")


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"properties": {"a\nb\u202e": {"not": {}}}}},
        {"regex": "(?P<n>a)(?P<n>b)"},
        {"grammar": 'start: list::0x0\nlist::_: "a" list::set_bit(0)'},  # llguidance panics
    ],
)
def test_a_message_of_several_lines_becomes_one(form: dict[str, Any]) -> None:
    error = refusal(**form)
    assert error.isprintable() and "backtrace" not in error


@pytest.mark.parametrize("value", [982_451_653, 1_000_003, 1.000003, 1e300, 10**9])
def test_too_many_remainders_are_refused_at_once(value: float) -> None:
    """Earlier, their masks took minutes, and the computation could not be stopped."""
    assert '"multipleOf" is' in refusal(json={"multipleOf": value})


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" %json {"type": "integer", "multipleOf": 99999989}',
        'start: a b\na: %json{"multipleOf":997}\nb: %json {"items": {"multipleOf": 991}}',
    ],
)
def test_schemas_within_a_grammar_have_the_same_limits(grammar: str) -> None:
    """Earlier, two such requests occupied all threads that compile, and took gigabytes."""
    assert '"multipleOf" is' in refusal(grammar=grammar)


def test_a_name_with_escapes_is_the_same_name() -> None:
    assert '"multipleOf" is' in refusal(json='{"multiple\\u004ff": 99999989}')


def test_combined_multiples_are_limited() -> None:
    parts = [{"multipleOf": value} for value in (997, 991)]
    assert "least common multiple with other values" in refusal(
        json={"type": "integer", "allOf": parts}
    )
    apart = {"type": "object", "properties": dict(zip("ab", parts, strict=True))}
    check_constraint(StructuredOutputsParams(json=apart).constraint)


@pytest.mark.parametrize("start", ["?start:", "!start:", "start[lazy]:", "start :"])
def test_all_starts_of_lark_grammars_are_recognized(start: str) -> None:
    check_constraint(StructuredOutputsParams(grammar=f'{start} "a" | "b"').constraint)
