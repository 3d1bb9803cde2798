"""A line in the log for each request, as text for people or as JSON for programs, on stderr.

Texts of prompts and answers are in no line unless an operator wants them: even the parts of a body
that a refusal quotes are left out.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass

from starlette.types import Scope

from headstart.validation import in_one_line

_LOG = logging.getLogger("headstart.server.requests")
_QUIET = ("/health", "/ready", "/metrics")  # polled: logged when they are refused
_QUOTE = re.compile(r"(?<!\w)['\"]")  # an opening one; an apostrophe follows a letter


@dataclass(slots=True)
class Line:
    """The content of a line. seconds: until the last byte of the answer was sent.

    prompts, answers: their beginnings, if the operator wants them in the log.
    """

    request_id: str
    method: str
    path: str
    status: int = 0
    seconds: float = 0.0
    tenant: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    time_to_first_token: float | None = None
    missed: str | None = None
    error: str | None = None
    prompts: list[str] | None = None
    answers: list[str] | None = None

    def add_answer(self, *, prompt: int, cached: int, generated: int, first: float | None) -> None:
        """Count an answer of so many tokens; `first`: seconds to its first token."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated
        self.time_to_first_token = None if first is None else round(first, 6)


_LINE: ContextVar[Line | None] = ContextVar("line", default=None)


def current_line() -> Line:
    """Return the line of the request under way; outside requests one that nothing writes."""
    return _LINE.get() or Line("", "", "")


@contextmanager
def log_request(scope: Scope) -> Iterator[Line]:
    """Write the line of a request at its end, also if its client has disconnected.

    The caller sets the status. Tenant and error come from the scope's state.
    """
    line, state = Line("", scope["method"], in_one_line(scope["path"])), scope["state"]
    token = _LINE.set(line)
    start = time.perf_counter()
    try:
        yield line
    finally:
        _LINE.reset(token)
        line.seconds = round(time.perf_counter() - start, 6)
        line.request_id = state.get("request_id", "")
        tenant = state.get("tenant")
        line.tenant = tenant.name if tenant is not None else None
        if (error := state.get("error")) is not None:
            text = str(error)
            if error.status == 400 and (quote := _QUOTE.search(text)):  # without texts of a body
                text = f"{text[: quote.start()]}..."
                if error.param is not None and error.param not in text:
                    text = f"{error.param}: {text}"
            line.error = in_one_line(text)
        if line.path not in _QUIET or line.status >= 400:
            _LOG.info("%s %s %d", line.method, line.path, line.status, extra={"line": line})


class _AsText(logging.Formatter):
    """`10:15:02 POST /v1/chat/completions 200 0.31 s, 1,396 of 1,421 tokens cached, 8 generated`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {super().format(record)}"
        line: Line | None = getattr(record, "line", None)
        if line is None:
            return text
        text += f" {line.seconds:.3g} s"
        if line.prompt_tokens:
            text += f", {line.cached_tokens:,} of {line.prompt_tokens:,} tokens cached"
            text += f", {line.generated_tokens:,} generated"
        if line.tenant not in (None, "everybody"):
            text += f", {line.tenant}"
        text = f"{text}, {line.error}" if line.error else text
        for name, shown in (("prompt", line.prompts), ("answer", line.answers)):
            text += "".join(f", {name} {entry!r}" for entry in shown or ())
        return text


class _AsJson(logging.Formatter):
    """One object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        entry: dict[str, object] = {"time": round(record.created, 3), "level": level}
        line: Line | None = getattr(record, "line", None)
        if line is not None:
            return json.dumps(entry | {k: v for k, v in asdict(line).items() if v is not None})
        return json.dumps(entry | {"logger": record.name, "message": super().format(record)})


def set_up_logs(kind: str) -> None:
    """Write the server's lines, and Granian's warnings, to stderr.

    kind: "text" or "json"; "off" leaves out those of requests.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_AsJson() if kind == "json" else _AsText("%(message)s"))
    for name in ("headstart", "_granian", "granian"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(logging.WARNING)
        log.propagate = False
    logging.getLogger("headstart.server").setLevel(logging.INFO)
    _LOG.setLevel(logging.WARNING if kind == "off" else logging.NOTSET)
