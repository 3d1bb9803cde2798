"""A trace of each request, for OpenTelemetry: when it waited, was read and was answered.

    llm_request                arrival to last token; a child of the client's span, if it names one
    ├ queue                    until its first step
    ├ prefill                  until its first token
    └ decode                   until its last

Spans are made when a request ends, of the times that the engine noted, so nothing is done for them
while it runs. Attributes have the names of OpenTelemetry's conventions for generative AI, and
those of vLLM beside them. No text of a prompt or an answer is among them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headstart.errors import ConfigError
from headstart.imports import install
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
"""Spans inside a request, and vLLM's attributes in seconds, by the moments that bound them."""


def open_tracer(endpoint: str | None, model: str) -> Tracer | None:
    """Return a tracer that sends to an OTLP endpoint, over HTTP; None for no endpoint.

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
    """Makes the spans of requests that ended, and passes them to a processor."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        """`model` is its name in the API."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._model = model
        # It would log what a client's headers say where they are malformed.
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
