"""One engine as a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cluster.serving.heartbeat import SILENCE, Heartbeats, with_heartbeats
from headstart.cluster.serving.messages import AnswerRequest, EngineFacts, Follow, Part, Report
from headstart.cluster.serving.publisher import CachePublisher
from headstart.engine.adapter_names import Adapter
from headstart.engine.metrics import MEANINGS, Counter, Gauge, Histogram, Metric
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import RequestOutputKind, SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import DamagedAdapterError, EngineError
from headstart.frontend.async_llm import AsyncLLM
from headstart.frontend.facade import start_engine

try:
    from ray.util import metrics
except ModuleNotFoundError:  # a replica without Ray reports no metrics
    metrics = None

if TYPE_CHECKING:
    from headstart.engine.request import RequestGroup

_LOG = logging.getLogger("headstart.server")


_VALUES: dict[type, dict[str, str]] = {
    Counter: {"_total": "value"},
    Gauge: {"": "value"},
    Histogram: {"_count": "count", "_sum": "sum"},
}


class RayGauges:
    """The engine's metrics for Ray: `vllm:...` as `ray_vllm_...`, by replica.

    Ray Serve tags them with the replica. Counts are gauges here, since Ray's counters can only be
    increased, and the engine counts itself. A histogram becomes its count and its sum.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def update(self, values: list[Metric]) -> None:
        """Set the gauges to these values."""
        for metric in values:
            for ending, attribute in _VALUES[type(metric)].items():
                name = metric.name.replace(":", "_") + ending
                if name not in self._gauges:
                    meaning, labels = MEANINGS[metric.name], tuple(metric.labels)
                    self._gauges[name] = metrics.Gauge(name, meaning, tag_keys=labels)
                self._gauges[name].set(getattr(metric, attribute), tags=metric.labels)


