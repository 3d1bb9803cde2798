"""One engine as a replica of Ray Serve, and its reports to the servers that follow it.

    engine's thread   take events ──▶ batch       after first tokens, and every `_BATCH_PERIOD` s
    event loop        batch ──▶ each follower's queue ──▶ a stream of Ray Serve
                      tokens ──▶ their follower's queue, every `_TOKEN_PERIOD` s

A follower that reads too slowly loses a batch. It notices the gap in the batch numbers and follows
again, which begins with a snapshot. Tokens are not lost: they wait until the queue has space.

Blocks of the store are reported as a separate tier: the last `_MOST_STORED` blocks that this engine
saved or loaded. A store reports neither evictions nor the blocks of other processes.

A message through Ray Serve is expensive at both ends, so one message has the new tokens of all
requests of a follower.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cache import AllBlocksCleared, BlockHash, CacheEvent
from headstart.cluster.events import DISK, EventPublisher
from headstart.cluster.serving.heartbeat import SILENCE, Heartbeats, with_heartbeats
from headstart.cluster.serving.messages import (
    AnswerRequest,
    EngineFacts,
    Follow,
    Report,
    RequestDelta,
    RequestKey,
)
from headstart.engine.adapter_names import Adapter
from headstart.engine.metrics import MEANINGS, Counter, Gauge, Histogram, Metric
from headstart.engine.params import RequestOutputKind, SamplingParams
from headstart.engine.parts import ObservedManager
from headstart.engine.request import PreparedPrompt
from headstart.errors import DamagedAdapterError, EngineError
from headstart.frontend.async_llm import AsyncLLM
from headstart.frontend.facade import start_engine

if TYPE_CHECKING:
    from headstart.engine.request import RequestGroup


_BATCH_PERIOD = 0.05  # seconds between batches while requests run
_TOKEN_PERIOD = 0.02  # seconds between messages of tokens
_MOST_QUEUED = 256  # reports that may wait for one follower
_MOST_STORED = 1 << 18  # blocks of the store to report


class CachePublisher:
    """Publisher of the reports of one engine. All calls must come from one event loop."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        # Servers replace the number 0: each server numbers the replicas itself.
        self._events = EventPublisher(replica=0, epoch=time.time_ns())
        self._store_events = EventPublisher(replica=0, epoch=time.time_ns(), tier=DISK)
        self._stored: dict[BlockHash, None] = {}  # in the order in which they were seen
        self._followers: dict[str, asyncio.Queue[Report | None]] = {}
        self._progress: dict[str, dict[RequestKey, list[RequestDelta]]] = {}  # by follower
        self._sending: asyncio.Task[None] | None = None
        self._num_running = 0
        self._is_saving = False  # at the last call of `_read_stored`
        self._is_busy = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Record the start of a request, which may change the cache."""
        self._num_running += 1
        self._is_busy.set()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._publish_periodically())

    def end(self) -> None:
        self._num_running -= 1
        # Start no task here: a stopping event loop closes generators after its last task, and they
        # may call this.
        self._is_busy.set()

    async def publish(self) -> None:
        """Report changes to all followers. Raises EngineError if the engine is closed."""
        self._send(await self._llm.call(self._read))
        if self._llm.tiers is not None:
            self._send(await self._llm.call(self._read_stored))

    async def reset(self, running: bool, tiers: bool) -> bool:
        """Reset the cache like `AsyncLLM.reset_prefix_cache`; report the reset to all followers."""
        report = await self._llm.call(lambda: self._reset(running, tiers))
        if report is not None:
            self._send(report)
            if tiers:
                self._send(await self._llm.call(self._forget_stored))
        return report is not None

    def _send(self, report: Report | None) -> None:
        for queue in self._followers.values():
            if report is not None and not queue.full():
                queue.put_nowait(report)

    def add_progress(self, follower: str, key: RequestKey, part: RequestDelta) -> None:
        self._progress.setdefault(follower, {}).setdefault(key, []).append(part)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_progress())

    async def _send_progress(self) -> None:
        while self._progress:
            for follower in list(self._progress):
                queue = self._followers.get(follower)
                if queue is not None and queue.full():
                    continue
                parts = self._progress.pop(follower)
                if queue is not None:
                    joined = {key: RequestDelta.joined(deltas) for key, deltas in parts.items()}
                    queue.put_nowait(Report(progress=joined))
            await asyncio.sleep(_TOKEN_PERIOD)

    async def follow(self, follower: str) -> AsyncGenerator[Report]:
        """Yield the cached blocks, then all changes, until `drop` is called."""
        queue: asyncio.Queue[Report | None] = asyncio.Queue(_MOST_QUEUED)
        self._followers[follower] = queue  # first, so that changes after the snapshot are queued
        try:
            yield await self._llm.call(self._read_all)
            if self._llm.tiers is not None:
                yield Report(await self._llm.call(self._store_events.snapshot))
            while (report := await queue.get()) is not None:
                yield report
        finally:
            if self._followers.get(follower) is queue:
                del self._followers[follower]

    def drop(self, follower: str) -> None:
        """End a follower's stream, if it has one."""
        queue = self._followers.pop(follower, None)
        if queue is not None:
            while not queue.empty():  # make space for the end marker
                queue.get_nowait()
            queue.put_nowait(None)

    async def _publish_periodically(self) -> None:
        with suppress(EngineError):  # the engine is closed, which its health check reports
            while True:
                await self._is_busy.wait()
                if not self._num_running:
                    self._is_busy.clear()
                await self.publish()
                await asyncio.sleep(_BATCH_PERIOD)
                if self._is_saving:
                    self._is_busy.set()  # so that saved blocks are reported

    # In the engine's thread

    def _read(self, *events: CacheEvent) -> Report:
        manager = self._llm.manager
        assert isinstance(manager, ObservedManager)
        if self._llm.tiers is None:  # with tiers, the tiers take the events
            manager.take_events()
        batch = self._events.publish([*manager.take_observed(), *events])
        return Report(batch, self._llm.read_metrics())

    def _reset(self, running: bool, tiers: bool) -> Report | None:
        """Reset the cache; return None if it was not reset.

        With tiers, the manager reports the reset only in the next step, so this method reports it.
        A report after that step would also clear the step's blocks.
        """
        done = self._llm.engine.reset_prefix_cache(
            reset_running_requests=running, reset_tiers=tiers
        )
        return self._read(AllBlocksCleared()) if done else None

    def _read_all(self) -> Report:
        process = f"{os.getpid()} on {socket.gethostname()}"
        return Report(self._events.snapshot(), self._llm.read_metrics(), process=process)

    def _read_stored(self) -> Report | None:
        """Return the blocks that the store saved or loaded since the last call."""
        tiers = self._llm.tiers
        assert tiers is not None
        self._is_saving = tiers.saver.is_saving  # before `take_saved`, to miss no saved block
        names = tiers.saver.take_saved()
        for name in names:
            self._stored.pop(name, None)
            self._stored[name] = None
        oldest = list(islice(self._stored, max(0, len(self._stored) - _MOST_STORED)))
        for name in oldest:
            del self._stored[name]
        batch = self._store_events.publish_hashes(set(names).difference(oldest), oldest)
        return None if batch is None else Report(batch)

    def _forget_stored(self) -> Report:
        self._stored.clear()
        return Report(self._store_events.publish([AllBlocksCleared()]))


