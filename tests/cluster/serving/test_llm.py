"""`AsyncLLM` over replicas refuses unsupported calls in one sentence."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from headstart import SamplingParams
from headstart.cluster.serving import replica
from headstart.cluster.serving.llm import ReplicatedLLM, router
from headstart.engine.adapter_names import Adapter, LoRARequest
from headstart.engine.metrics import Counter, Gauge, Histogram, Metric, read_metrics
from headstart.errors import AdapterNotFoundError, RequestError
from headstart.frontend.chat.messages import TemplateOptions
from headstart.server.app import create_app
from headstart.server.keys import KeyFolder
from headstart.server.options import ServerOptions
from tests.cluster.serving.scripted import REPLICA, Receiver, Server, part
from tests.engine.tiny_llm import make_llm, save_smallest

LORA = LoRARequest("tables", 1, "/adapters/tables")


@pytest.fixture(scope="module")
def llm() -> Iterator[ReplicatedLLM]:
    server = Server()
    llm = ReplicatedLLM(server.frontend, server.driver, server.dispatcher, SamplingParams())
    yield llm
    llm.close()


def test_adapters_are_named_by_the_server_and_read_by_replicas(llm: ReplicatedLLM) -> None:
    async def load() -> None:
        loaded = await llm.load_adapter("hills", "/adapters/hills")
        assert loaded == Adapter("hills", Path("/adapters/hills"), "digest of hills")
        assert await llm.add_lora(LORA)
        with pytest.raises(AdapterNotFoundError, match="/adapters/broken"):
            await llm.load_adapter("hills", "/adapters/broken")
        assert {adapter.name for adapter in llm.adapters} == {"hills", "tables"}
        request = await llm.prepare([5, 6, 7], lora_request=LORA)
        assert request.adapter is not None and request.adapter.name == "tables"
        await llm.unload_adapter("hills")
        assert ("unload_adapter", loaded) in llm._replicas._handle.broadcasts  # type: ignore[attr-defined]
        for name in ("hills", "seas"):
            with pytest.raises(RequestError, match=f"no adapter '{name}'; loaded: 'tables'"):
                await llm.prepare([5, 6, 7], adapter=name)

    asyncio.run(load())


def test_a_request_carries_its_adapter_and_has_separate_prefixes() -> None:
    server = Server()
    with closing(server.driver):
        hills = server.frontend.adapters.load("hills", "/adapters/hills", server.driver.call)
        plain, own = server.request("plain"), server.request("own", "hills")
        assert plain.requests[0].sequence.root != own.requests[0].sequence.root
        server.stream().put(part(0, 8, finished=True))
        receiver = Receiver()
        server.driver.submit(own, receiver)
        assert server.next_request().adapter == hills
        assert receiver.tokens() == [8]


@pytest.fixture(scope="module")
def engine_metrics(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    """Return all metrics of an engine that evicted blocks."""
    llm = make_llm(save_smallest(tmp_path_factory.mktemp("model")))
    for first in range(3, 103, 10):
        llm.generate([list(range(first, first + 48))], SamplingParams(max_tokens=1), use_tqdm=False)
    metrics = read_metrics(llm.engine)
    llm.close()
    return metrics


def test_metrics_of_replicas_are_added_up(llm: ReplicatedLLM, engine_metrics: list[Metric]) -> None:
    """Regression: `/metrics` failed for histograms. Metrics of every kind are added."""
    llm.dispatcher.set_replicas(["one", "other"])
    for name in llm.dispatcher.replicas:
        llm.dispatcher.note_metrics(name, engine_metrics)
    added = {(m.name, tuple(m.labels.items())): m for m in llm.read_metrics()}
    assert {type(metric) for metric in engine_metrics} == {Counter, Gauge, Histogram}
    for metric in engine_metrics:
        both = added[metric.name, tuple(metric.labels.items())]
        if isinstance(metric, Histogram):
            assert isinstance(both, Histogram)
            assert (both.count, both.sum) == (2 * metric.count, 2 * metric.sum)
            assert both.buckets == {bound: 2 * n for bound, n in metric.buckets.items()}
            assert metric.count > 0
        elif isinstance(metric, (Counter, Gauge)):
            assert isinstance(both, (Counter, Gauge))
            is_share = metric.name == "vllm:kv_cache_usage_perc"
            assert both.value == metric.value * (1 if is_share else 2)


def test_counters_include_those_of_removed_replicas(engine_metrics: list[Metric]) -> None:
    """Regression: sums fell when a replica died, which a monitor takes for a restart."""
    server = Server()
    llm = ReplicatedLLM(server.frontend, server.driver, server.dispatcher, SamplingParams())

    def counts() -> list[Metric]:
        counters = [metric for metric in llm.read_metrics() if not isinstance(metric, Gauge)]
        return sorted(counters, key=repr)

    llm.dispatcher.set_replicas(["first", "other"])
    for name in llm.dispatcher.replicas:
        llm.dispatcher.note_metrics(name, engine_metrics)
    before = counts()
    for names in (["other"], ["other"], ["new"]):
        llm.dispatcher.set_replicas(names)
        assert counts() == before
    assert not any(isinstance(metric, Gauge) for metric in llm.read_metrics()), (
        "no replica reports any"
    )
    llm.close()


def test_every_metric_is_passed_to_ray(
    engine_metrics: list[Metric], monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, float] = {}

    def gauge(name: str, about: str, tag_keys: tuple[str, ...]) -> Any:
        def set_value(value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == tag_keys and about
            values[name] = value

        return SimpleNamespace(set=set_value)

    monkeypatch.setattr(replica, "metrics", SimpleNamespace(Gauge=gauge))
    replica.RayGauges().update(engine_metrics)
    names = {metric.name.replace(":", "_") for metric in engine_metrics}
    assert {name.removesuffix("_total") for name in values if "idle" not in name} == {
        name for name in names if "idle" not in name
    }
    [ages] = [metric for metric in engine_metrics if isinstance(metric, Histogram)]
    assert values["vllm_kv_block_idle_before_evict_seconds_count"] == ages.count > 0


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def _prompt(llm: ReplicatedLLM) -> None:
    prompt = {"prompt": "What is it?", "multi_modal_data": {"image": object()}}
    async for _ in llm.generate(prompt):
        pass


async def _chat(llm: ReplicatedLLM) -> None:
    await llm.prepare([{"role": "user", "content": [IMAGE]}], template=TemplateOptions())


@pytest.mark.parametrize("call", [_prompt, _chat])
def test_an_image_for_a_text_model_is_refused(
    llm: ReplicatedLLM, call: Callable[[ReplicatedLLM], Coroutine[Any, Any, Any]]
) -> None:
    """No replica receives the request."""
    with pytest.raises(RequestError, match="takes only text"):
        asyncio.run(call(llm))


PREFIX = list(range(3, 3 + 40))  # two blocks, and half of one
GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def test_a_request_says_how_many_blocks_are_public() -> None:
    server = Server()
    llm = ReplicatedLLM(server.frontend, server.driver, server.dispatcher, GREEDY)
    server.dispatcher.set_replicas([REPLICA])
    assert llm.publish(PREFIX) == 2
    num_public = []
    for number, (tokens, salt) in enumerate(
        [([*PREFIX, 1, 2], "a"), (PREFIX[:20], "b"), ([9, *PREFIX], "a"), (PREFIX, None)]
    ):
        group = server.frontend.prepare(
            {"prompt_token_ids": tokens}, GREEDY, request_id=str(number), salt=salt
        )
        server.stream().put(part(0, 8), part(1, 9, finished=True))
        server.driver.submit(group, lambda update: None)
        num_public.append(server.next_request().num_public)
    llm.close()
    assert num_public == [2, 1, 0, 0]


def test_a_prepared_request_is_answered() -> None:
    """Regression: the driver did not accept prepared requests, which the server sends."""

    server = Server()
    server.dispatcher.set_replicas([REPLICA])
    server.stream().put(part(0, 8), part(1, 9, finished=True))
    llm = ReplicatedLLM(server.frontend, server.driver, server.dispatcher, SamplingParams())

    async def ask() -> list[int]:
        request = await llm.prepare({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2))
        return [len(output.outputs[0].token_ids) async for output in llm.outputs(request)]

    assert asyncio.run(ask()) == [1, 2]
    llm.close()


async def _get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.get(path, headers=headers)


def test_a_server_is_ready_while_a_replica_runs() -> None:
    """Regression: `/ready` succeeded when all replicas were dead, and requests waited."""
    server = Server()
    llm = ReplicatedLLM(server.frontend, server.driver, server.dispatcher, SamplingParams())
    app = create_app(llm, "tiny", cache_api=router)
    for replicas, status in (([], 503), ([REPLICA], 200), ([], 503)):
        server.dispatcher.set_replicas(replicas)
        response = asyncio.run(_get(app, "/ready"))
        assert response.status_code == status
        assert ("no replica is running" in response.text) == (status == 503)
        assert asyncio.run(_get(app, "/health")).status_code == 200
    llm.close()


def test_advice_on_replicas_has_no_memory_estimate(llm: ReplicatedLLM) -> None:
    """Regression: prompts sent to other replicas counted as evicted."""
    response = asyncio.run(_get(create_app(llm, "tiny", cache_api=router), "/cache/advice"))
    assert set(response.json()) == {"prompts", "prompt_tokens", "cached_tokens", "forks", "salts"}


def test_advice_on_replicas_covers_only_a_tenants_prompts(
    llm: ReplicatedLLM, tmp_path: Path
) -> None:
    keys = KeyFolder(tmp_path)
    own, admin = keys.add("alice"), keys.add("monitor", admin=True)
    options = ServerOptions(api_keys=True, keys_folder=str(tmp_path))
    app = create_app(llm, "tiny", options, cache_api=router)
    request = llm.frontend.prepare([5, 6, 7], SamplingParams(), salt="another tenant's")

    async def finish() -> None:
        app.state.service.watch.ended(request, request.output())

    asyncio.run(finish())
    for key, prompts in ((own, 0), (admin, 1)):
        response = asyncio.run(_get(app, "/cache/advice", authorization=f"Bearer {key}"))
        assert (response.status_code, response.json()["prompts"]) == (200, prompts)
