"""Five coding agents as clients, with the requests that each builds from a conversation.

The formats follow the agents' sources and public recordings of their traffic. An agent stores
its history in its own format, sends all of it each turn, and changes an answer as its client
library does: it may trim text, serialize arguments again, or omit reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic_core import from_json

__all__ = ["AGENTS", "Agent", "Aider", "ClaudeCode", "Cline", "Codex", "OpenCode", "Reply"]

Event = dict[str, Any]
Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


def rules(topic: str, count: int) -> str:
    """Return a list of instructions, as long as those of agents."""
    verbs = ("read", "check", "quote", "search", "list", "compare", "explain", "test")
    things = ("the file", "the test", "the error", "the command", "the path", "the diff", "the log")
    lines = [
        f"{n}. Before you {verbs[n % 8]} {things[n % 7]} of {topic}, {verbs[(n + 3) % 8]} "
        f"{things[(n + 2) % 7]} first, and say so in at most {n % 5 + 2} lines."
        for n in range(1, count + 1)
    ]
    return f"# {topic}\n" + "\n".join(lines)


def schema(*names: str) -> dict[str, Any]:
    """Return the JSON schema of a tool as zod writes it."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            name: {"type": "string", "description": f"The {name} to use, absolute and complete"}
            for name in names
        },
        "required": list(names),
        "additionalProperties": False,
    }


def data_url(image: str) -> str:
    """Return a PNG in base64 as a URL."""
    return f"data:image/png;base64,{image}"


def dumps(value: Any) -> str:
    """Return JSON as JavaScript's `JSON.stringify` writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass
class Reply:
    """A streamed answer; calls are ids, names and texts of arguments."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)
    end: str | None = None


class Agent:
    """A coding agent and its conversation."""

    path = "/v1/chat/completions"
    names: ClassVar[dict[str, str]] = {}
    """Names of its tools for reading, writing and running; none if it calls them in its text."""
    keeps_prompt = True
    """True if a request begins with the one before."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.turn = 0

    def ask(self, text: str, image: str | None = None) -> None:
        """Add a message of the user."""
        raise NotImplementedError

    def answer(self, reply: Reply) -> None:
        """Add the model's answer."""
        raise NotImplementedError

    def results(self, reply: Reply, texts: Sequence[str], *, failed: bool = False) -> None:
        """Add the results of a reply's calls."""
        raise NotImplementedError

    def interrupted(self, reply: Reply) -> None:
        """Add an answer that the user stopped."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """Return the next request."""
        raise NotImplementedError

    def background(self) -> list[tuple[str, dict[str, Any]]]:
        """Return requests outside the conversation: titles, counts, commit messages."""
        return []

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """Return an answer in the model's format."""
        spelled = [
            f'<tool_call>\n{{"name": "{self.names[name]}", "arguments": '
            f"{json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>"
            for name, arguments in calls
        ]
        return "\n".join([text, *spelled] if text else spelled)

    def read(self, events: Iterable[Event]) -> Reply:
        """Collect the chunks of a stream of chat completions."""
        reply = Reply()
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                reply.text += delta.get("content") or ""
                reply.reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(reply.calls):
                        reply.calls.append([call["id"], call["function"]["name"], ""])
                    reply.calls[-1][2] += call["function"].get("arguments") or ""
                reply.end = choice["finish_reason"] or reply.end
        return reply


REMINDER = "<system-reminder>\nThe todo list is empty. Do not mention this.\n</system-reminder>"
STOPPED = "[Request interrupted by user]"


