"""Structured outputs: refusals, ends of answers, and no effect on other requests."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pydantic
import pytest

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.engine.logits import Vocabulary
from headstart.engine.outputs import CompletionOutput
from headstart.engine.structured_outputs import OutputConstraint
from headstart.errors import RequestError
from headstart.frontend import grammar
from headstart.frontend.grammar import GrammarCompiler
from tests.forked import run_program
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZER = TINY_TOKENIZERS["byte_level"]()
END = 382


def answers(llm: LLM, form: dict[str, Any], **options: Any) -> list[CompletionOutput]:
    params = SamplingParams(
        **{"max_tokens": 80, "seed": 1, **options},
        structured_outputs=StructuredOutputsParams(**form),
    )
    [output] = llm.generate("the other day", params, use_tqdm=False)
    return output.outputs


def special(llm: LLM, name: str) -> int:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    token_id = tokenizer.convert_tokens_to_ids(name)
    assert isinstance(token_id, int)
    return token_id


def test_white_space_is_bounded(writer: LLM) -> None:
    """Earlier, a model that prefers white space filled its answer with it."""
    tokenizer = writer.get_tokenizer()
    assert tokenizer is not None
    blank = {i: 100.0 for i in range(len(tokenizer)) if not tokenizer.decode([i]).strip()}
    schema = {
        "type": "object",
        "properties": {"warm": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["warm", "kind"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {"logit_bias": blank, "temperature": 0, "max_tokens": 400}
    [bounded] = answers(writer, {"json": schema}, **options)
    assert bounded.finish_reason == "stop"
    assert json.loads(bounded.text).keys() == {"warm", "kind"}
    assert any(character.isspace() for character in bounded.text)
    [endless] = answers(writer, {"json": schema, "whitespace_pattern": r"[ \t\r\n]+"}, **options)
    assert endless.finish_reason == "length"
    [none] = answers(writer, {"json": schema, "disable_any_whitespace": True}, **options)
    assert none.text == "".join(none.text.split())


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_indented_json_is_allowed(indent: int | str | None) -> None:
    form = StructuredOutputsParams(json={"type": "object"}).constraint
    matcher = GrammarCompiler(Vocabulary(TOKENIZER, len(TOKENIZER), frozenset())).matcher(form)
    value = {"a": [1, {"b": None}, []], "c": {"d": {"e": "f"}}}
    for token_id in TOKENIZER.encode(json.dumps(value, indent=indent), add_special_tokens=False):
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()


# Refusals


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json_object": True, "choice": ["a"]},
        {"json_object": False},
        {"json_object": 1},
        {"json": ""},
        {"json": "[1]"},
        {"json": True},
        {"json": "{"},
        {"json": 5},
        {"json": {"enum": {1}}},
        {"json": {"const": float("nan")}},
        {"json": int},
        {"regex": 5},
        {"regex": "a\0"},
        {"grammar": " "},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["a", 5]},
        {"choice": ["\ud800"]},
        {"regex": "a" * 65_537},
        {"json": {}, "disable_any_whitespace": 1},
        {"json": {}, "whitespace_pattern": 1},
    ],
)
def test_an_invalid_constraint_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs.*; allowed: |U\+D800"):
        StructuredOutputsParams(**options)


def test_an_endless_schema_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["items"] = endless
    with pytest.raises(RequestError, match="Circular reference"):
        StructuredOutputsParams(json=endless)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json": {"not": {"type": "string"}}}, r'Unimplemented keys: \["not"\]$'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"json": {"type": "number", "minimum": 3, "maximum": 1}},
            r"Unsatisfiable schema: minimum \(3\) is greater than maximum \(1\)$",
        ),
        ({"json": {"$ref": "#/$defs/none"}}, r"'/\$defs/none' does not exist"),
        ({"regex": "b(?=a)b"}, "look-around, .* is not supported"),
        ({"regex": "ä" * 70 + "(a"}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "NoExtension"),
        ({"grammar": "start: nothing"}, r'at 1\(8\): unknown name: "nothing"'),
        ({"grammar": "("}, "from GBNF to Lark: Expected name at line 1"),
        ({"grammar": 'root ::= "a" |\nb ::='}, "from GBNF to Lark: Expected name at line 2"),
        ({"grammar": "start: A\nA: /(x/"}, r"at 2\(4\): invalid regex .*unclosed group"),
        ({"choice": ["a<|im_end|>"]}, r"special token '<\|im_end\|>'"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_an_unsupported_constraint_is_refused_before_any_work(
    writer: LLM, form: dict[str, Any], reason: str
) -> None:
    """The valid prompt of the same call is not submitted either."""
    forms = [None, StructuredOutputsParams(**form)]
    params = [SamplingParams(structured_outputs=constraint) for constraint in forms]
    with pytest.raises(RequestError, match=f"^structured_outputs.* cannot be followed: .*{reason}"):
        writer.generate(["the"] * 2, params)
    assert not writer.engine.has_unfinished


DEEP = [
    "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"',
    "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
]


def test_a_deep_grammar_does_not_crash_the_process(tmp_path: Path) -> None:
    """llguidance overflowed a stack of 8 MB; a separate process may crash."""
    program = """