try:
    from ray.util import metrics
except ModuleNotFoundError:  # a replica without Ray reports no metrics
    metrics = None


_LOG = logging.getLogger("headstart.server")

_VALUES: dict[type, dict[str, str]] = {
    Counter: {"_total": "value"},
    Gauge: {"": "value"},
    Histogram: {"_count": "count", "_sum": "sum"},
}


class RayGauges:
    """The engine's metrics for Ray: `vllm:...` as `ray_vllm_...`, tagged with the replica by Ray.

    Counters become gauges, because Ray's counters cannot be set. Histograms become counts and sums.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def update(self, values: list[Metric]) -> None:
        for metric in values:
            for ending, attribute in _VALUES[type(metric)].items():
                name = metric.name.replace(":", "_") + ending
                if name not in self._gauges:
                    meaning, labels = MEANINGS[metric.name], tuple(metric.labels)
                    self._gauges[name] = metrics.Gauge(name, meaning, tag_keys=labels)
                self._gauges[name].set(getattr(metric, attribute), tags=metric.labels)


class EngineReplica:
    """An engine that answers requests of servers and reports its cache.

    Ray Serve creates the replica, checks its health, waits for its requests before stopping it, and
    replaces it if it dies.
    """

    def __init__(self, model: str, options: Mapping[str, Any], silence: float = SILENCE) -> None:
        """Start an engine with `options`; a server counts as dead after `silence` seconds.

        Raises ConfigError, ModelError or OutOfMemoryError.
        """
        self._llm = AsyncLLM.from_started(start_engine(model, dict(options), is_observed=True))
        self._publisher = CachePublisher(self._llm)
        self._gauges = RayGauges()
        self._servers = Heartbeats(silence)
        self._server_of: dict[RequestGroup, str] = {}  # the server of each running request
        self._naming = asyncio.Lock()  # held while an adapter's name must not change

    async def facts(self) -> EngineFacts:
        """Return the properties of the engine that a server needs."""
        facts, images = self._llm.frontend.facts, self._llm.frontend.images
        return EngineFacts(
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            max_model_len=facts.max_model_len,
            block_size=facts.hasher.block_size,
            num_blocks=facts.num_blocks,
            kv_cache_bytes=facts.kv_cache_bytes,
            model_name=facts.hasher.model,
            silence=self._servers.silence,
            # The fingerprint reads all weights; compute it now, not at the first image.
            vision=await asyncio.to_thread(images.vision.facts) if images is not None else None,
        )

    async def answer(self, request: AnswerRequest) -> AsyncGenerator[RequestDelta]:
        """Yield the first delta when the prompt is computed, and all other tokens at the end.

        With `request.every_step`, tokens are also reported as they are computed. Raises
        RequestError or EngineError.
        """
        self._servers.beat(request.server)
        params = request.params.clone()
        params.output_kind = RequestOutputKind.DELTA
        hasher = self._llm.frontend.facts.hasher
        if request.num_public:  # only the server has the files of public prefixes
            hasher.publish(request.prompt_token_ids[: request.num_public * hasher.block_size])
        group = await self._prepare(request, params)
        for answer in group.requests:
            answer.sequence.marks = request.marks
        if request.owner is not None:
            self._llm.set_share(*request.owner)
        self._publisher.begin()
        self._server_of[group] = request.server
        counts: Counts[int] = Counts()
        later: list[RequestDelta] = []
        try:
            async with aclosing(self._llm.outputs(group)) as outputs:
                async for output in outputs:
                    if group not in self._server_of:  # the server is dead
                        return  # without an error, which Ray would try for a second to send
                    is_first = not counts
                    part = RequestDelta.of(output, counts, is_first=is_first)
                    if is_first:
                        await self._publisher.publish()  # the next request may hit these blocks
                        yield part
                        continue
                    later.append(part)
                    if part.finished:
                        yield RequestDelta.joined(later)
                    elif request.every_step:
                        self._publisher.add_progress(request.server, request.key, part)
        finally:
            self._server_of.pop(group, None)
            self._publisher.end()

    async def _prepare(self, request: AnswerRequest, params: SamplingParams) -> RequestGroup:
        """Prepare a request, and load its adapter if necessary.

        Raises RequestError or EngineError for images that cannot be used, and DamagedAdapterError
        for an adapter that differs from the server's.
        """
        prompt, images = PreparedPrompt(request.prompt_token_ids), self._llm.frontend.images
        if request.images is not None:
            if images is None:
                raise EngineError("the prompt has images, and the replica's model takes only text")
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
        async with self._naming:  # another request may use another adapter with this name
            if adapter not in self._llm.adapters:
                await self._llm.load_adapter(adapter.name, adapter.path)
            group = await prepare(adapter=adapter.name)
        if group.adapter is None or group.adapter.digest != adapter.digest:
            raise DamagedAdapterError(
                f"the files in {adapter.path} on a replica's machine differ from the files from "
                f"which adapter {adapter.name!r} was loaded; load it again"
            )
        return group

    async def load_adapter(self, name: str, path: Path) -> Adapter:
        async with self._naming:
            return await self._llm.load_adapter(name, path)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter's name, unless another adapter has it now."""
        async with self._naming:
            if adapter in self._llm.adapters:
                await self._llm.unload_adapter(adapter.name)

    async def follow(self, subscription: Follow) -> AsyncGenerator[Report]:
        """Yield the cached blocks and all changes, with heartbeats, until the caller cancels."""
        self._servers.beat(subscription.follower)
        reports = self._publisher.follow(subscription.follower)
        async with aclosing(with_heartbeats(reports)) as with_beats:
            async for report in with_beats:
                yield report

    async def beat(self, server: str) -> None:
        self._servers.beat(server)

    async def reset(self, running: bool, tiers: bool) -> bool:
        return await self._publisher.reset(running, tiers)

    async def forget_inputs(self) -> None:
        await self._llm.forget_inputs()

    async def check_health(self) -> None:
        """End the calls of silent servers, and update the metrics; called by Ray Serve.

        Raises EngineError if the engine is closed or has failed. This waits for the engine's
        thread, so that Ray replaces a replica whose thread hangs.
        """
        values = await self._llm.call(self._llm.read_metrics)
        for server in self._servers.take_silent():
            self._publisher.drop(server)
            for group in [group for group, sender in self._server_of.items() if sender == server]:
                del self._server_of[group]
                await self._llm.abort(group.request_id)
        try:
            self._gauges.update(values)
        except Exception:  # metrics are not needed to answer requests
            _LOG.warning("the replica's metrics cannot be passed to Ray", exc_info=True)

    def __del__(self) -> None:
        """Save cached blocks to the tiers; called by Ray Serve after the last request has ended."""
        llm = self.__dict__.get("_llm")  # missing if `__init__` failed
        if llm is not None:
            llm.close()
