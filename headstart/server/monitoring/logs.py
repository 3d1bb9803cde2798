"""A log line on stderr and an OpenTelemetry trace for each request.

Log lines contain texts of prompts and answers only if the operator sets `--log-texts`. If an error
quotes a part of a body, the quotation is left out. Traces never contain texts. A trace has spans:

    llm_request                arrival to last token; a child of the span that the headers name
    ├ queue                    until its first step
    ├ prefill                  until its first token
    └ decode                   until its last token

Spans are made when a request ends, from the times that the engine recorded. So they cost nothing
while the request runs. Attributes have the names of OpenTelemetry's conventions for generative AI
and of vLLM.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from headstart.errors import ConfigError
from headstart.imports import install
from headstart.validation import in_one_line
from headstart.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from headstart.engine.request import RequestGroup


Value = str | int | float | list[str]
_PARTS = {
    "queue": ("arrival", "start"),
    "prefill": ("start", "first"),
    "decode": ("first", "last"),
    "gen_ai.latency.time_in_queue": ("arrival", "start"),
    "gen_ai.latency.time_to_first_token": ("arrival", "first"),
    "gen_ai.latency.e2e": ("arrival", "last"),
    "gen_ai.latency.time_in_model_prefill": ("start", "first"),
    "gen_ai.latency.time_in_model_decode": ("first", "last"),
    "gen_ai.latency.time_in_model_inference": ("start", "last"),
}
"""Start and end of each span within a request, and of each latency attribute of vLLM."""


def open_tracer(endpoint: str | None, model: str) -> Tracer | None:
    """Return a tracer that sends spans to an OTLP endpoint over HTTP; None without an endpoint.

    Raises ConfigError without the packages of OpenTelemetry.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(f"otlp_traces_endpoint needs {error.name}: {install('otel')}") from error
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model)


class Tracer:
    """Tracer of ended requests, with OpenTelemetry."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        """Pass spans to `processor`; `model` is the model's name in the API."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._model = model
        # OpenTelemetry would log the content of malformed headers.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=Resource.create({"service.name": "headstart"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headstart.server", __version__)

    def trace(self, request: RequestGroup, end: str, headers: Mapping[str, str]) -> None:
        """Trace a request. end: "answered", "abort" or "error"; headers: W3C's trace context."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, clock = time.time_ns(), time.perf_counter()

        def to_ns(seconds: float) -> int:
            return now - round((clock - seconds) * 1e9)

        arrival, answers = request.arrival_time, request.requests
        firsts = [answer.first_token_time for answer in answers]
        first = min((seconds for seconds in firsts if seconds is not None), default=None)
        last = max((answer.last_token_time or 0.0 for answer in answers), default=0.0) or None
        context = TraceContextTextMapPropagator().extract(headers)
        start = to_ns(arrival)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, start_time=start)
        if not span.is_recording():
            return
        span.set_attributes(self._describe(request, end))
        if end == "error":
            span.set_status(Status(StatusCode.ERROR))
        moments = {"arrival": arrival, "start": request.start_time, "first": first, "last": last}
        for name, (begin, stop) in _PARTS.items():
            if (since := moments[begin]) is not None and (until := moments[stop]) is not None:
                if name.startswith("gen_ai"):
                    span.set_attribute(name, until - since)
                else:
                    inside = set_span_in_context(span)
                    part = self._tracer.start_span(name, inside, start_time=to_ns(since))
                    part.end(to_ns(until))
        span.end(to_ns(last) if end == "answered" and last is not None else now)

    def _describe(self, request: RequestGroup, end: str) -> dict[str, Value]:
        params, answers = request.params, request.requests
        model = self._model if request.adapter is None else request.adapter.name
        prompt = len(request.prompt_token_ids)
        generated = sum(len(answer.sampling.output_token_ids) for answer in answers)
        missing = "abort" if end == "answered" else end
        reasons = [answer.finish_reason or missing for answer in answers]
        missed = answers[0].missed
        attributes: dict[str, Value | None] = {
            "gen_ai.provider.name": "headstart",
            "gen_ai.operation.name": "text_completion" if request.chat is None else "chat",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": len(answers),
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.output_tokens": generated,
            "gen_ai.usage.completion_tokens": generated,
            "gen_ai.usage.cache_read.input_tokens": answers[0].num_cached_tokens,
            "headstart.miss_reason": missed.reason.name.lower() if missed is not None else None,
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def close(self) -> None:
        """Send the remaining spans, and end the thread that sends."""
        self._provider.shutdown()


_LOG = logging.getLogger("headstart.server.requests")
_QUIET = ("/health", "/ready", "/metrics")  # polled, so they are logged only if they fail
_QUOTE = re.compile(r"(?<!\w)['\"]")  # an opening quote, not an apostrophe


@dataclass(slots=True)
class LogLine:
    """The content of a log line. seconds: until the last byte of the answer was sent.

    prompts, answers: the beginnings of their texts, if the operator logs them.
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
        """Add an answer's numbers of tokens. first: seconds to its first token."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated
        self.time_to_first_token = None if first is None else round(first, 6)


_LINE: ContextVar[LogLine | None] = ContextVar("line", default=None)


def current_line() -> LogLine:
    """Return the line of the current request. Outside of requests, return a new line."""
    return _LINE.get() or LogLine("", "", "")


@contextmanager
def log_request(scope: Scope) -> Iterator[LogLine]:
    """Log a request at its end, even if its client has disconnected.

    The caller sets the status. Tenant and error come from the scope's state.
    """
    line, state = LogLine("", scope["method"], in_one_line(scope["path"])), scope["state"]
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
            if error.status == 400 and (quote := _QUOTE.search(text)):  # it may quote a prompt
                text = f"{text[: quote.start()]}..."
                if error.param is not None and error.param not in text:
                    text = f"{error.param}: {text}"
            line.error = in_one_line(text)
        if line.path not in _QUIET or line.status >= 400:
            _LOG.info("%s %s %d", line.method, line.path, line.status, extra={"line": line})


class _AsText(logging.Formatter):
    """The format `text` of log lines.

    `10:15:02 POST /v1/chat/completions 200 0.31 s, 1,396 of 1,421 tokens cached, 8 generated`
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {super().format(record)}"
        line: LogLine | None = getattr(record, "line", None)
        if line is None:
            return text
        text += f" {line.seconds:.3g} s"
        if line.prompt_tokens:
            text += f", {line.cached_tokens:,} of {line.prompt_tokens:,} tokens cached"
            text += f", {line.generated_tokens:,} generated"
        if line.tenant not in (None, "everybody"):
            text += f", {line.tenant}"
        text = f"{text}, {line.error}" if line.error else text
        for name, texts in (("prompt", line.prompts), ("answer", line.answers)):
            text += "".join(f", {name} {entry!r}" for entry in texts or ())
        return text


class _AsJson(logging.Formatter):
    """The format `json` of log lines: one JSON object per line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        entry: dict[str, object] = {"time": round(record.created, 3), "level": level}
        line: LogLine | None = getattr(record, "line", None)
        if line is not None:
            return json.dumps(entry | {k: v for k, v in asdict(line).items() if v is not None})
        return json.dumps(entry | {"logger": record.name, "message": super().format(record)})


def set_up_logs(kind: str) -> None:
    """Write the server's log and Granian's warnings to stderr.

    kind: "text", "json", or "off" for text without the lines of requests.
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