class ClaudeCode(Agent):
    """Claude Code: blocks with cache marks, and a billing line that differs in each request."""

    path = "/v1/messages?beta=true"
    names: ClassVar = {"read": "Read", "write": "Write", "run": "Bash"}
    model = "claude-sonnet-4-5-20250929"

    def _system(self, text: str) -> list[dict[str, Any]]:
        mark = {"type": "ephemeral", "ttl": "1h"}
        self.turn += 1
        billing = f"cc_version=2.1.69.{self.turn:03x}; cc_entrypoint=cli; cch={self.turn:05x};"
        return [
            {"type": "text", "text": f"x-anthropic-billing-header: {billing}"},
            {
                "type": "text",
                "text": "You are Claude Code, Anthropic's official CLI for Claude.",
                "cache_control": mark,
            },
            {"type": "text", "text": text, "cache_control": {**mark, "scope": "global"}},
        ]

    def _tools(self) -> list[dict[str, Any]]:
        schemas = {
            "Read": ("file_path", "offset", "limit"),
            "Write": ("file_path", "content"),
            "Edit": ("file_path", "old_string", "new_string"),
            "Bash": ("command", "description"),
            "Grep": ("pattern", "path", "output_mode"),
            "Task": ("description", "prompt", "subagent_type"),
            "TodoWrite": ("todos",),
        }
        tools: list[dict[str, Any]] = [
            {"name": name, "description": rules(name, 2), "input_schema": schema(*fields)}
            for name, fields in schemas.items()
        ]
        return [*tools, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]

    def ask(self, text: str, image: str | None = None) -> None:
        """Add a message, the first with the project's notes before it."""
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if not self.history:
            notes = f"<system-reminder>\n{rules('CLAUDE.md', 5)}\n</system-reminder>"
            blocks.insert(0, {"type": "text", "text": notes})
        if image is not None:
            source = {"type": "base64", "media_type": "image/png", "data": image}
            blocks.append({"type": "image", "source": source})
        if self.history and self.history[-1]["role"] == "user":
            self.history[-1]["content"] += blocks
        else:
            self.history.append({"role": "user", "content": blocks})

    def answer(self, reply: Reply) -> None:
        """Add the blocks except texts of white space, which the API refuses."""
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.text.strip():
            blocks.append({"type": "text", "text": reply.text})
        for name, tool, arguments in reply.calls:
            values = from_json(arguments or "{}", allow_partial=True)
            blocks.append({"type": "tool_use", "id": name, "name": tool, "input": values})
        if blocks:
            self.history.append({"role": "assistant", "content": blocks})

    def results(self, reply: Reply, texts: Sequence[str], *, failed: bool = False) -> None:
        """Add all results as one message, and a reminder behind them."""
        blocks: list[dict[str, Any]] = []
        for (name, _, _), text in zip(reply.calls, texts, strict=True):
            block = {"type": "tool_result", "tool_use_id": name, "content": text}
            if failed:
                block |= {"content": f"<tool_use_error>{text}</tool_use_error>", "is_error": True}
            blocks.append(block)
        self.history.append(
            {"role": "user", "content": [*blocks, {"type": "text", "text": REMINDER}]}
        )

    def interrupted(self, reply: Reply) -> None:
        """Add the partial answer, and say that the user stopped it."""
        self.answer(reply)
        self.ask(STOPPED)

    def body(self) -> dict[str, Any]:
        """Mark only the last block of the last message."""
        messages = [dict(message) for message in self.history]
        blocks = messages[-1]["content"]
        mark = {"cache_control": {"type": "ephemeral"}}
        messages[-1]["content"] = [*blocks[:-1], blocks[-1] | mark]
        return {
            "model": self.model,
            "messages": messages,
            "system": self._system(rules("interactive CLI tool", 30)),
            "tools": self._tools(),
            "metadata": {"user_id": '{"device_id":"0f","account_uuid":"","session_id":"1c"}'},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "stream": True,
        }

    def background(self) -> list[tuple[str, dict[str, Any]]]:
        """Return requests for a title, a quota check, and counts of tools and messages."""
        small = {"model": "claude-haiku-4-5-20251001", "metadata": {"user_id": "u"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "Fix the tests"}]}]
        title = {
            **small,
            "messages": messages,
            "system": self._system("Write a title of the conversation in JSON."),
            "tools": [],
            "max_tokens": 32000,
            "temperature": 1,
            "output_config": {"format": {"type": "json_schema", "schema": schema("title")}},
            "stream": True,
        }
        quota = {**small, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        count = {
            "model": self.model,
            "messages": [{"role": "user", "content": "foo"}],
            "tools": self._tools(),
        }
        counts = "/v1/messages/count_tokens?beta=true"
        whole = {"model": self.model, "messages": self.history}
        return [(self.path, title), (self.path, quota), (counts, count), (counts, whole)]

    def read(self, events: Iterable[Event]) -> Reply:
        """Collect the events of a stream of messages."""
        reply = Reply()
        for event in events:
            if event["type"] == "content_block_start":
                block = event["content_block"]
                if block["type"] == "tool_use":
                    reply.calls.append([block["id"], block["name"], ""])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                reply.text += delta.get("text", "")
                reply.reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    reply.calls[-1][2] += delta["partial_json"]
            elif event["type"] == "message_delta":
                reply.end = event["delta"]["stop_reason"]
        return reply


class Codex(Agent):
    """Codex: all items of the Responses API in each request, none stored."""

    path = "/v1/responses"
    names: ClassVar = {"read": "exec_command", "write": "apply_patch", "run": "exec_command"}

    def ask(self, text: str, image: str | None = None) -> None:
        """Add a message, the first behind the permissions and the environment."""
        if not self.history:
            self._message("developer", f"<permissions>\n{rules('the sandbox', 8)}\n</permissions>")
            self._message("user", f"# AGENTS.md\n<INSTRUCTIONS>\n{rules('this', 6)}</INSTRUCTIONS>")
            self._message("user", "<environment_context>\n<cwd>/a</cwd>\n</environment_context>")
        self._message("user", text, image)

    def _message(self, role: str, text: str, image: str | None = None) -> None:
        content = [{"type": "input_text", "text": text}]
        if image is not None:
            content.insert(0, {"type": "input_image", "image_url": data_url(image)})
        self.history.append({"type": "message", "role": role, "content": content})

    def answer(self, reply: Reply) -> None:
        """Add the finished items, without ids and without the text of reasoning."""
        fields = {
            "message": ("type", "role"),
            "reasoning": ("type", "summary"),
            "function_call": ("type", "name", "arguments", "call_id"),
            "custom_tool_call": ("type", "status", "call_id", "name", "input"),
        }
        for item in reply.items:
            copy = {name: item[name] for name in fields[item["type"]]}
            if item["type"] == "message":
                texts = [part["text"] for part in item["content"]]
                copy["content"] = [{"type": "output_text", "text": text} for text in texts]
            elif item["type"] == "reasoning":
                copy["encrypted_content"] = item.get("encrypted_content")
            self.history.append(copy)

    def results(self, reply: Reply, texts: Sequence[str], *, failed: bool = False) -> None:
        """Add an output of each call."""
        calls = [item for item in reply.items if item["type"].endswith("_call")]
        for call, text in zip(calls, texts, strict=True):
            output = f"Exit code: {int(failed)}\nWall time: 0.1 seconds\nOutput:\n{text}"
            kind = f"{call['type']}_output"
            self.history.append({"type": kind, "call_id": call["call_id"], "output": output})

    def interrupted(self, reply: Reply) -> None:
        """Add the finished items, and say that the user stopped the turn."""
        self.answer(reply)
        self._message("user", "<turn_aborted>\nThe user interrupted the turn.\n</turn_aborted>")

    def body(self) -> dict[str, Any]:
        """Return the whole history as input."""
        command = {"command": {"type": "string", "description": rules("the shell", 2)}}
        shell = {"type": "object", "properties": command, "additionalProperties": False}
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}
        tools: list[dict[str, Any]] = [
            {
                "type": "function",
                "name": name,
                "description": rules(name, 2),
                "strict": False,
                "parameters": shell,
            }
            for name in ("exec_command", "write_stdin", "update_plan", "view_image")
        ]
        tools.append(
            {
                "type": "custom",
                "name": "apply_patch",
                "description": rules("patches", 2),
                "format": grammar,
            }
        )
        tools.append({"type": "web_search", "external_web_access": False})
        return {
            "model": "gpt-5-codex",
            "instructions": rules("Codex", 30),
            "input": self.history,
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198c3",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "7"},
        }

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """Return an answer with commands and patches as one text."""
        named = {"read": "command", "run": "command", "write": "input"}
        joined = [(name, {named[name]: " ".join(values.values())}) for name, values in calls]
        return super().write(text, joined)

    def read(self, events: Iterable[Event]) -> Reply:
        """Collect the finished items."""
        reply = Reply()
        for event in events:
            if event["type"] == "response.output_item.done":
                reply.items.append(event["item"])
                if event["item"]["type"].endswith("_call"):
                    reply.calls.append([event["item"]["call_id"], event["item"]["name"], ""])
            elif event["type"] == "response.output_text.delta":
                reply.text += event["delta"]
            elif event["type"] in ("response.completed", "response.incomplete"):
                reply.end = event["response"]["status"]
        return reply