class EngineReplica:
    """Answers requests of servers, and reports its cache.

    Ray Serve makes it, checks its health, waits for its requests before it stops it, and replaces
    it when it died. The new replica has its blocks only from the tiers, if there are any.
    """

    def __init__(self, model: str, options: Mapping[str, Any], silence: float = SILENCE) -> None:
        """`options` are the engine's; a server silent for `silence` seconds counts as dead.

        Raises ConfigError, ModelError or OutOfMemoryError.
        """
        self._llm = AsyncLLM.from_started(start_engine(model, dict(options), is_observed=True))
        self._publisher = CachePublisher(self._llm)
        self._gauges = RayGauges()
        self._servers = Heartbeats(silence)
        self._server_of: dict[RequestGroup, str] = {}  # of each request that runs
        self._naming = asyncio.Lock()  # held while an adapter's name must not change

    async def facts(self) -> EngineFacts:
        """Return the properties of the engine that a server needs."""
        facts, images = self._llm.frontend.facts, self._llm.frontend.images
        return EngineFacts(
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            max_model_len=facts.max_model_len,
            block_size=facts.names.block_size,
            num_blocks=facts.num_blocks,
            kv_cache_bytes=facts.kv_cache_bytes,
            model_name=facts.names.model,
            silence=self._servers.silence,
            # Reads all weights here, so that the first image does not wait for it.
            vision=await asyncio.to_thread(images.facts) if images is not None else None,
        )

    async def answer(self, request: AnswerRequest) -> AsyncGenerator[Part]:
        """Yield two parts: when the prompt is computed, and all other tokens at the end.

        The tokens between are reported to the request's follower meanwhile, together with those of
        its other requests: see `CachePublisher`. Raises RequestError or EngineError.
        """
        self._servers.beat(request.server)
        params = request.params.clone()
        params.output_kind = RequestOutputKind.DELTA
        names = self._llm.frontend.facts.names
        if request.num_public:  # the server has read the operator's files
            names.publish(request.prompt_token_ids[: request.num_public * names.block_size])
        group = await self._prepare(request, params)
        for answer in group.requests:
            answer.sequence.marks = request.marks
        if request.owner is not None:
            self._llm.set_share(*request.owner)
        self._publisher.begin()
        self._server_of[group] = request.server
        try:
            async with aclosing(self._llm.outputs(group)) as outputs:
                async for part in self._parts(outputs, request):
                    if group not in self._server_of:
                        return  # an error would be sent to the dead server: Ray tries for a second
                    yield part
        finally:
            self._server_of.pop(group, None)
            self._publisher.end()

    async def _parts(
        self, outputs: AsyncGenerator[RequestOutput], request: AnswerRequest
    ) -> AsyncGenerator[Part]:
        counts: Counts[int] = Counts()
        later: list[Part] = []
        async for output in outputs:
            is_first = not counts
            part = Part.of(output, counts, is_first=is_first)
            if is_first:
                await self._publisher.publish()  # the next request may hit these blocks
                yield part
                continue
            later.append(part)
            if part.finished:
                yield Part.joined(later)
            elif request.follower is not None:
                self._publisher.add_progress(request.follower, request.key, part)

    async def _prepare(self, request: AnswerRequest, params: SamplingParams) -> RequestGroup:
        """Prepare a request, and load its adapter if it is not here.

        Raises RequestError or EngineError for images that cannot be taken, DamagedAdapterError for
        an adapter that differs from the server's.
        """
        prompt, images = PreparedPrompt(request.prompt_token_ids), self._llm.frontend.images
        if request.images is not None:
            if images is None:
                raise EngineError("the prompt has images, and the model in this replica sees none")
            prompt = await asyncio.to_thread(
                images.receive, request.prompt_token_ids, await request.images, request.salt
            )
        prepare = partial(
            self._llm.prepare,
            *(prompt, params, request.engine_id),
            cache_salt=request.salt,
            priority=request.priority,
        )
        adapter = request.adapter
        if adapter is None:
            return await prepare()
        async with self._naming:  # another request may want another adapter of this name
            if adapter not in self._llm.adapters:
                await self._llm.load_adapter(adapter.name, adapter.path)
            group = await prepare(adapter=adapter.name)
        if group.adapter is None or group.adapter.digest != adapter.digest:
            raise DamagedAdapterError(
                f"the files in {adapter.path} are others than when adapter {adapter.name!r} was "
                "loaded, or others on another machine; load it again"
            )
        return group

    async def load_adapter(self, name: str, path: Path) -> Adapter:
        """Load an adapter: `AsyncLLM.load_adapter`."""
        async with self._naming:
            return await self._llm.load_adapter(name, path)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter's name, unless another adapter has it by now."""
        async with self._naming:
            if adapter in self._llm.adapters:
                await self._llm.unload_adapter(adapter.name)

    async def follow(self, subscription: Follow) -> AsyncGenerator[Report]:
        """Yield the cached blocks and all changes, with heartbeats, until the caller leaves."""
        self._servers.beat(subscription.follower)
        reports = self._publisher.follow(subscription.follower)
        async with aclosing(with_heartbeats(reports)) as with_beats:
            async for report in with_beats:
                yield report

    async def beat(self, server: str) -> None:
        """Record a server's heartbeat; without any for `silence` seconds its calls end."""
        self._servers.beat(server)

    async def reset(self, running: bool, tiers: bool) -> bool:
        """Reset the cache: `AsyncLLM.reset_prefix_cache`; followers learn of it at once."""
        return await self._publisher.reset(running, tiers)

    async def forget_inputs(self) -> None:
        """Forget inputs: `AsyncLLM.forget_inputs`."""
        await self._llm.forget_inputs()

    async def check_health(self) -> None:
        """End the calls of silent servers, and update the metrics; called by Ray Serve.

        Raises EngineError when the engine is closed or broken. The engine's thread must answer,
        too: a replica whose thread hangs is replaced when Ray's patience ends.
        """
        values = await self._llm.call(self._llm.read_metrics)
        for server in self._servers.take_silent():
            self._publisher.drop(server)
            for group in [group for group, by in self._server_of.items() if by == server]:
                del self._server_of[group]
                await self._llm.abort(group.request_id)
        try:
            self._gauges.update(values)
        except Exception:  # requests are answered all the same
            _LOG.warning("the metrics of this replica cannot be told to Ray", exc_info=True)

    def __del__(self) -> None:
        """Save cached blocks to the tiers; called by Ray Serve when nothing runs here any more."""
        llm = self.__dict__.get("_llm")  # missing if `__init__` failed
        if llm is not None:
            llm.close()
