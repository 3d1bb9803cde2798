"""The server's metrics for Prometheus, under vLLM's names where the meaning is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.cache import MissReason

if TYPE_CHECKING:
    from headstart.engine.async_llm import AsyncLLM
    from headstart.engine.engine import Engine
    from headstart.engine.outputs import RequestOutput

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_REASONS = [reason for reason in MissReason if reason is not MissReason.NONE]


class Metrics:
    """Counts since the start. Requests that end are told; the engine's own are read when asked."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._engine: Engine = llm.engine
        self.registry = CollectorRegistry()
        self._model = model
        self._gauges = {
            name: self._gauge(f"vllm:{name}", text)
            for name, text in {
                "num_requests_running": "Answers that are computed",
                "num_requests_waiting": "Answers that wait",
                "kv_cache_usage_perc": "Share of the KV blocks that requests hold",
            }.items()
        }
        self._counts = {
            "prefix_cache_queries": self._counter("vllm:prefix_cache_queries", "Tokens asked for"),
            "prefix_cache_hits": self._counter("vllm:prefix_cache_hits", "Tokens found cached"),
            "num_preemptions": self._counter("vllm:num_preemptions", "Requests that gave way"),
            "evictions": self._counter("headstart:blocks_evicted", "Cached blocks reused"),
        }
        self._missed = self._counter(
            "headstart:prefix_cache_misses", "Requests by why they hit no more", "reason"
        )
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of answered requests")
        self._cached = self._counter("headstart:cached_prompt_tokens", "Those that were cached")
        self._regretted = self._counter(
            "headstart:regretted_tokens", "Prompt tokens computed again that were evicted before"
        )
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers")
        self._success = self._counter(
            "vllm:request_success", "Answers by their end", "finished_reason"
        )
        self._times = {
            "queue": self._histogram("vllm:request_queue_time_seconds", "Until it runs"),
            "first": self._histogram("vllm:time_to_first_token_seconds", "Until its first token"),
            "warm": self._histogram(
                "headstart:warm_time_to_first_token_seconds",
                "Until the first token, where at least half of the prompt was cached",
            ),
            "token": self._histogram("vllm:time_per_output_token_seconds", "Between tokens"),
            "total": self._histogram("vllm:e2e_request_latency_seconds", "Until its last token"),
            "age": self._histogram(
                "headstart:prefix_age_at_hit_seconds", "Since the prompt that it hits came"
            ),
        }
        self._sizes = {
            "prompt": self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _TOKENS),
            "answer": self._histogram(
                "vllm:request_generation_tokens", "Tokens of an answer", _TOKENS
            ),
        }

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, ["model_name"], registry=self.registry)
        return gauge.labels(self._model)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, ["model_name", *labels], registry=self.registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        told = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return told.labels(self._model)

    def finished(self, output: RequestOutput, age: float | None, num_regretted: int) -> None:
        """An answered request; `age` in seconds of the prompt that it hit, if it hit one.

        num_regretted: tokens that were computed although they had been cached once.
        """
        tokens = [len(answer.token_ids) for answer in output.outputs]
        self._prompt.inc(len(output.prompt_token_ids))
        self._cached.inc(output.num_cached_tokens)
        self._regretted.inc(num_regretted)
        self._generated.inc(sum(tokens))
        self._sizes["prompt"].observe(len(output.prompt_token_ids))
        for answer, count in zip(output.outputs, tokens, strict=True):
            self._success.labels(self._model, answer.finish_reason).inc()
            self._sizes["answer"].observe(count)
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
                self._times[name].observe(value)

    def read(self) -> bytes:
        """All of it as text. For the engine's thread."""
        manager = self._engine.manager
        stats = manager.stats
        running, waiting = self._engine.num_requests
        usage = 1 - manager.num_free_blocks / manager.config.num_blocks
        for name, value in {
            "num_requests_running": running,
            "num_requests_waiting": waiting,
            "kv_cache_usage_perc": usage,
        }.items():
            self._gauges[name].set(value)
        for name, count in {
            "prefix_cache_queries": stats.queried_tokens,
            "prefix_cache_hits": stats.hit_tokens,
            "num_preemptions": self._engine.num_preemptions,
            "evictions": manager.num_evictions,
        }.items():
            _raise_to(self._counts[name], count)
        for reason in _REASONS:
            _raise_to(self._missed.labels(self._model, reason.name.lower()), stats.missed[reason])
        return generate_latest(self.registry)


def _raise_to(counter: Counter, value: int) -> None:
    """Set a counter to a count that is kept elsewhere."""
    counter.inc(max(0, value - counter._value.get()))
