"""The spans of each request, read from OpenTelemetry's in-memory exporter."""

import sys
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headstart.errors import ConfigError, EngineError
from headstart.frontend.streams import AsyncMailbox
from headstart.server.monitoring.logs import Tracer, open_tracer
from headstart.server.options import ServerOptions
from tests.server.running import Running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(server: Running) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    server.service.tracer = Tracer(SimpleSpanProcessor(exporter), "tiny")
    yield exporter
    server.service.tracer.close()
    server.service.tracer = None


def ask(server: Running, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    messages = [{"role": "user", "content": "Anna is 31. How old is Anna?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 3, "ignore_eos": True, **body}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers or {}, timeout=60)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_child_spans(
    server: Running, exporter: InMemorySpanExporter, stream: bool
) -> None:
    assert ask(server, stream=stream, temperature=0.5).status_code == 200
    spans = by_name(exporter)
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert whole.kind is SpanKind.SERVER
    assert whole.parent is None
    edges = [whole.start_time]
    for name in ("queue", "prefill", "decode"):
        part = spans[name]
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
        assert part.start_time == pytest.approx(edges[-1], abs=10)  # rounded, in nanoseconds
        assert part.end_time >= part.start_time
        edges.append(part.end_time)
    assert whole.end_time == pytest.approx(edges[-1], abs=10)
    attributes = whole.attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert (
        attributes["gen_ai.usage.output_tokens"]
        == attributes["gen_ai.usage.completion_tokens"]
        == 3
    )
    assert attributes["gen_ai.usage.input_tokens"] == attributes["gen_ai.usage.prompt_tokens"] > 10
    assert attributes["gen_ai.latency.e2e"] >= attributes["gen_ai.latency.time_to_first_token"]
    assert not any("Anna" in str(value) for value in attributes.values())


def test_cached_tokens_are_an_attribute(server: Running, exporter: InMemorySpanExporter) -> None:
    usage = [ask(server).json()["usage"] for _ in range(2)][1]
    attributes = exporter.get_finished_spans()[-1].attributes
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert attributes["headstart.miss_reason"] == "none"


@pytest.mark.parametrize(("flags", "is_traced"), [("01", True), ("00", False)])
def test_a_request_is_part_of_its_clients_trace(
    server: Running, exporter: InMemorySpanExporter, flags: str, is_traced: bool
) -> None:
    ask(server, {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
    spans = by_name(exporter)
    assert bool(spans) is is_traced
    if is_traced:
        assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
        assert f"{spans['llm_request'].parent.span_id:016x}" == PARENT


def test_a_broken_traceparent_starts_a_new_trace(
    server: Running, exporter: InMemorySpanExporter
) -> None:
    assert ask(server, {"traceparent": "00-zz-1"}).status_code == 200
    assert by_name(exporter)["llm_request"].parent is None


def test_a_request_that_fails_is_an_error(
    server: Running, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(mailbox: object) -> object:
        raise EngineError("broken")

    monkeypatch.setattr(AsyncMailbox, "get", fail)
    assert ask(server).status_code == 500
    whole = by_name(exporter)["llm_request"]
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_no_endpoint_is_no_tracer() -> None:
    assert open_tracer(None, "tiny") is None


def test_a_missing_exporter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r'pip install "\.\[otel\]" in the folder of the clone'):
        open_tracer("http://localhost:4318/v1/traces", "tiny")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="allowed: a URL"):
        ServerOptions(otlp_traces_endpoint="localhost:4317")
