"""Structural tags: free text, in which a trigger begins a part that has a form.

    {"structures": [{"begin": "<get_weather>", "schema": {...}, "end": "</get_weather>"}],
     "triggers": ["<get_"]}

Where the text has a trigger, one of the structures that begin with it follows, whole.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headstart.errors import RequestError
from headstart.validation import describe, shorten

__all__ = ["read_tags", "spell_text", "write_tags"]

_ALLOWED = (
    'allowed: {"structures": [{"begin": a text, "schema": a JSON schema, "end": a text}, ...], '
    '"triggers": [a text, ...]}, as a dict or as text'
)


class _Tag(NamedTuple):
    trigger: str
    begin: str
    schema: Mapping[str, Any]
    end: str


def read_tags(given: Any, read_schema: Callable[[Any], str]) -> str:
    """Tags as text, each structure with its trigger. Raises RequestError.

    read_schema: makes a schema text, or raises RequestError.
    """
    try:
        parsed = json.loads(given) if isinstance(given, str) else given
        structures, triggers = parsed["structures"], parsed["triggers"]
        texts = [*triggers, *(one[name] for one in structures for name in ("begin", "end"))]
        if not structures or not all(isinstance(text, str) for text in texts):
            raise ValueError("there must be a structure, and texts")
        found = [
            _Tag(
                _trigger_of(one["begin"], triggers),
                one["begin"],
                json.loads(read_schema(one["schema"])),
                one["end"],
            )
            for one in structures
        ]
    except Exception as error:  # whatever it is in the place of dicts and lists
        raise RequestError(
            f"structured_outputs.structural_tag is {describe(given)}; {_ALLOWED} "
            f"({type(error).__name__}: {shorten(str(error))})"
        ) from error
    return json.dumps(found, ensure_ascii=False)


def _trigger_of(begin: str, triggers: list[str]) -> str:
    for trigger in triggers:
        if trigger and begin.startswith(trigger):
            return trigger
    raise ValueError(f"{begin!r} begins with none of the triggers")


def write_tags(text: str, whitespace: str, special: Mapping[str, int]) -> str:
    """What `read_tags` made, as a grammar of llguidance's.

    special: ids of the tokens that spell no text. Raises RequestError for a trigger with one of
    them that does not begin with it.
    """
    spacing: dict[str, Any] = {"whitespace_flexible": whitespace != ""}
    if whitespace:
        spacing["whitespace_pattern"] = whitespace
    tags = [_Tag(*one) for one in json.loads(text)]
    rules = [
        f"start: ({' | '.join(f'tag_{place}' for place in range(len(tags)))})* rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    for place, tag in enumerate(tags):
        schema = json.dumps({**tag.schema, "x-guidance": spacing}, ensure_ascii=False)
        token = next((one for one in special if tag.trigger.startswith(one)), None)
        if token is not None:
            head = f"TEXT {spell_text(token, special)}"
        elif any(one in tag.trigger for one in special):
            raise RequestError(
                f"structured_outputs.structural_tag has the trigger {tag.trigger!r}; allowed: one "
                "that begins with its special token, or has none"
            )
        else:
            head = f"trigger_{place}"
            rules.append(f"trigger_{place}[lazy]: TEXT {json.dumps(tag.trigger)}")
        opening = spell_text(tag.begin[len(token or tag.trigger) :], special)
        rules.append(f"tag_{place}: {head} {opening} %json {schema} {spell_text(tag.end, special)}")
    return "\n".join(rules)


def spell_text(text: str, special: Mapping[str, int]) -> str:
    """A text in a grammar; special tokens stand there by their ids."""
    known = sorted((token for token in special if token in text), key=len, reverse=True)
    if not known:
        return json.dumps(text) if text else ""
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text)
    spelled = [f"<[{special[p]}]>" if p in special else json.dumps(p) for p in pieces if p]
    return " ".join(spelled)
