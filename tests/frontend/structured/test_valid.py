"""Structured answers of any model are valid according to other validators.

An answer that `max_tokens` cuts off is not checked, so enough of them must finish.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.errors import RequestError

Schema = dict[str, Any]
Form = tuple[int, dict[str, Any]]
"""A seed, and the fields of StructuredOutputsParams."""

KEYS = st.sampled_from(["a", "b", "name", "é", 'quo"te', "with space", "𝄞"])
CONSTANTS = st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab é"\\\n🙂', max_size=4)


def ranges(low: str, high: str, most: int) -> SearchStrategy[Schema]:
    """Draw two bounds in order; either may be missing."""
    both = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    return both.flatmap(lambda pair: st.sampled_from([dict(zip((low, high), pair, strict=True))]))


def integers() -> SearchStrategy[Schema]:
    return ranges("minimum", "maximum", 10**4).map(lambda bounds: {"type": "integer", **bounds})


def texts() -> SearchStrategy[Schema]:
    patterns = st.sampled_from(["^[a-c]{2,4}$", "^x|y$", "^[0-9]+-[^a]$", "^[0-9]{2}$"])
    bounded = ranges("minLength", "maxLength", 6).map(lambda bounds: {"type": "string", **bounds})
    return bounded | patterns.map(lambda pattern: {"type": "string", "pattern": pattern})


def objects(inner: SearchStrategy[Schema]) -> SearchStrategy[Schema]:
    def close(properties: dict[str, Schema]) -> SearchStrategy[Schema]:
        required = (
            st.lists(st.sampled_from(sorted(properties)), unique=True)
            if properties
            else st.just([])
        )
        return required.map(
            lambda names: {
                "type": "object",
                "properties": properties,
                "required": names,
                "additionalProperties": False,
            }
        )

    return st.dictionaries(KEYS, inner, max_size=3).flatmap(close)


def arrays(inner: SearchStrategy[Schema]) -> SearchStrategy[Schema]:
    return st.builds(
        lambda items, bounds: {"type": "array", "items": items, **bounds},
        inner,
        ranges("minItems", "maxItems", 3),
    )


LEAVES = (
    integers()
    | texts()
    | st.just({"type": "boolean"})
    | st.just({"type": "null"})
    | st.just({"type": ["integer", "null"], "maximum": 7})
    | st.lists(CONSTANTS, min_size=1, max_size=3).map(lambda values: {"enum": values})
    | CONSTANTS.map(lambda value: {"const": value})
)
TREES: SearchStrategy[Schema] = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    ),
    max_leaves=6,
)


def refer(schema: Schema) -> Schema:
    """Return the schema, or nested lists of it."""
    more = {"anyOf": [{"$ref": "#/$defs/it"}, {"$ref": "#/$defs/some"}]}
    some = {"type": "array", "items": {"$ref": "#/$defs/more"}, "maxItems": 2}
    return {"$ref": "#/$defs/more", "$defs": {"it": schema, "more": more, "some": some}}


SCHEMAS = TREES | TREES.map(refer)


AT_ONCE = 10
"""Constraints that are answered in one batch."""


def answer(llm: LLM, tally: Counter[str], forms: Sequence[Form]) -> list[tuple[Form, list[str]]]:
    """Return each constraint with the texts of its finished answers, greedy and sampled."""
    params = [
        SamplingParams(
            max_tokens=90, n=n, seed=seed, temperature=temperature,
            structured_outputs=StructuredOutputsParams(**form),
        )
        for seed, form in forms
        for n, temperature in ((3, 1.0), (1, 0.0))
    ]  # fmt: skip
    outputs = llm.generate(["the other day"] * len(params), params, use_tqdm=False)
    results = []
    for form, drawn, greedy in zip(forms, outputs[::2], outputs[1::2], strict=True):
        answers = [*drawn.outputs, *greedy.outputs]
        finished = [completion.text for completion in answers if completion.finish_reason == "stop"]
        tally["all"] += len(answers)
        tally["finished"] += len(finished)
        results.append((form, finished))
    return results


def several(forms: SearchStrategy[dict[str, Any]]) -> SearchStrategy[list[Form]]:
    """Draw the constraints of one batch, each with a seed."""
    return st.lists(st.tuples(st.integers(0, 99), forms), min_size=AT_ONCE, max_size=AT_ONCE)


def test_json_is_valid_under_its_schema(writer: LLM) -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=30 // AT_ONCE)
    @given(
        several(st.fixed_dictionaries({"json": SCHEMAS, "disable_any_whitespace": st.booleans()}))
    )
    def check(forms: list[Form]) -> None:
        for (_, form), texts in answer(writer, tally, forms):
            jsonschema.Draft202012Validator.check_schema(form["json"])
            judge = jsonschema.Draft202012Validator(form["json"])
            for text in texts:
                judge.validate(json.loads(text))

    check()
    assert tally["finished"] > 0.6 * tally["all"], tally


def test_any_object_is_valid(writer: LLM) -> None:
    tally: Counter[str] = Counter()
    for _, texts in answer(writer, tally, [(seed, {"json_object": True}) for seed in range(6)]):
        for text in texts:
            assert isinstance(json.loads(text), dict)
    assert tally["finished"] > 2, tally


# Both Python's `re` and llguidance read these, and mean the same: `\d` has more digits in a
# newer Unicode.
ATOMS = st.sampled_from(["a", "é", "[0-9]", "[a-cx]", "[^a\\n]", "\\.", "🙂", ".", "/", "\n", '"'])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds(str.__add__, inner, inner)
        | st.builds("({}|{})".format, inner, inner)
        | st.builds("({}){}".format, inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"]))
    ),
    max_leaves=6,
)


def test_an_answer_matches_its_regular_expression(writer: LLM) -> None:
    tally: Counter[str] = Counter()
    drops_space = (
        not writer.get_tokenizer().decode(writer.get_tokenizer().encode(" a")).startswith(" ")
    )  # type: ignore[union-attr]

    @settings(max_examples=30 // AT_ONCE)
    @given(several(st.fixed_dictionaries({"regex": REGEXES})))
    def check(forms: list[Form]) -> None:
        for (_, form), texts in answer(writer, tally, forms):
            for text in texts:
                spaced = drops_space and re.fullmatch(form["regex"], " " + text)
                assert spaced or re.fullmatch(form["regex"], text)

    check()
    assert tally["finished"] > 0.6 * tally["all"], tally


def test_an_answer_is_one_of_the_choices(writer: LLM) -> None:
    tally: Counter[str] = Counter()

    words = st.text('abé🙂"\\\n|/ ', max_size=6).map(lambda text: f"x{text}")

    @settings(max_examples=20 // AT_ONCE)
    @given(several(st.fixed_dictionaries({"choice": st.lists(words, min_size=1)})))
    def check(forms: list[Form]) -> None:
        for (_, form), texts in answer(writer, tally, forms):
            assert set(texts) <= set(form["choice"])

    check()
    assert tally["finished"] == tally["all"]


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'])
def test_an_answer_matches_a_context_free_grammar(writer: LLM, grammar: str) -> None:
    """Balanced parentheses are not a regular language."""
    tally: Counter[str] = Counter()
    lengths = set()
    for _, texts in answer(writer, tally, [(seed, {"grammar": grammar}) for seed in range(15)]):
        for text in texts:
            depth = len(text) // 2
            assert text == "(" * depth + "x" + ")" * depth
            lengths.add(depth)
    assert len(lengths) > 2


def test_answers_with_a_bias_and_bad_words_are_valid(writer: LLM) -> None:
    """With other changes of logits no answer is invalid; some end with an error."""
    tokenizer = writer.get_tokenizer()
    assert tokenizer is not None
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    end = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    [output] = writer.generate(
        "the",
        SamplingParams(
            max_tokens=60, n=4, seed=1, structured_outputs=form, logit_bias={end: 100, 5: 50},
            logits_processors=[lambda past, logits: logits * 0],
        ),
    )  # fmt: skip
    for completion in output.outputs:
        assert (
            completion.finish_reason == "length"
            or jsonschema.validate(json.loads(completion.text), schema) is None
        )
    params = SamplingParams(structured_outputs=form, allowed_token_ids=[end])
    with pytest.raises(RequestError, match="allowed_token_ids and structured_outputs"):
        writer.generate("the", params)