import json, sys
from contextlib import suppress
from headstart import StructuredOutputsParams
from headstart.engine.logits import Vocabulary
from headstart.frontend.grammar import GrammarCompiler
from headstart.errors import RequestError
from tests.tiny_tokenizers import TINY_TOKENIZERS
tokenizer = TINY_TOKENIZERS["byte_level"]()
compiler = GrammarCompiler(Vocabulary(tokenizer, len(tokenizer), frozenset()))
for number, text in enumerate(json.load(open(sys.argv[1]))):
    with suppress(RequestError):
        compiler.matcher(StructuredOutputsParams(grammar=text).constraint)
    print("alive after", number, flush=True)
"""
    texts = tmp_path / "grammars.json"
    texts.write_text(json.dumps(DEEP))
    done = run_program(program, texts)
    survived = "".join(f"alive after {number}\n" for number in range(len(DEEP)))
    assert done.stdout == survived, (done.returncode, done.stderr)


def test_a_model_without_a_tokenizer_has_no_constraints() -> None:
    compiler = GrammarCompiler(Vocabulary(None, 9, frozenset()))
    with pytest.raises(RequestError, match="has no tokenizer"):
        compiler.matcher(OutputConstraint("regex", "a"))


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(Vocabulary(TOKENIZER, 383, frozenset([END])))
    with pytest.raises(
        RequestError, match=r'pip install "\.\[structured\]" in the folder of the clone'
    ):
        compiler.matcher(OutputConstraint("regex", "a"))


# Types and compilation of constraints


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    "schema", [Person, Person.model_json_schema(), json.dumps(Person.model_json_schema())]
)
def test_a_schema_may_be_a_model_a_dict_or_a_text(schema: Any) -> None:
    form = StructuredOutputsParams(json=schema).constraint
    assert json.loads(form.text) == Person.model_json_schema()


def test_additional_properties_may_be_disabled() -> None:
    schema = {
        "type": "object",
        "properties": {
            "properties": {"type": "object", "properties": {"x": {}}},
            "open": {"properties": {}, "additionalProperties": True},
            "any": {"type": "object"},
            "list": {"items": [{"patternProperties": {"a": {}}}]},
        },
        "enum": [{"properties": 1}],
    }
    closed = json.loads(
        StructuredOutputsParams(json=schema, disable_additional_properties=True).constraint.text
    )
    assert closed.pop("additionalProperties") is False
    assert closed["properties"].pop("properties").pop("additionalProperties") is False
    assert closed["properties"]["list"]["items"][0].pop("additionalProperties") is False
    assert closed["properties"]["open"] == schema["properties"]["open"]
    assert closed["properties"]["any"] == {"type": "object"}
    assert closed["enum"] == schema["enum"]
    assert StructuredOutputsParams(json=schema).constraint.text == json.dumps(schema)


def test_a_constraint_is_compiled_once_and_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(Vocabulary(TOKENIZER, 383, frozenset([END])))
    threads: list[str] = []
    build = grammar._build

    def counted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return build(*arguments)

    monkeypatch.setattr(grammar, "_build", counted)
    first, second = (compiler.matcher(OutputConstraint("regex", "[ab]c")) for _ in range(2))
    assert threads == ["headstart-grammar"]
    assert first.consume_token(TOKENIZER.convert_tokens_to_ids("a"))
    assert not second.validate_tokens([TOKENIZER.convert_tokens_to_ids("c")])
    assert threading.stack_size() == 0, "threads of others have the stack that they had"


# Ends of answers


def test_an_answer_ends_when_no_token_can_follow(writer: LLM) -> None:
    """No further step is needed for an end-of-text token."""
    for answer in answers(writer, {"choice": ["yes", "no"]}, n=3):
        assert answer.finish_reason == "stop" and answer.stop_reason is None
        assert special(writer, "<|im_end|>") not in answer.token_ids


@pytest.mark.parametrize("options", [{}, {"min_tokens": 20}, {"ignore_eos": True}])
@pytest.mark.parametrize("form", [{"regex": ""}, {"choice": [""]}])
def test_an_empty_answer_is_allowed(
    writer: LLM, form: dict[str, Any], options: dict[str, Any]
) -> None:
    [answer] = answers(writer, form, **options)
    assert (answer.text, answer.finish_reason) == ("", "stop")


def test_eos_is_allowed_only_where_the_grammar_accepts(writer: LLM) -> None:
    end = special(writer, "<|im_end|>")
    [answer] = answers(writer, {"regex": "[ab]{7}[0-9]*"}, temperature=0, logit_bias={end: 100})
    assert len(answer.text) == 7 and set(answer.text) <= {"a", "b"}
    assert (answer.token_ids[-1], answer.finish_reason, answer.stop_reason) == (end, "stop", None)


def test_min_tokens_applies_while_the_grammar_continues(writer: LLM) -> None:
    bias = {special(writer, "<|im_end|>"): 100}
    [long] = answers(writer, {"regex": "[ab]+"}, min_tokens=20, logit_bias=bias)
    assert len(long.token_ids) == 21
    [short] = answers(writer, {"regex": "[ab]{3}"}, min_tokens=20, logit_bias=bias)
    assert len(short.text) == 3 and short.finish_reason == "stop"


def test_with_ignore_eos_an_answer_continues_within_the_grammar(writer: LLM) -> None:
    [answer] = answers(writer, {"regex": "[ab]+"}, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (80, "length")
    assert set(answer.text) == {"a", "b"}
    [answer] = answers(writer, {"regex": "[ab]{9}"}, ignore_eos=True)
    assert (len(answer.text), answer.finish_reason) == (9, "stop")


def test_an_answer_completed_by_its_last_token_is_not_cut_off(writer: LLM) -> None:
    [answer] = answers(writer, {"regex": "[0-9]{5}"}, max_tokens=5)
    assert (len(answer.token_ids), answer.finish_reason) == (5, "stop")


def test_stop_strings_and_stop_ids_end_a_constrained_answer(writer: LLM) -> None:
    [answer] = answers(writer, {"regex": "x{3}[ab]+"}, stop=["xa", "xb"])
    assert (answer.text, answer.finish_reason) == ("xx", "stop") and answer.stop_reason in (
        "xa",
        "xb",
    )
    start = special(writer, "<|im_start|>")
    [answer] = answers(
        writer, {"regex": "x{3}[ab]+"}, stop_token_ids=[start], logit_bias={start: 100}
    )
    assert (len(answer.text), answer.stop_reason) == (4, start)


def test_answers_of_one_request_have_separate_grammars(writer: LLM) -> None:
    completions = answers(writer, {"regex": "[a-z]{6}"}, n=6)
    assert len({completion.text for completion in completions}) > 1
    assert all(
        len(completion.text) == 6 and completion.text.islower() for completion in completions
    )


def test_log_probabilities_are_those_without_a_constraint(writer: LLM) -> None:
    [answer] = answers(writer, {"choice": ["xyz"]}, temperature=0, logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    [output] = writer.generate("the other day", plain, use_tqdm=False)
    assert answer.logprobs is not None and output.outputs[0].logprobs is not None
    free, bound = output.outputs[0].logprobs[0], answer.logprobs[0]
    assert {token_id: bound[token_id] for token_id in free} == free
    assert bound[answer.token_ids[0]].rank > 1
