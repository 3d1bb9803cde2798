"""Samples of `/metrics`, read by Prometheus's parser."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headstart import AsyncLLM
from headstart.engine.metrics import MEANINGS, Histogram, read_metrics
from headstart.server.app import create_app
from tests.server.running import Running, running

BODY = {"model": "tiny", "prompt": "one two three", "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def ask(server: Running, tokens: int, **more: object) -> None:
    body = BODY | {"max_tokens": tokens} | more
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()


def read(server: Running) -> dict[str, float]:
    """Return each sample by its name and its labels except the model's."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = {}
    for sample in (entry for family in families for entry in family.samples):
        labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
        samples[sample.name + "".join(f" {k}={v}" for k, v in labels.items())] = sample.value
    return samples


def test_times_of_tokens_and_requests_are_counted(server: Running) -> None:
    ask(server, 7)
    ask(server, 4, n=2)
    samples = read(server)
    between = "vllm:inter_token_latency_seconds"
    assert samples[f"{between}_count"] == samples[f"{between}_bucket le=+Inf"] == 6 + 3 + 3
    assert samples[f"{between}_sum"] > 0
    buckets = [value for name, value in samples.items() if name.startswith(f"{between}_bucket")]
    assert buckets == sorted(buckets)
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 2
    assert samples["vllm:generation_tokens_total"] == 7 + 8
    assert samples["vllm:request_success_total finished_reason=length"] == 3
    assert samples["vllm:request_success_total finished_reason=abort"] == 0


def test_half_cached_prompts_count_as_warm(server: Running) -> None:
    for prompt in ([5] * 32, [5] * 32, [5] * 16 + [6] * 32):
        ask(server, 1, prompt=prompt)
    samples = read(server)
    assert samples["headstart:warm_time_to_first_token_seconds_count"] == 1
    assert samples["vllm:time_to_first_token_seconds_count"] == 3


def test_a_request_of_a_disconnected_client_is_counted(server: Running) -> None:
    body = BODY | {"max_tokens": 8000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = filter(None, answer.iter_lines())
        for _ in range(3):
            assert json.loads(next(lines).removeprefix("data: "))
    while (samples := read(server))["vllm:request_success_total finished_reason=abort"] == 0:
        pass
    assert samples["vllm:request_success_total finished_reason=length"] == 0
    assert samples["vllm:generation_tokens_total"] >= 3
    assert samples["vllm:inter_token_latency_seconds_count"] >= 2
    assert samples["vllm:prompt_tokens_total"] > 0


def test_a_request_that_times_out_is_counted() -> None:
    with running(request_timeout=0.2) as server:
        body = BODY | {"max_tokens": 8000}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 504
        assert read(server)["vllm:request_success_total finished_reason=abort"] == 1


def test_the_engines_counts_match_get_metrics(server: Running) -> None:
    for _ in range(2):
        ask(server, 1)
    samples = read(server)
    metrics = server.llm.driver.call(lambda: read_metrics(server.llm.engine))
    assert {metric.name for metric in metrics} <= set(MEANINGS)
    for metric in metrics:
        if isinstance(metric, Histogram):
            assert samples[f"{metric.name}_count"] == metric.count
            assert samples[f"{metric.name}_sum"] == metric.sum
            assert samples[f"{metric.name}_bucket le=60.0"] == metric.buckets["60.0"]
            continue
        name = metric.name + "_total" * (type(metric).__name__ == "Counter")
        name += "".join(f" {k}={v}" for k, v in metric.labels.items())
        assert samples[name] == metric.value  # type: ignore[attr-defined]
    assert samples["vllm:prefix_cache_hits_total"] > 0


def test_two_servers_of_one_process_count_separately(server: Running) -> None:
    other = create_app(AsyncLLM("headstart-tiny", num_blocks=16), "other")
    ask(server, 2)
    text = other.state.service.watch.metrics.read().decode()
    assert 'vllm:generation_tokens_total{model_name="other"} 0.0' in text
    other.state.service.llm.close()
