"""Orders of messages that a chat template takes, and conversations put into such an order.

Some templates refuse a second system message, two turns of one role in a row, or an assistant that
speaks first; others leave such a message out without a word. A template is rendered with small
conversations to find out, and only what it does not take is changed:

    a system message behind others                text of a user's turn, within <system> tags
    several system messages at the beginning      one message
    a system message, and the template has none   text of the user's first turn
    turns of one role in a row                    one turn
    a user's turn behind a tool's result          text behind the result
    a user's turn behind a call without a result  an empty turn of the assistant between them
    an assistant or a tool that speaks first      an empty turn of the user before it
    a system message alone                        an empty turn of the user after it

Texts are joined by an empty line. A message changes only itself and what comes after it, so a
conversation that grows begins with the text that it had before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

__all__ = ["TemplateOrder"]

Render = Callable[[list[dict[str, Any]]], str]

_ROLES = {"S": "system", "U": "user", "A": "assistant", "C": "assistant", "T": "tool"}
_LETTERS = {"system": "S", "user": "U", "tool": "T"}
_CALL_ID = "call00001"  # Mistral's templates want 9 letters
_PAIRS = {
    "SS": "SSU",
    "UU": "UU",
    "AA": "UAAU",
    "AC": "UACTAU",
    "CA": "UCAU",
    "CC": "UCCT",
    "CU": "UCU",
    "TU": "UCTU",
}
"""Neighbours that some templates refuse, by letters for their roles (C is an assistant's call), and
a conversation in which they stand."""


class TemplateOrder:
    """Puts conversations into an order that one template takes.

    render: applies the template, and raises an exception for what it refuses. in_parts: contents
    are lists of parts.
    """

    def __init__(self, render: Render, *, in_parts: bool) -> None:
        self._render = render
        self._in_parts = in_parts
        self._pairs: dict[str, bool] = {}  # whether the template takes them

    def arrange(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as the template takes them."""
        arranged: list[dict[str, Any]] = []
        is_beginning = True  # only system messages so far
        for message in map(dict, messages):
            role = message["role"]
            if role == "system":
                message = self._place_system(message, is_beginning=is_beginning)
            elif is_beginning:
                is_beginning = False
                if role in ("assistant", "tool") and self._needs_user(arranged):
                    arranged.append(self._empty("user"))
            self._append(arranged, message)
        if is_beginning and self._needs_user(arranged):
            arranged.append(self._empty("user"))
        return arranged

    def _needs_user(self, beginning: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the user has to speak behind such a beginning, before an assistant."""
        if not beginning:
            return not self._takes_assistant_first
        return beginning[-1]["role"] == "system" and not self._takes_system_alone

    def _place_system(self, message: dict[str, Any], *, is_beginning: bool) -> dict[str, Any]:
        if is_beginning:
            return message if self._takes_system else {**message, "role": "user"}
        if self._takes_late_system:
            return message
        begin, end = self._content("<system>\n"), self._content("\n</system>")
        return {**message, "role": "user", "content": begin + message["content"] + end}

    def _append(self, arranged: list[dict[str, Any]], message: dict[str, Any]) -> None:
        if not arranged or self._takes_after(arranged[-1], message):
            arranged.append(message)
        elif arranged[-1]["role"] == "assistant" != message["role"]:  # a call without its result
            arranged += [self._empty("assistant"), message]
        else:
            arranged[-1] = self._merge(arranged[-1], message)

    def _takes_after(self, last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        pair = _letter(last) + _letter(message)
        if pair not in _PAIRS:
            return True
        if pair not in self._pairs:
            but_for = "UCTAU" if "C" in pair or "T" in pair else "UAU"
            self._pairs[pair] = self._takes(_PAIRS[pair], but_for)
        return self._pairs[pair]

    def _merge(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        merged = {**second, **first}
        gaps = {"content": self._content("\n\n"), "reasoning_content": "\n\n", "tool_calls": []}
        for name, gap in gaps.items():
            values = [value for value in (first.get(name), second.get(name)) if value]
            if values:
                merged[name] = values[0] if not values[1:] else values[0] + gap + values[1]
        return merged

    def _empty(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self._content("")}

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._in_parts else text

    @cached_property
    def _takes_system(self) -> bool:
        return self._takes("SUAU")

    @cached_property
    def _takes_system_alone(self) -> bool:
        return self._takes("S") and self._takes("SAU")

    @cached_property
    def _takes_late_system(self) -> bool:
        return self._takes("UASU") and self._takes("US")

    @cached_property
    def _takes_assistant_first(self) -> bool:
        return self._takes("AU")

    def _takes(self, roles: str, but_for: str = "UAU") -> bool:
        """Return True if the template shows turns of these roles, all of them and in their order.

        Also if it does not show `but_for`: it is then not the order that it refuses.
        """
        return self._shows(roles) or not self._shows(but_for)

    def _shows(self, roles: str) -> bool:
        messages = [self._example(role, f"turn{place}") for place, role in enumerate(roles)]
        try:
            shown = self._render(messages)
        except Exception:  # a template is a program, which may raise anything
            return False
        places = [shown.find(f"turn{place}") for place in range(len(roles))]
        return -1 not in places and all(one < other for one, other in pairwise(places))

    def _example(self, role: str, text: str) -> dict[str, Any]:
        if role == "C":  # its content is left out by some templates
            function = {"name": "look", "arguments": {"at": text}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            return {"role": "assistant", "content": self._content(""), "tool_calls": [call]}
        message = {"role": _ROLES[role], "content": self._content(text)}
        return message | {"tool_call_id": _CALL_ID, "name": "look"} if role == "T" else message


def _letter(message: Mapping[str, Any]) -> str:
    if message["role"] == "assistant":
        return "C" if message.get("tool_calls") else "A"
    return _LETTERS.get(message["role"], "-")
