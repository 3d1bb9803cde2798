"""The counts of `/metrics`, read by Prometheus's parser."""

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
    """Every sample by its name and labels but the model's."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    found = {}
    for sample in (one for family in families for one in family.samples):
        labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
        found[sample.name + "".join(f" {k}={v}" for k, v in labels.items())] = sample.value
    return found


def test_each_token_and_each_request_has_its_time(server: Running) -> None:
    ask(server, 7)
    ask(server, 4, n=2)
    told = read(server)
    between = "vllm:inter_token_latency_seconds"
    assert told[f"{between}_count"] == told[f"{between}_bucket le=+Inf"] == 6 + 3 + 3
    assert told[f"{between}_sum"] > 0
    buckets = [value for name, value in told.items() if name.startswith(f"{between}_bucket")]
    assert buckets == sorted(buckets)
    assert told["vllm:request_time_per_output_token_seconds_count"] == 2
    assert told["vllm:generation_tokens_total"] == 7 + 8
    assert told["vllm:request_success_total finished_reason=length"] == 3
    assert told["vllm:request_success_total finished_reason=abort"] == 0


def test_prompts_of_which_half_is_cached_are_counted_as_warm(server: Running) -> None:
    for prompt in ([5] * 32, [5] * 32, [5] * 16 + [6] * 32):
        ask(server, 1, prompt=prompt)
    told = read(server)
    assert told["headstart:warm_time_to_first_token_seconds_count"] == 1
    assert told["vllm:time_to_first_token_seconds_count"] == 3


def test_a_request_whose_client_went_away_is_counted(server: Running) -> None:
    body = BODY | {"max_tokens": 8000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = filter(None, answer.iter_lines())
        for _ in range(3):
            assert json.loads(next(lines).removeprefix("data: "))
    while (told := read(server))["vllm:request_success_total finished_reason=abort"] == 0:
        pass
    assert told["vllm:request_success_total finished_reason=length"] == 0
    assert told["vllm:generation_tokens_total"] >= 3
    assert told["vllm:inter_token_latency_seconds_count"] >= 2
    assert told["vllm:prompt_tokens_total"] > 0


def test_a_request_whose_time_is_over_is_counted() -> None:
    with running(request_timeout=0.2) as server:
        body = BODY | {"max_tokens": 8000}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 504
        assert read(server)["vllm:request_success_total finished_reason=abort"] == 1


def test_the_engine_s_counts_are_those_of_get_metrics(server: Running) -> None:
    for _ in range(2):
        ask(server, 1)
    told = read(server)
    metrics = server.llm.driver.call(lambda: read_metrics(server.llm.engine))
    assert {metric.name for metric in metrics} <= set(MEANINGS)
    for metric in metrics:
        if isinstance(metric, Histogram):
            assert told[f"{metric.name}_count"] == metric.count
            assert told[f"{metric.name}_sum"] == metric.sum
            assert told[f"{metric.name}_bucket le=60.0"] == metric.buckets["60.0"]
            continue
        name = metric.name + "_total" * (type(metric).__name__ == "Counter")
        name += "".join(f" {k}={v}" for k, v in metric.labels.items())
        assert told[name] == metric.value  # type: ignore[attr-defined]
    assert told["vllm:prefix_cache_hits_total"] > 0


def test_two_servers_of_one_process_count_apart(server: Running) -> None:
    other = create_app(AsyncLLM("headstart-tiny", num_blocks=16), "other")
    ask(server, 2)
    text = other.state.service.watch.metrics.read().decode()
    assert 'vllm:generation_tokens_total{model_name="other"} 0.0' in text
    other.state.service.llm.close()
