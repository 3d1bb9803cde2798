"""The items of an answer, built part by part, and the events that tell each step.

output_item.added
  message, reasoning   content_part.added  (output_text|reasoning_text).delta ... .done
                       content_part.done
  function_call        function_call_arguments.delta ... .done
  custom_tool_call     custom_tool_call_input.delta ... .done
  local_shell_call
output_item.done
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.server.answers.formats import CallFormat
from headstart.server.answers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from headstart.server.responses.tools import CallKind, read_partial

__all__ = ["Event", "OutputItems", "decode_reasoning"]

Event = dict[str, Any]
"""An event without its number."""


class OutputItems:
    """The items so far; at most the last is open.

    kinds: of calls, by the names of tools. encodes_reasoning: True if reasoning comes as
    `encrypted_content` too.
    """

    def __init__(
        self, calls: CallFormat, kinds: Mapping[str, CallKind], *, encodes_reasoning: bool = False
    ) -> None:
        self._kinds = kinds
        self._encodes_reasoning = encodes_reasoning
        self.items: list[dict[str, Any]] = []
        self._calls = calls
        self._open: type[Part] | None = None
        self._text: list[str] = []  # of the open item

    def add(self, part: Part) -> Iterator[Event]:
        """Take a part, and tell what is new."""
        if isinstance(part, CallBegin):
            yield from self._begin(CallArguments, self._call(part))
            return
        if self._open is not type(part):
            assert not isinstance(part, CallArguments)
            yield from self._begin(type(part), _texts(part))
        self._text.append(part.text)
        kind = self.items[-1]["type"]
        if kind == "custom_tool_call":
            yield from self._input()
        elif kind != "local_shell_call":
            yield self._told("delta", delta=part.text)

    def _input(self) -> Iterator[Event]:
        """Return the event of what is new in a custom tool's input."""
        item = self.items[-1]
        read = read_partial("".join(self._text)).get("input")
        if isinstance(read, str) and len(read) > len(item["input"]):
            new, item["input"] = read[len(item["input"]) :], read
            yield self._event("response.custom_tool_call_input.delta", delta=new)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The open item has ended."""
        if self._open is None:
            return
        item, text = self.items[-1], "".join(self._text)
        item["status"] = status
        if item["type"] == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "local_shell_call":
            item["action"] |= _action(text)
        elif self._open is CallArguments:
            item["arguments"] = text
            yield self._told("done", name=item["name"], arguments=text)
        else:
            item["content"] = [_part(self._open, text)]
            if self._open is Reasoning and self._encodes_reasoning:
                item["encrypted_content"] = _PREFIX + base64.b64encode(text.encode()).decode()
            yield self._told("done", text=text)
            yield self._part_event("done", text)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _begin(self, kind: type[Part], item: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open, self._text = kind, []
        self.items.append(item)
        told = dict(item)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": told}
        if kind is not CallArguments:
            yield self._part_event("added", "")

    def _part_event(self, step: str, text: str) -> Event:
        assert self._open is not None
        part = _part(self._open, text)
        return self._event(f"response.content_part.{step}", content_index=0, part=part)

    def _told(self, step: str, **data: Any) -> Event:
        if self._open is CallArguments:
            return self._event(f"response.function_call_arguments.{step}", **data)
        if self._open is Content:
            data["logprobs"] = []
        name = "output_text" if self._open is Content else "reasoning_text"
        return self._event(f"response.{name}.{step}", content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": self._index}
        return {"type": kind, **place, **data}

    def _call(self, part: CallBegin) -> dict[str, Any]:
        kind = self._kinds.get(part.name) or CallKind("function_call", part.name)
        common = {
            "type": kind.type,
            "status": "in_progress",
            "call_id": self._calls.new_id("call_"),
        }
        if kind.type == "local_shell_call":
            return {"id": _new_id("lsh"), **common, "action": _action("")}
        common |= {"name": kind.name}
        if kind.namespace is not None:
            common |= {"namespace": kind.namespace}
        if kind.type == "custom_tool_call":
            return {"id": _new_id("ctc"), **common, "input": ""}
        return {"id": _new_id("fc"), **common, "arguments": ""}


_PREFIX = "headstart:"


def decode_reasoning(content: str) -> str:
    """Return the reasoning in an item's `encrypted_content`; empty for another server's.

    It is encoded, not encrypted: the item shows the same text as its content.
    """
    if not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return ""


def _action(arguments: str) -> dict[str, Any]:
    """Return the action of a call of the shell; what is no such value in its arguments is not."""
    read = read_partial(arguments)
    command, folder, timeout = (
        read.get(name) for name in ("command", "working_directory", "timeout_ms")
    )
    words = command if isinstance(command, list) else [] if command is None else [command]
    action: dict[str, Any] = {"type": "exec", "command": [str(word) for word in words], "env": {}}
    if isinstance(folder, str):
        action["working_directory"] = folder
    if isinstance(timeout, int) and not isinstance(timeout, bool):
        action["timeout_ms"] = timeout
    return action


def _texts(part: Content | Reasoning) -> dict[str, Any]:
    common: dict[str, Any] = {"status": "in_progress", "content": []}
    if isinstance(part, Content):
        return {"id": _new_id("msg"), "type": "message", "role": "assistant", **common}
    return {"id": _new_id("rs"), "type": "reasoning", "summary": [], **common}


def _part(kind: type[Part], text: str) -> dict[str, Any]:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
