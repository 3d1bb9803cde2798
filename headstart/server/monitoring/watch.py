"""Records of ended requests, for metrics, explanations of misses, and advice.

Metrics have vLLM's names where the meaning is the same.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from itertools import chain
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headstart.cache import MissExplanation, Namespace
from headstart.engine import metrics as engine_metrics
from headstart.server.cache.advice import Adviser, PoolSize, advise_memory
from headstart.server.cache.traffic import PastPrompt, TenantTraffic, Times

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.omni.params import OmniOutput
    from headstart.server.tenants import Tenant


# Upper bounds of the buckets of histograms.
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_COUNTERS = {
    "prompt": ("vllm:prompt_tokens", "Prompt tokens of ended requests"),
    "cached": ("headstart:cached_prompt_tokens", "Cached prompt tokens of ended requests"),
    "evicted": (
        "headstart:recomputed_evicted_tokens",
        "Prompt tokens computed again after eviction",
    ),
    "generated": ("vllm:generation_tokens", "Generated tokens of ended requests"),
}
_TIMES = {
    "gap": ("vllm:inter_token_latency_seconds", "Time from a token to the next"),
    "queue": ("vllm:request_queue_time_seconds", "Time from arrival to the first step"),
    "first": ("vllm:time_to_first_token_seconds", "Time to the first token"),
    "warm": (
        "headstart:warm_time_to_first_token_seconds",
        "Time to the first token if at least half of the prompt is cached",
    ),
    "token": ("vllm:request_time_per_output_token_seconds", "Mean time between tokens"),
    "total": ("vllm:e2e_request_latency_seconds", "Time to the last token"),
    "age": ("headstart:prefix_age_at_hit_seconds", "Age of the prompt that a request hits"),
}
_LENGTHS = {
    "prompt": ("vllm:request_prompt_tokens", "Prompt tokens of a request"),
    "answer": ("vllm:request_generation_tokens", "Generated tokens of an answer"),
}
_STAGES = {
    "tokens": ("headstart:stage_tokens", "Tokens of prompts and answers"),
    "cached_tokens": ("headstart:stage_cached_tokens", "Tokens read from the cache"),
    "loaded_tokens": ("headstart:stage_loaded_tokens", "Tokens loaded from disk or a server"),
    "seconds": ("headstart:stage_seconds", "Time of a stage's steps"),
}
"""Metrics of a pipeline's stages, by field of `StageMetrics`."""


_FAMILIES: Mapping[type, Any] = {
    engine_metrics.Counter: CounterMetricFamily,
    engine_metrics.Gauge: GaugeMetricFamily,
    engine_metrics.Histogram: HistogramMetricFamily,
}


class _Registry:
    """Metrics with the model's name as their first label. Thread-safe."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

    def make(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        """Return a metric with the label `model_name` and then `labels`.

        Without `labels`, the model's name is already set. If `labels` has one name, the method
        `count` increases the metric.
        """
        metric = kind(name, text, ["model_name", *labels], registry=self.registry, **options)
        return metric if labels else metric.labels(self._model)

    def make_all(
        self, kind: Any, table: Mapping[str, tuple[str, str]], *labels: str, **options: Any
    ) -> dict[str, Any]:
        """Return a metric for each name and text of a table, by the table's keys."""
        return {key: self.make(kind, *row, *labels, **options) for key, row in table.items()}

    def count(self, metric: Any, label: str, value: float = 1) -> None:
        """Add `value` to a counter from `make`. label: the value of its label, such as "stop"."""
        metric.labels(self._model, label).inc(value)


