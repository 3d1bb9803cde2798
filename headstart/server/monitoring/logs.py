"""A line for each request that was answered: who asked for what, how long it took, what was cached.

Texts of prompts and answers are in no line unless an operator asks for them: what a refusal quotes
of a body is left out. As text for people, or as JSON, one object a line, for programs. Lines go to
stderr.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from headstart.server.options import MOST_LOGGED
from headstart.validation import in_one_line

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.server.errors import ApiError

__all__ = [
    "Line",
    "RequestLog",
    "note_answer",
    "note_error",
    "note_output",
    "note_texts",
    "set_up_logs",
]


_LOG = logging.getLogger("headstart.server.requests")
_QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds: told when they are refused


@dataclass(slots=True)
class Line:
    """What a line tells. seconds: until the last byte of the answer was sent.

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


_QUOTE = re.compile(r"(?<!\w)['\"]")  # that opens; an apostrophe stands behind a letter
_LINE: ContextVar[Line | None] = ContextVar("line", default=None)


def note_output(output: RequestOutput) -> None:
    """The request under way has this answer; one of several prompts has several."""
    note_answer(
        prompt=len(output.prompt_token_ids),
        cached=output.num_cached_tokens,
        generated=sum(len(answer.token_ids) for answer in output.outputs),
        first=output.metrics.time_to_first_token,
    )
    line = _LINE.get()
    if line is not None and output.why_missed is not None:
        line.missed = output.why_missed.reason.name.lower()


def note_answer(*, prompt: int, cached: int, generated: int, first: float | None) -> None:
    """The request under way has an answer of so many tokens; `first`: seconds to its first one."""
    line = _LINE.get()
    if line is not None:
        line.prompt_tokens += prompt
        line.cached_tokens += cached
        line.generated_tokens += generated
        line.time_to_first_token = None if first is None else round(first, 6)


def note_texts(prompt: str, answers: Iterable[str]) -> None:
    """The request under way had this prompt, and these answers."""
    line = _LINE.get()
    if line is not None:
        line.prompts = [*(line.prompts or ()), prompt[:MOST_LOGGED]]
        line.answers = [*(line.answers or ()), *(text[:MOST_LOGGED] for text in answers)]


def note_error(error: Exception) -> None:
    """The request under way ends with this error, which its status may not say: it is a stream."""
    line = _LINE.get()
    if line is not None:
        line.error = in_one_line(str(error))


class RequestLog:
    """The line of one request, written when it is over, also if its client went away.

    `with RequestLog(scope) as line`: whoever answers sets the line's status. What else the line
    tells is in the scope's state by the end.
    """

    def __init__(self, scope: Scope) -> None:
        self._state = scope["state"]
        self._line = Line("", scope["method"], in_one_line(scope["path"]))

    def __enter__(self) -> Line:
        self._token = _LINE.set(self._line)
        self._start = time.perf_counter()
        return self._line

    def __exit__(self, *error: object) -> None:
        line, state = self._line, self._state
        _LINE.reset(self._token)
        line.seconds = round(time.perf_counter() - self._start, 6)
        line.request_id = state.get("request_id", "")
        tenant = state.get("tenant")
        line.tenant = tenant.name if tenant is not None else None
        if (failed := state.get("error")) is not None:
            line.error = _tell(failed)
        if line.path not in _QUIET or line.status >= 400:
            _LOG.info("%s %s %d", line.method, line.path, line.status, extra={"line": line})


def _tell(error: ApiError) -> str:
    """Why a request was refused; of a body, only up to where it is quoted, and the field."""
    text = str(error)
    if error.status == 400 and (quote := _QUOTE.search(text)):
        text = f"{text[: quote.start()]}..."
        if error.param is not None and error.param not in text:
            text = f"{error.param}: {text}"
    return in_one_line(text)


class _AsText(logging.Formatter):
    """`10:15:02 POST /v1/chat/completions 200 0.31 s, 1,396 of 1,421 tokens cached, 8 generated`"""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{at} {super().format(record)}"
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
        for name, told in (("prompt", line.prompts), ("answer", line.answers)):
            text += "".join(f", {name} {one!r}" for one in told or ())
        return text


class _AsJson(logging.Formatter):
    """One object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
        }
        line: Line | None = getattr(record, "line", None)
        if line is not None:
            return json.dumps(told | {k: v for k, v in asdict(line).items() if v is not None})
        return json.dumps(told | {"logger": record.name, "message": super().format(record)})


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
