"""One engine as a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cluster.serving.adapters import check_adapter
from headstart.cluster.serving.gauges import RayGauges
from headstart.cluster.serving.messages import AnswerRequest, EngineFacts, Follow, Part, Report
from headstart.cluster.serving.publisher import CachePublisher
from headstart.cluster.serving.signs import SILENCE, LastHeard, with_heartbeats
from headstart.engine.adapter_names import Adapter
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import RequestOutputKind, SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import EngineError
from headstart.frontend.async_llm import AsyncLLM
from headstart.frontend.facade import start_engine

if TYPE_CHECKING:
    from headstart.engine.request import RequestGroup

__all__ = ["EngineReplica"]

_LOG = logging.getLogger("headstart.server")


class EngineReplica:
    """Answers the requests that the server sends here, and tells what its cache holds.

    Ray Serve makes it, checks its health, waits for its requests when it is to go, and makes a
    new one when it died. What a new one has not computed comes from the tiers, if there are any.
    """

    def __init__(self, model: str, options: Mapping[str, Any], silence: float = SILENCE) -> None:
        """`options` are the engine's; a server is dead that gave no sign for `silence` seconds.

        Raises ConfigError, ModelError or OutOfMemoryError.
        """
        self._llm = AsyncLLM.from_started(start_engine(model, dict(options), is_observed=True))
        self._publisher = CachePublisher(self._llm)
        self._gauges = RayGauges(self._llm)
        self._servers = LastHeard(silence)
        self._asked: dict[RequestGroup, str] = {}  # the server of each request that runs
        self._naming = asyncio.Lock()  # held while an adapter's name must keep its meaning

    async def facts(self) -> EngineFacts:
        """What the server must know of the engine."""
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
            # Which reads all weights, so that the first image need not wait for it.
            vision=await asyncio.to_thread(images.facts) if images is not None else None,
        )

    async def answer(self, asked: AnswerRequest) -> AsyncGenerator[Part]:
        """Two parts: one as soon as the prompt is computed, and all other tokens at the end.

        The tokens between are told to the request's follower meanwhile, those of all its requests
        in one message: see `CachePublisher`. Raises RequestError or EngineError.
        """
        self._servers.hear(asked.server)
        params = asked.params.clone()
        params.output_kind = RequestOutputKind.DELTA
        names = self._llm.frontend.facts.names
        if asked.num_public:  # the server that says so has read the operator's files
            names.publish(asked.prompt_token_ids[: asked.num_public * names.block_size])
        request = await self._prepare(asked, params)
        for one in request.requests:
            one.sequence.marks = asked.marks
        if asked.owner is not None:
            self._llm.set_share(*asked.owner)
        self._publisher.begin()
        self._asked[request] = asked.server
        try:
            async with aclosing(self._llm.outputs(request)) as outputs:
                async for part in self._parts(outputs, asked):
                    if request not in self._asked:
                        return  # an error would be told the dead server: Ray tries for a second
                    yield part
        finally:
            self._asked.pop(request, None)
            self._publisher.end()

    async def _parts(
        self, outputs: AsyncGenerator[RequestOutput], asked: AnswerRequest
    ) -> AsyncGenerator[Part]:
        told: Counter[int] = Counter()
        later: list[Part] = []
        async for output in outputs:
            is_first = not told
            part = Part.of(output, told, is_first=is_first)
            if is_first:
                await self._publisher.publish()  # what comes next may hit what this one computed
                yield part
                continue
            later.append(part)
            if part.finished:
                yield Part.joined(later)
            elif asked.follower is not None:
                self._publisher.add_progress(asked.follower, asked.key, part)

    async def _read(self, asked: AnswerRequest) -> PreparedPrompt:
        """The prompt. Raises RequestError or EngineError for images that cannot be taken."""
        token_ids, images = asked.prompt_token_ids, self._llm.frontend.images
        if asked.images is None:
            return PreparedPrompt(token_ids)
        if images is None:
            raise EngineError("the prompt has images, and the model in this replica sees none")
        sent = await asked.images
        return await asyncio.to_thread(images.receive, token_ids, sent, asked.salt)

    async def _prepare(self, asked: AnswerRequest, params: SamplingParams) -> RequestGroup:
        """The request; its adapter is read if it is not here.

        Raises DamagedAdapterError if that is another than the server's.
        """
        prompt, adapter = await self._read(asked), asked.adapter
        prepare = partial(
            self._llm.prepare,
            *(prompt, params, asked.engine_id),
            cache_salt=asked.salt,
            priority=asked.priority,
        )
        if adapter is None:
            return await prepare()
        async with self._naming:  # another request may want another adapter of this name
            if adapter not in self._llm.adapters:
                await self._llm.load_adapter(adapter.name, adapter.path)
            request = await prepare(adapter=adapter.name)
        check_adapter(request.adapter, adapter)
        return request

    async def load_adapter(self, name: str, path: Path) -> Adapter:
        """As `AsyncLLM.load_adapter`."""
        async with self._naming:
            return await self._llm.load_adapter(name, path)

    async def unload_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter's name, unless it is another's by now."""
        async with self._naming:
            if adapter in self._llm.adapters:
                await self._llm.unload_adapter(adapter.name)

    async def follow(self, who: Follow) -> AsyncGenerator[Report]:
        """Yield what is cached here, and all changes, with heartbeats, until the caller leaves.

        who: names this replica for the request router, and the caller.
        """
        self._servers.hear(who.follower)
        followed = self._publisher.follow(who.follower)
        async with aclosing(with_heartbeats(followed)) as reports:
            async for report in reports:
                yield report

    async def hear(self, server: str) -> None:
        """A server's sign of life; without any for `silence` seconds its calls are ended."""
        self._servers.hear(server)

    async def _end_silent(self) -> None:
        for server in self._servers.take_silent():
            self._publisher.drop(server)
            for request in [one for one, by in self._asked.items() if by == server]:
                del self._asked[request]
                await self._llm.abort(request.request_id)

    async def reset(self, running: bool, tiers: bool) -> bool:
        """As `AsyncLLM.reset_prefix_cache`; the followers are told at once."""
        return await self._publisher.reset(running, tiers)

    async def forget_inputs(self) -> None:
        """As `AsyncLLM.forget_inputs`."""
        await self._llm.forget_inputs()

    async def check_health(self) -> None:
        """Called by Ray Serve. Raises EngineError when the engine is closed or broken.

        The engine's thread must answer, too: one that hangs is replaced when Ray's patience ends.
        """
        await self._llm.call(lambda: None)
        await self._end_silent()
        try:
            await self._gauges.update()
        except Exception:  # requests are answered all the same
            _LOG.warning("the metrics of this replica cannot be told to Ray", exc_info=True)

    def __del__(self) -> None:
        """Called by Ray Serve when nothing runs here any more: what is to be kept is saved."""
        llm = self.__dict__.get("_llm")  # it is not there if `__init__` failed
        if llm is not None:
            llm.close()