class OpenCode(Agent):
    """OpenCode: chat completions through Vercel's SDK, which serializes arguments again."""

    names: ClassVar = {"read": "read", "write": "write", "run": "bash"}

    def ask(self, text: str, image: str | None = None) -> None:
        """Add a message; a string is no list."""
        content: Any = text
        if image is not None:
            url = {"url": data_url(image)}
            content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": url}]
        self.history.append({"role": "user", "content": content})

    def answer(self, reply: Reply) -> None:
        """Trim the end of the text, and replace calls with invalid JSON by calls of `invalid`."""
        calls = []
        for call in reply.calls:
            name, tool, arguments = call
            try:
                values = json.loads(arguments)
            except ValueError:
                values, tool = {"tool": tool, "error": "JSON parsing failed"}, "invalid"
            function = {"name": tool, "arguments": dumps(values)}
            calls.append({"id": name, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": reply.text.rstrip()}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if calls:
            message["tool_calls"] = calls
        self.history.append(message)

    def results(self, reply: Reply, texts: Sequence[str], *, failed: bool = False) -> None:
        """Add a message of each call."""
        for (name, _, _), text in zip(reply.calls, texts, strict=True):
            content = f"Error: {text}" if failed else f"<file>\n{text}\n</file>"
            self.history.append({"role": "tool", "tool_call_id": name, "content": content})

    def interrupted(self, reply: Reply) -> None:
        """Add the partial answer, with a result for each call that did not run."""
        self.answer(reply)
        self.results(reply, ["[Tool execution was interrupted]"] * len(reply.calls), failed=True)

    def body(self) -> dict[str, Any]:
        """Return two system messages and the history."""
        schemas = {
            "bash": ("command", "description"),
            "edit": ("filePath", "oldString", "newString"),
            "read": ("filePath", "offset"),
            "write": ("filePath", "content"),
            "grep": ("pattern", "include"),
            "todowrite": ("todos",),
            "invalid": ("tool", "error"),
        }
        tools = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": rules(name, 2),
                    "parameters": schema(*fields),
                },
            }
            for name, fields in schemas.items()
        ]
        system = [rules("OpenCode", 30), "<env>\n  Working directory: /a\n</env>"]
        return {
            "model": "tiny",
            "max_tokens": 32000,
            "temperature": 0,
            "messages": [{"role": "system", "content": text} for text in system] + self.history,
            "tools": tools,
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def background(self) -> list[tuple[str, dict[str, Any]]]:
        """Return a request for a title."""
        system = {"role": "system", "content": "You are a title generator."}
        messages = [{"role": "user", "content": "Generate a title for this conversation:"}]
        title = {"model": "tiny-small", "max_tokens": 32000, "messages": [system, *messages]}
        return [(self.path, title | {"temperature": 0.5, "stream": True})]


class Aider(Agent):
    """Aider: edits as text, with the files after the earlier turns in each request."""

    keeps_prompt = False

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """Return an answer with edits as files in its text."""
        edits = [f"a.py\n```\n# {' '.join(values.values())}\n```" for _, values in calls]
        return "\n\n".join([text, *edits])

    def ask(self, text: str, image: str | None = None) -> None:
        """Add a message; an image becomes a file of the chat, which stays in each request."""
        self.history.append({"role": "user", "content": text})

    def answer(self, reply: Reply) -> None:
        """Add the text unchanged."""
        if reply.text:
            self.history.append({"role": "assistant", "content": reply.text})

    def results(self, reply: Reply, texts: Sequence[str], *, failed: bool = False) -> None:
        """Add a message with a command's output or a linter's report."""
        head = "# Fix any errors below, if possible." if failed else "I ran this command:"
        self.ask("\n\n".join([head, *texts]))

    def interrupted(self, reply: Reply) -> None:
        """Add the partial answer, and an acknowledgement by the model."""
        self.answer(reply)
        self.ask("^C KeyboardInterrupt")
        text = "I see that you interrupted my previous reply."
        self.history.append({"role": "assistant", "content": text})

    def body(self) -> dict[str, Any]:
        """Return the history, with the files before its last message and a reminder after it."""
        example = [
            {"role": "user", "content": "Change the greeting to be more casual"},
            {"role": "assistant", "content": f"Ok, I will:\n\n{rules('greeting', 6)}"},
        ]
        *done, last = self.history
        files = [
            {"role": "user", "content": "I have *added these files*.\n\na.py\n```\nx = 1\n```"},
            {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        ]
        reminder = "\n\nTo suggest changes to a file you MUST return its entire content."
        messages = [
            {"role": "system", "content": rules("Aider", 70)},
            *example,
            *done,
            *files,
            {**last, "content": last["content"] + reminder},
        ]
        return {"model": "tiny", "messages": messages, "temperature": 0, "stream": True}

    def background(self) -> list[tuple[str, dict[str, Any]]]:
        """Return a request for a commit message, without a stream."""
        system = {"role": "system", "content": "Write a one-line Git commit message."}
        diff = {"role": "user", "content": "# Diffs:\n\n--- a.py\n+++ a.py\n+x = 2\n"}
        body = {"model": "tiny", "messages": [system, diff], "temperature": 0, "stream": False}
        return [(self.path, body)]


class Cline(Agent):
    """Cline: tools as XML in the text, and the environment after each message of the user."""

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """Return an answer with calls in XML."""
        names = {"read": "read_file", "write": "write_to_file", "run": "execute_command"}
        spelled = [
            f"<{names[name]}>\n"
            + "".join(f"<{key}>{value}</{key}>\n" for key, value in values.items())
            + f"</{names[name]}>"
            for name, values in calls
        ]
        return "\n\n".join([text, *spelled] if text else spelled)

    def ask(self, text: str, image: str | None = None) -> None:
        """Add a message of parts, the last of which is the environment."""
        self.turn += 1
        tag = "feedback" if self.history else "task"
        now = f"# Current Time\n10:{self.turn:02} AM\n\n# Current Mode\nACT MODE"
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"<{tag}>\n{text}\n</{tag}>"}]
        if image is not None:
            parts.append({"type": "image_url", "image_url": {"url": data_url(image)}})
        environment = f"<environment_details>\n{now}\n</environment_details>"
        parts.append({"type": "text", "text": environment})
        self.history.append({"role": "user", "content": parts})

    def answer(self, reply: Reply) -> None:
        """Add the text unchanged, or a note that there was none."""
        text = reply.text or "Failure: I did not provide a response."
        self.history.append({"role": "assistant", "content": text})

    def results(self, reply: Reply, texts: Sequence[str], *, failed: bool = False) -> None:
        """Add a message of the user with the results."""
        errors = [f"The tool execution failed:\n<error>\n{text}\n</error>" for text in texts]
        self.ask("\n".join(errors if failed else texts))

    def interrupted(self, reply: Reply) -> None:
        """Add the partial answer, with a note after it."""
        note = "\n\n[Response interrupted by user]"
        self.history.append({"role": "assistant", "content": reply.text + note})

    def body(self) -> dict[str, Any]:
        """Return the system message and the history."""
        system = {"role": "system", "content": rules("Cline", 80)}
        return {
            "model": "tiny",
            "messages": [system, *self.history],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


AGENTS: tuple[type[Agent], ...] = (ClaudeCode, Codex, OpenCode, Aider, Cline)