class _EngineCounts(Collector):
    """The engine's metrics, read in the engine's thread at each scrape."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm = llm
        self._model = model

    def collect(self) -> Iterable[Family]:
        families: dict[str, Any] = {}
        for metric in self._llm.read_metrics():
            meaning = engine_metrics.MEANINGS[metric.name]
            names, labels = ["model_name", *metric.labels], [self._model, *metric.labels.values()]
            kind = _FAMILIES[type(metric)]
            family = families.setdefault(metric.name, kind(metric.name, meaning, labels=names))
            if isinstance(metric, engine_metrics.Histogram):
                family.add_metric(labels, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, engine_metrics.Counter | engine_metrics.Gauge):
                family.add_metric(labels, metric.value)
        return families.values()


class Metrics(_Registry):
    """Metrics of a text model's requests, and the engine's metrics."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        super().__init__(model)
        self.registry.register(_EngineCounts(llm, model))
        self._counters = self.make_all(Counter, _COUNTERS)
        self._seconds = self.make_all(Histogram, _TIMES, buckets=_SECONDS)
        self._tokens = self.make_all(Histogram, _LENGTHS, buckets=_TOKENS)
        text = "Answers by finish reason"
        self._ends = self.make(Counter, "vllm:request_success", text, "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.count(self._ends, reason, 0)

    def finished(
        self, request: RequestGroup, output: RequestOutput, age: float | None, num_evicted: int
    ) -> None:
        """Count an answered request.

        age: seconds since the arrival of the prompt that the request hit, or None. num_evicted:
        computed tokens that had been cached and were evicted.
        """
        self._count(request)
        self._counters["evicted"].inc(num_evicted)
        self._tokens["prompt"].observe(len(output.prompt_token_ids))
        for answer in output.outputs:
            self.count(self._ends, str(answer.finish_reason))
            self._tokens["answer"].observe(len(answer.token_ids))
        metrics = output.metrics
        is_warm = 2 * output.num_cached_tokens >= len(output.prompt_token_ids)
        for name, value in {
            "queue": metrics.queue,
            "first": metrics.time_to_first_token,
            "warm": metrics.time_to_first_token if is_warm else None,
            "token": metrics.time_per_token,
            "total": metrics.total,
            "age": age,
        }.items():
            if value is not None:
                self._seconds[name].observe(value)

    def cut_off(self, request: RequestGroup, reason: str) -> None:
        """Count a request that ended without an answer. reason: "abort" or "error"."""
        self._count(request)
        for answer in request.requests:
            self.count(self._ends, answer.finish_reason or reason)

    def _count(self, request: RequestGroup) -> None:
        if request.start_time is not None:
            self._counters["prompt"].inc(len(request.prompt_token_ids))
            self._counters["cached"].inc(request.requests[0].num_cached_tokens)
        for answer in request.requests:
            self._counters["generated"].inc(len(answer.sampling.output_token_ids))
            for gap in answer.token_gaps:
                self._seconds["gap"].observe(gap)

    def read(self) -> bytes:
        """Return the text of `/metrics`. Must run in the engine's thread."""
        return generate_latest(self.registry)


class SpeechMetrics(_Registry):
    """Metrics of the requests and stages of a model with speech output."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._ends = self.make(
            Counter, "vllm:request_success", "Requests that ended", "finished_reason"
        )
        self._in_pipeline = self.make(
            Gauge, "headstart:requests_in_pipeline", "Requests that run or wait in a stage"
        )
        self._stages = self.make_all(Counter, _STAGES, "stage")
        self._spoken = self.make(Counter, "headstart:speech_seconds", "Seconds of generated speech")
        self._first = self.make(
            Histogram, "vllm:time_to_first_token_seconds", "Time to the first token of text"
        )

    def end(self, reason: str) -> None:
        self.count(self._ends, reason)

    def add(self, output: OmniOutput) -> None:
        for stage, metrics in output.metrics.items():
            for field, counter in self._stages.items():
                self.count(counter, stage, getattr(metrics, field))
        self._spoken.inc(output.seconds)
        first = output.metrics["thinker"].first_output
        if first is not None:
            self._first.observe(first)

    def read(self, in_pipeline: int) -> bytes:
        """Return the text of `/metrics`. in_pipeline: requests in the pipeline."""
        self._in_pipeline.set(in_pipeline)
        return generate_latest(self.registry)


_MOST_REQUESTS = 200  # ended requests to show on the page
_DELAY = 0.02  # seconds until a request is recorded; its client may send the next one at once
_MOST_ENDED = 1024  # ended requests that may wait for their recording


class Watch:
    """Recorder of ended requests, in a thread. Thread-safe."""

    def __init__(self, llm: AsyncLLM, name: str, *, by_tenant: bool) -> None:
        """Record the requests of `llm`. name: the model's name. by_tenant: see `TenantTraffic`."""
        tokenizer = llm.tokenizer
        self.decode: Callable[[Sequence[int]], str] | None = None
        if tokenizer is not None:
            self.decode = lambda token_ids: str(tokenizer.decode(list(token_ids)))
        blocks = llm.num_blocks
        self._pool = PoolSize(blocks, llm.block_size, llm.kv_cache_bytes // blocks)
        self._lock = threading.Lock()
        # Each request, its last output (or "abort" or "error"), and the time of its end by
        # `time.monotonic` and by `time.time`.
        self._ended: deque[tuple[RequestGroup, RequestOutput | str, float, float]] = deque()
        self._is_due = False
        self._traffic = TenantTraffic(by_tenant=by_tenant)
        self._adviser = Adviser(self.decode, llm.block_size)
        self._recent: deque[dict[str, Any]] = deque(maxlen=_MOST_REQUESTS)
        self.metrics = Metrics(llm, name)

    def ended(self, request: RequestGroup, output: RequestOutput | str) -> None:
        """Queue an ended request, to be recorded in a thread. Must run in the event loop.

        output: the last output; without an answer, "abort" or "error". Recording takes as long as
        several decoding steps of a small model. Prompts that must not be stored are only counted.
        """
        self._ended.append((request, output, time.monotonic(), time.time()))
        if len(self._ended) > _MOST_ENDED:
            self.flush(1)
        if not self._is_due:
            self._is_due = True
            # An empty context has no tenant, so `flush` is not queued behind the tenant's jobs.
            loop = asyncio.get_running_loop()
            loop.call_later(_DELAY, self._flush_in_thread, context=Context())

    def _flush_in_thread(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self.flush)

    def flush(self, limit: int | None = None) -> None:
        """Record all ended requests, or at most `limit`.

        Methods that return records call `flush` first. `flush` takes the lock even if no request
        waits, since another thread may be recording the last request.
        """
        for _ in range(limit or max(1, len(self._ended))):
            with self._lock:
                if not self._ended:
                    return
                self._record(*self._ended.popleft())

    def _record(
        self, request: RequestGroup, output: RequestOutput | str, end: float, end_time: float
    ) -> None:
        if isinstance(output, str):
            self.metrics.cut_off(request, output)
            return
        metrics, missed = output.metrics, output.why_missed
        num_generated = sum(len(answer.token_ids) for answer in output.outputs)
        age, num_evicted = None, 0
        if request.params.is_stored:
            arrived = time.monotonic() - end + (metrics.total or 0.0)  # seconds ago
            looked_up = arrived - (metrics.queue or 0.0)
            computed = arrived - (metrics.time_to_first_token or 0.0)
            prompt = self._traffic.of(request.namespace.salt).add(
                output.request_id,
                request.namespace,
                output.prompt_token_ids,
                output.num_cached_tokens,
                missed,
                Times(arrived, looked_up, computed),
                num_generated,
            )
            num_evicted = prompt.num_evicted_tokens
            if prompt.num_cached and prompt.closest is not None:
                age = prompt.times.arrived - prompt.closest.prompt.times.arrived
        self.metrics.finished(request, output, age, num_evicted)
        self._recent.append(
            {
                "id": output.request_id,
                "time": round(end_time, 3),
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens,
                "generated_tokens": num_generated,
                "time_to_first_token": metrics.time_to_first_token,
                "missed": missed.reason.name.lower() if missed is not None else None,
                "why": str(missed) if missed is not None else None,
            }
        )

    def explain(
        self, namespace: Namespace, token_ids: Sequence[int], missed: MissExplanation
    ) -> dict[str, Any]:
        self.flush()
        with self._lock:
            traffic = self._traffic.of(namespace.salt)
            return self._adviser.explain(traffic, namespace, token_ids, missed)

    def advise(self, tenant: Tenant) -> dict[str, Any]:
        """Return the advice on recent prompts; see `Adviser.advise`.

        An administrator gets the advice for all tenants. For any other tenant, `memory` is None,
        because it would depend on the data of other tenants.
        """
        self.flush()
        with self._lock:
            recent, last_dropped = self._traffic.recent, self._traffic.last_dropped
            if not tenant.is_admin:
                recent = [self._traffic.of(tenant.salt).recent]
        memory = None
        if tenant.is_admin:
            memory = advise_memory(list(chain(*recent)), last_dropped, self._pool)
        return self._adviser.advise(recent) | {"memory": memory}

    def recent_prompts(self) -> list[PastPrompt]:
        """Return the stored recent prompts of all tenants."""
        self.flush()
        with self._lock:
            return list(chain(*self._traffic.recent))

    def recent_requests(self) -> list[dict[str, Any]]:
        """Return counts and times of the last answered requests, oldest first."""
        self.flush()
        with self._lock:
            return list(self._recent)

    def clear(self) -> None:
        """Remove the recent prompts."""
        self.flush()
        with self._lock:
            self._traffic.clear()
