"""Constraints on an answer, with vLLM's names. Imports no torch."""

import json as json_text
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from headstart.errors import RequestError
from headstart.validation import OneOf, check_fields, check_utf8, describe, option, shorten

MAX_BYTES = 65_536
# Larger than `MAX_BYTES`, since choices form one terminal, and its length does not slow down masks.
MAX_CHOICE_BYTES = 2**20
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ANY_OBJECT = '{"type": "object"}'
WHITESPACE = r"[ \t]|\r?\n[ \t]{0,20}"
"""Default white space between JSON's tokens: a space, or a line's end and some indentation. The
limit prevents small models from writing white space forever."""


class OutputConstraint(NamedTuple):
    """A constraint as text. Compiled grammars are cached by constraint.

    kind: json, regex, choice (a JSON list), grammar or structural_tag. whitespace: a regular
    expression for the white space between JSON's tokens; "" allows no white space.
    """

    kind: str
    text: str
    whitespace: str = ""


class Accepting(NamedTuple):
    """The values for which `accepts` is True, and their description in errors."""

    accepts: Callable[[Any], bool]
    text: str

    def __contains__(self, value: object) -> bool:
        return self.accepts(value)

    def __str__(self) -> str:
        return self.text


def _is_choice(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_list and len(value) > 0 and all(isinstance(text, str) for text in value)


_TEXT = Accepting(
    lambda value: isinstance(value, str) and "\0" not in value, "a string without U+0000"
)
_GRAMMAR = Accepting(lambda value: value in _TEXT and value.strip() != "", f"{_TEXT}, not blank")
_CHOICE = Accepting(_is_choice, "a list of at least one string")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The constraint of an answer: exactly one of the following six. Raises RequestError.

    json: a JSON schema as a dict or as text, or a pydantic model. regex: a regular expression that
    the whole answer matches. choice: the allowed answers. grammar: a context-free grammar in Lark's
    or GBNF's notation. json_object: True for any JSON object. structural_tag: free text with parts
    in JSON, see `read_tags`.

    Between JSON's tokens there may be a space, or a line's end and indentation.
    disable_any_whitespace forbids this; whitespace_pattern, a regular expression, replaces it. With
    disable_additional_properties, objects with listed properties allow no other properties, unless
    the schema sets additionalProperties.

    >>> StructuredOutputsParams(choice=["yes", "no"]).constraint.text
    '["yes", "no"]'
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = option(None, allowed=_TEXT)
    choice: Sequence[str] | None = option(None, allowed=_CHOICE)
    grammar: str | None = option(None, allowed=_GRAMMAR)
    json_object: bool | None = option(None, allowed=OneOf((True,)))
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = option(None, allowed=_TEXT)
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in _KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(kinds) or 'no constraint'}; allowed: "
                f"exactly one of {', '.join(_KINDS)}"
            )
        check_fields(self, RequestError, "structured_outputs.")
        size = check_utf8(f"structured_outputs.{kinds[0]}", self.constraint.text)
        limit = MAX_BYTES if self.choice is None else MAX_CHOICE_BYTES
        if size > limit:
            raise RequestError(
                f"structured_outputs.{kinds[0]} has {size:,} bytes; allowed: {limit:,} at most"
            )

    @property
    def constraint(self) -> OutputConstraint:
        """The constraint as text."""
        pattern = WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern
        whitespace = "" if self.disable_any_whitespace else pattern
        if self.json_object is not None:
            return OutputConstraint("json", _ANY_OBJECT, whitespace)
        schema_text = partial(_schema_text, is_closed=self.disable_additional_properties)
        if self.json is not None:
            return OutputConstraint("json", schema_text(self.json), whitespace)
        if self.structural_tag is not None:
            return OutputConstraint(
                "structural_tag", read_tags(self.structural_tag, schema_text), whitespace
            )
        if self.regex is not None:
            return OutputConstraint("regex", self.regex)
        if self.choice is not None:
            return OutputConstraint(
                "choice", json_text.dumps(list(self.choice), ensure_ascii=False)
            )
        assert self.grammar is not None
        return OutputConstraint("grammar", self.grammar)


def _schema_text(schema: Any, *, is_closed: bool) -> str:
    """Return a JSON schema as text. Raises RequestError for a value of another type.

    is_closed: objects may only have the properties that the schema lists.
    """
    try:
        if isinstance(schema, str):
            parsed = json_text.loads(schema)
        else:
            make_schema = getattr(schema, "model_json_schema", None)  # pydantic's models
            parsed = make_schema() if callable(make_schema) else schema
        text = json_text.dumps(parsed, ensure_ascii=False, allow_nan=False)
        if is_closed or '"format"' in text:
            adapted = adapt_schema(parsed, is_closed=is_closed)
            text = json_text.dumps(adapted, ensure_ascii=False, allow_nan=False)
    except Exception as error:  # RecursionError, or any exception of a caller's class
        raise RequestError(
            f"structured_outputs.json is {describe(schema)}; allowed: a JSON schema "
            f"({type(error).__name__}: {shorten(str(error))})"
        ) from error
    if not isinstance(parsed, Mapping):
        raise RequestError(
            f"structured_outputs.json is {describe(schema)}; allowed: a JSON schema that is an "
            "object"
        )
    return text


FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "time", "unknown", "uri", "uuid"),
    }
)
"""Formats of strings that llguidance enforces."""

# Keywords whose values are data, and keywords whose values are schemas by name.
_DATA = ("const", "default", "enum", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def adapt_schema(schema: Any, *, is_closed: bool = False) -> Any:
    """Return the schema without formats that llguidance refuses; formats are only annotations.

    is_closed: add `additionalProperties: false` to objects that list properties and do not set it.
    """
    adapt = partial(adapt_schema, is_closed=is_closed)
    if isinstance(schema, (list, tuple)):
        return [adapt(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    adapted: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            adapted[key] = {name: adapt(item) for name, item in value.items()}
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            adapted[key] = value if key in _DATA else adapt(value)
    if is_closed and {"properties", "patternProperties"} & adapted.keys():
        adapted.setdefault("additionalProperties", False)
    return adapted


_ALLOWED = (
    'allowed: {"structures": [{"begin": a string, "schema": a JSON schema, "end": a string}, ...], '
    '"triggers": [a string, ...]}, as a dict or as text'
)


class _Tag(NamedTuple):
    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


def read_tags(tags: Any, read_schema: Callable[[Any], str]) -> str:
    """Return structural tags as text, each structure with its trigger. Raises RequestError.

    Structural tags are free text in which a trigger begins a constrained part:

        {"structures": [{"begin": "<get_weather>", "schema": {...}, "end": "</get_weather>"}],
         "triggers": ["<get_"]}

    After a trigger, the text must complete a structure whose `begin` starts with the trigger.

    read_schema: converts a schema to text, or raises RequestError.
    """
    try:
        parsed = json_text.loads(tags) if isinstance(tags, str) else tags
        structures, triggers = parsed["structures"], parsed["triggers"]
        texts = [*triggers, *(part[name] for part in structures for name in ("begin", "end"))]
        if not structures or not all(isinstance(text, str) for text in texts):
            raise ValueError("it has no structure, or a value that is not a string")
        pairs = []
        for part in structures:
            begin = part["begin"]
            trigger = next((t for t in triggers if t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"{begin!r} begins with none of the triggers")
            pairs.append(
                _Tag(trigger, begin, json_text.loads(read_schema(part["schema"])), part["end"])
            )
    except Exception as error:  # a malformed value may raise any exception
        raise RequestError(
            f"structured_outputs.structural_tag is {describe(tags)}; {_ALLOWED} "
            f"({type(error).__name__}: {shorten(str(error))})"
        ) from error
    return json_text.dumps(pairs, ensure_ascii=False)


def write_tags(text: str, whitespace: str, special: Mapping[str, int]) -> str:
    """Return the result of `read_tags` as a grammar of llguidance.

    special: ids of special tokens by name. Raises RequestError for a trigger that has a special
    token anywhere but at its beginning.
    """
    spacing: dict[str, Any] = {"whitespace_flexible": whitespace != ""}
    if whitespace:
        spacing["whitespace_pattern"] = whitespace
    tags = [_Tag(*tag) for tag in json_text.loads(text)]
    choices = " | ".join(f"tag_{index}" for index in range(len(tags)))
    rules = [f"start: ({choices})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    for index, tag in enumerate(tags):
        schema = json_text.dumps({**tag.schema, "x-guidance": spacing}, ensure_ascii=False)
        token = next((name for name in special if tag.trigger.startswith(name)), None)
        if token is not None:
            head = f"TEXT {lark_text(token, special)}"
        elif any(name in tag.trigger for name in special):
            raise RequestError(
                f"structured_outputs.structural_tag has the trigger {tag.trigger!r}; allowed: a "
                "trigger that begins with its special token, or contains no special token"
            )
        else:
            head = f"trigger_{index}"
            rules.append(f"trigger_{index}[lazy]: TEXT {json_text.dumps(tag.trigger)}")
        opening = lark_text(tag.begin[len(token or tag.trigger) :], special)
        rules.append(f"tag_{index}: {head} {opening} %json {schema} {lark_text(tag.end, special)}")
    return "\n".join(rules)


def lark_text(text: str, special: Mapping[str, int]) -> str:
    """Return a string as Lark terminals; special tokens become their ids."""
    tokens = sorted((token for token in special if token in text), key=len, reverse=True)
    if not tokens:
        return json_text.dumps(text) if text else ""
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    terminals = [f"<[{special[p]}]>" if p in special else json_text.dumps(p) for p in parts if p]
    return " ".join(terminals)
