"""Constraints at the limits of llguidance: they work, or are refused before any work."""

import re
from typing import Any

import pytest

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.engine.logits import Vocabulary
from headstart.errors import EngineError, RequestError
from headstart.frontend.grammar import GrammarCompiler
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZER = TINY_TOKENIZERS["byte_level"]()
REPEATS = "((a{100}){100}){100}"


def optional_properties(count: int) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "boolean"} for number in range(count)}
    return {"json": {"type": "object", "properties": properties, "additionalProperties": False}}


def ask(llm: LLM, form: dict[str, Any], **options: Any) -> str:
    params = SamplingParams(
        **{"max_tokens": 40, "seed": 1, **options},
        structured_outputs=StructuredOutputsParams(**form),
    )
    [output] = llm.generate("the other day", params, use_tqdm=False)
    return output.outputs[0].text


def test_five_thousand_choices_are_supported(writer: LLM) -> None:
    """Earlier, the second step failed: each choice was a separate rule, and 2,000 may apply."""
    choices = [f"product number {number}" for number in range(5_000)]
    assert ask(writer, {"choice": choices}) in choices


def test_seven_hundred_optional_properties_are_supported(writer: LLM) -> None:
    assert re.match(r'\{\s*("p\d+|\}|$)', ask(writer, optional_properties(700)))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (optional_properties(1_500), r"Current row has \d+ items; max is 4100"),
        ({"regex": REPEATS}, "too many expressions"),
        ({"choice": ["x" * 2**20]}, "has 1,048,580 bytes; allowed: 1,048,576 at most"),
    ],
    ids=["properties", "repeats", "bytes"],
)
def test_constraints_beyond_the_limits_are_refused_before_any_work(
    writer: LLM, form: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs.*{reason}"):
        ask(writer, form)
    assert not writer.engine.has_unfinished


def test_a_limit_reached_late_ends_only_its_answer(writer: LLM) -> None:
    """The trial answer is too short to reach this limit."""
    digits = {"type": "string", "pattern": "^[0-9]{200}$"}
    late = {"a": digits, "b": optional_properties(1_500)["json"]}
    form = StructuredOutputsParams(
        json={"type": "object", "properties": late, "required": ["a", "b"]},
        disable_any_whitespace=True,
    )
    runs, plain = writer.engine, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    bound = SamplingParams(temperature=0, max_tokens=250, structured_outputs=form)
    [alone] = writer.generate([[5, 6]], plain, use_tqdm=False)
    groups = [writer.frontend.prepare([5, 6], params) for params in (bound, plain)]
    for group in groups:
        runs.submit(group)
    errors: list[EngineError | None] = []
    while runs.has_unfinished:
        errors += [result.error for result in runs.step() if result.group.finished]
    assert errors[0] is None and re.match(
        r"structured_outputs could not be followed to the answer's end: .*max is 4100",
        str(errors[1]),
    )
    assert groups[1].output().outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("text", ["", "a", "ab", "\n\t\0x", '"\\', "/.*/", "é😀", "$^{1}"])
def test_a_choice_is_literal(text: str) -> None:
    """A choice is literal: no character has a special meaning."""
    form = StructuredOutputsParams(choice=["", "a", "ab", text]).constraint
    matcher = GrammarCompiler(Vocabulary(TOKENIZER, len(TOKENIZER), frozenset())).matcher(form)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()
    [other] = TOKENIZER.encode("b", add_special_tokens=False)
    assert bool(matcher.validate_tokens([other])) == (text == "a")
