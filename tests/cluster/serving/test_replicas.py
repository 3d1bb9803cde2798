"""Two and four replicas on a separate Ray appear as one server, even when one dies.

Shared prefixes stay on one replica, and replicas come and go while clients stream.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from headstart import AsyncLLM, SamplingParams
from headstart.cluster.options import ReplicaConfig
from headstart.engine.config import make_config
from headstart.engine.params import RequestOutputKind
from headstart.errors import ReplicaLostError, RequestError
from headstart.frontend.vllm_compat import read_options
from headstart.models.files import find_folder
from headstart.server.errors import as_api_error
from tests.cluster.serving.ray_processes import process_of, wait_until
from tests.server.running import Running, serving
from tests.tiny_adapters import make_adapter

if TYPE_CHECKING:
    from headstart.cluster.serving.cluster import ReplicaCluster

pytest.importorskip("ray", reason="replicas need Ray")
# Warnings of Ray and its dependencies in this process.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

MODEL = "headstart-tiny"
OPTIONS = {"num_blocks": 512, "dtype": "float32", "debug": True}  # each checks its pool
DRAIN = 30.0
DOCUMENT = "Anna is 31. Ben is 45. Carl is 28. Dora is 52. " * 8
LONG = 64


class Cluster(NamedTuple):
    """Replicas behind a server, with their target count."""

    server: Running
    replicas: ReplicaCluster
    count: int

    def scale(self, count: int) -> None:
        """Change the number of replicas, and wait until they run."""
        config = SimpleNamespace(least=count, most=self.count, max_replicas=None)
        setattr(self.replicas, "_config", config)  # noqa: B010
        engine = make_config(read_options(MODEL, dict(OPTIONS)).config)
        self.replicas._deploy(MODEL, OPTIONS, engine, DRAIN)
        dispatcher = self.replicas.llm.dispatcher
        wait_until(lambda: len(dispatcher.replicas) == count)


@pytest.fixture(scope="module", params=[2, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    from headstart.cluster.serving.cluster import ReplicaCluster
    from headstart.cluster.serving.llm import router

    config = ReplicaConfig(replicas=request.param, replica_cpus=0.25)
    cluster = ReplicaCluster(MODEL, OPTIONS, config, drain_seconds=DRAIN)
    try:
        with serving(cluster.llm, "tiny", {}, cache_api=router) as server:
            yield Cluster(server, cluster, request.param)
    finally:
        cluster.close()


@pytest.fixture
def server(cluster: Cluster) -> Running:
    return cluster.server


def ask(server: Running, question: str, **options: Any) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": DOCUMENT + question}],
            max_tokens=16,
            **options,
        )
        return list(response) if options.get("stream") else response


def test_a_client_sees_one_server_and_a_prefix_stays_on_one_replica(server: Running) -> None:
    questions = [f"How old is {name}?" for name in ("Ben", "Anna", "Carl", "Dora")]
    answers = [ask(server, question) for question in questions]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    shared = answers[0].usage.prompt_tokens - 24  # the question and the end of the template
    assert cached[0] == 0 and min(cached[1:]) >= shared
    streamed = ask(server, questions[0], stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == answers[0].choices[0].message.content
    assert streamed[-1].usage.prompt_tokens_details.cached_tokens >= shared


def test_salts_apply_to_all_replicas(server: Running) -> None:
    def cached(salt: str) -> int:
        response = ask(server, "How old is Ben?", extra_body={"cache_salt": salt})
        return int(response.usage.prompt_tokens_details.cached_tokens)

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") > 0 and cached("b") > 0


def test_tenants_share_a_public_prefix_and_nothing_after_it(server: Running) -> None:
    prefix, own = list(range(100, 164)), list(range(200, 240))
    assert server.llm.publish(prefix) == 4

    def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": prefix + own, "cache_salt": salt}
        output = asyncio.run(last(server.llm, prompt, SamplingParams(max_tokens=1)))
        return int(output.num_cached_tokens)

    assert cached("tenant a") == 0
    assert cached("tenant b") == len(prefix)
    assert cached("tenant a") > len(prefix)


def test_answers_and_log_probabilities_match_one_engine(server: Running) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, n=2, stop=["."])
    alone = AsyncLLM(MODEL, **OPTIONS)
    outputs = [asyncio.run(last(llm, DOCUMENT, params)) for llm in (alone, server.llm)]
    alone.close()
    expected, actual = outputs
    for ours, theirs in zip(actual.outputs, expected.outputs, strict=True):
        assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [(k, v.rank, v.decoded_token) for k, v in mine.items()] == [
                (k, v.rank, v.decoded_token) for k, v in other.items()
            ]


def test_an_adapter_answers_as_in_one_engine_on_every_replica(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is named as a model of the API; its prompts hit none without it."""
    folder = make_adapter(find_folder(MODEL), tmp_path_factory.mktemp("adapter"), seed=3)
    server = cluster.server
    prompts = [f"Row {row}. {DOCUMENT}" for row in range(4 * cluster.count)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    async def answer_all(llm: AsyncLLM, adapter: str | None) -> list[tuple[list[int], int]]:
        results = await asyncio.gather(
            *(last(llm, prompt, params, adapter=adapter) for prompt in prompts)
        )
        return [(list(r.outputs[0].token_ids), r.num_cached_tokens) for r in results]

    async def answers(llm: AsyncLLM) -> list[list[tuple[list[int], int]]]:
        await llm.load_adapter("hills", folder)
        return [await answer_all(llm, adapter) for adapter in (None, "hills", "hills")]

    alone = AsyncLLM(MODEL, **OPTIONS)
    expected, actual = asyncio.run(answers(alone)), asyncio.run(answers(server.llm))
    alone.close()
    tokens = [[token_ids for token_ids, _ in row] for row in actual]
    assert tokens == [[token_ids for token_ids, _ in row] for row in expected]
    assert tokens[0] != tokens[1], "the adapter changes nothing"
    first, again = ([cached for _, cached in row] for row in actual[1:])
    assert max(first) < 16 < min(again), "only their common start is hit"
    asyncio.run(server.llm.unload_adapter("hills"))
    with pytest.raises(RequestError, match="no adapter 'hills'"):
        asyncio.run(last(server.llm, "x", params, adapter="hills"))


def test_a_replicas_refusal_has_the_error_of_one_engine(server: Running) -> None:
    with pytest.raises(RequestError, match="the prompt has 100000 tokens"):
        asyncio.run(last(server.llm, [1] * 100_000, SamplingParams(max_tokens=1)))


def test_a_reset_reaches_every_replica(server: Running) -> None:
    ask(server, "How old is Ben?")
    assert asyncio.run(server.llm.reset_prefix_cache())
    assert ask(server, "How old is Ben?").usage.prompt_tokens_details.cached_tokens == 0


def test_our_ray_refuses_a_caller_without_its_token(server: Running) -> None:
    """Ray listens on every interface and executes code that a caller sends."""
    import ray

    calls = (
        "import sys; from ray._raylet import GcsClient; "
        "GcsClient(address=sys.argv[1]).internal_kv_keys(b'', namespace=None, timeout=30)"
    )
    process = subprocess.run(
        [sys.executable, "-c", calls, ray.get_runtime_context().gcs_address],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
    )
    assert "AuthenticationError" in process.stderr


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    async for output in llm.generate(prompt, params, **options):
        final = output
    return final


def held_shares(cluster: Cluster) -> dict[str, float]:
    """Return each replica's share of blocks that requests hold."""
    metrics = cluster.replicas.llm.dispatcher.metrics
    return {
        name: next(
            gauge.value for gauge in metrics[name] if gauge.name == "vllm:kv_cache_usage_perc"
        )  # type: ignore[union-attr]
        for name in cluster.replicas.llm.dispatcher.replicas
        if name in metrics
    }


def test_a_dead_replica_ends_only_its_streams(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the requests stream, the others do not; then one replica dies.

    The router depends on timing, so a replica may have no stream; the first stream's one dies.
    """
    server = cluster.server
    dispatcher = cluster.replicas.llm.dispatcher
    prompts = [f"Row {row}. Anna is 31. Ben is 45. " * 4 for row in range(16)]
    streams = {row for row in range(16) if row % 2 == 0}
    begun: set[int] = set()
    routed: dict[str, str] = {}
    choose = dispatcher.choose

    def note_choice(request_id: str) -> str | None:
        chosen = choose(request_id)
        if chosen is not None:
            routed[request_id] = chosen
        return chosen

    monkeypatch.setattr(dispatcher, "choose", note_choice)

    async def answer(llm: AsyncLLM, row: int) -> list[int] | ReplicaLostError:
        kind = RequestOutputKind.CUMULATIVE if row in streams else RequestOutputKind.FINAL_ONLY
        # Enough that none has ended when the last one starts.
        count = 4 * LONG
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, output_kind=kind)
        try:
            async for output in llm.generate(prompts[row], params, f"row {row}"):  # noqa: B007
                begun.add(row)
        except ReplicaLostError as error:
            return error
        return list(output.outputs[0].token_ids)

    async def kill_one() -> list[list[int] | ReplicaLostError]:
        tasks = [asyncio.ensure_future(answer(server.llm, row)) for row in range(len(prompts))]
        while not streams <= begun:
            await asyncio.sleep(0.005)
        os.kill(await asyncio.to_thread(process_of, routed["row 0"]), signal.SIGKILL)
        return await asyncio.gather(*tasks)

    replicas = set(dispatcher.replicas)
    results = asyncio.run(kill_one())
    lost = {row for row, result in enumerate(results) if isinstance(result, ReplicaLostError)}
    assert 0 in lost and lost <= streams, "only what had begun to stream is lost"
    alone = AsyncLLM(MODEL, **OPTIONS)
    for row in sorted(set(range(len(prompts))) - lost):
        assert results[row] == asyncio.run(answer(alone, row))
    alone.close()
    error = as_api_error(results[min(lost)])  # type: ignore[arg-type]
    assert (error.status, error.code) == (503, "replica_lost")
    wait_until(lambda: len(set(dispatcher.replicas) - replicas) == 1)
    assert len(set(dispatcher.replicas) & replicas) == cluster.count - 1, "another one died"
    assert ask(server, "How old is Ben?").choices[0].finish_reason in ("stop", "length")
    wait_until(lambda: not any(held_shares(cluster).values()))


def test_32_clients_stream_while_replicas_come_and_go(cluster: Cluster) -> None:
    """Every answer is complete when replicas are halved and then increased beyond the start."""
    counts = (cluster.count // 2, cluster.count + 1)
    prompts = [f"Row {row}. Anna is 31. Ben is 45. " * 4 for row in range(32)]
    first: dict[int, list[int]] = {}
    answers = 0
    is_over = asyncio.Event()

    async def stream(row: int) -> None:
        nonlocal answers
        params = SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True)
        while not is_over.is_set():
            async for output in cluster.server.llm.generate(prompts[row], params):  # noqa: B007
                pass
            tokens = list(output.outputs[0].token_ids)
            assert len(tokens) == LONG and first.setdefault(row, tokens) == tokens
            answers += 1

    async def scale() -> None:
        for count in counts:
            await asyncio.to_thread(cluster.scale, count)
        is_over.set()

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for row in range(len(prompts)):
                tasks.create_task(stream(row))
            tasks.create_task(scale())

    asyncio.run(run())
    assert len(cluster.replicas.llm.dispatcher.replicas) == counts[-1]
    assert answers >= len(prompts)
    wait_until(lambda: not any(held_shares(cluster).values()))
