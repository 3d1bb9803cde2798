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
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from headstart.engine.request import RequestGroup

__all__ = ["Tracer", "open_tracer"]

Value = str | int | float | list[str]


def open_tracer(endpoint: str | None, model: str) -> Tracer | None:
    """What sends traces to an OTLP endpoint, over HTTP; None for no endpoint.

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
    """Makes the spans of requests that ended, and hands them to a processor."""

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
        """Tell of a request. end: "answered", "abort" or "error"; headers: W3C's trace context."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, clock = time.time_ns(), time.perf_counter()

        def at(seconds: float) -> int:
            return now - round((clock - seconds) * 1e9)

        firsts = [one.first_token_time for one in request.requests]
        first = min((moment for moment in firsts if moment is not None), default=None)
        last = max((one.last_token_time or 0.0 for one in request.requests), default=0.0) or None
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            start_time=at(request.arrival_time),
        )
        if not span.is_recording():
            return
        span.set_attributes(self._describe(request, end) | _latencies(request, first, last))
        if end == "error":
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        moments = [request.arrival_time, request.start_time, first, last]
        for name, start, stop in zip(_PARTS, moments, moments[1:], strict=False):
            if start is not None and stop is not None:
                self._part(name, inside, at(start), at(stop))
        span.end(at(last) if end == "answered" and last is not None else now)

    def _part(self, name: str, inside: Context, start: int, stop: int) -> None:
        span: Span = self._tracer.start_span(name, inside, start_time=start)
        span.end(stop)

    def _describe(self, request: RequestGroup, end: str) -> dict[str, Value]:
        params, answers = request.params, request.requests
        prompt = len(request.prompt_token_ids)
        generated = sum(len(one.sampling.output_token_ids) for one in answers)
        adapter = request.adapter
        told: dict[str, Value | None] = {
            "gen_ai.provider.name": "headstart",
            "gen_ai.operation.name": "text_completion" if request.chat is None else "chat",
            "gen_ai.request.model": self._model if adapter is None else adapter.name,
            "gen_ai.response.model": self._model if adapter is None else adapter.name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.finish_reasons": [
                one.finish_reason or ("abort" if end == "answered" else end) for one in answers
            ],
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
        }
        missed = answers[0].missed
        if missed is not None:
            told["headstart.miss_reason"] = missed.reason.name.lower()
        return {name: value for name, value in told.items() if value is not None}

    def close(self) -> None:
        """Send what is left, and end the thread that sends."""
        self._provider.shutdown()


_PARTS = ("queue", "prefill", "decode")


def _latencies(request: RequestGroup, first: float | None, last: float | None) -> dict[str, Value]:
    """vLLM's times, in seconds."""
    arrival, start = request.arrival_time, request.start_time
    spans = {
        "time_in_queue": (arrival, start),
        "time_to_first_token": (arrival, first),
        "e2e": (arrival, last),
        "time_in_model_prefill": (start, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (start, last),
    }
    return {
        f"gen_ai.latency.{name}": stop - begin
        for name, (begin, stop) in spans.items()
        if begin is not None and stop is not None
    }
