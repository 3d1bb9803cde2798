"""`AsyncLLM` over replicas: what the server's APIs are written for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headstart.cluster.serving.metric_sums import add_up
from headstart.engine.metrics import Metric
from headstart.errors import ReplicaLostError
from headstart.frontend.async_llm import AsyncLLM
from headstart.frontend.chat.requests import ChatRequests
from headstart.frontend.facade import Started
from headstart.validation import check_flag

if TYPE_CHECKING:
    from headstart.cluster.serving.dispatch import Dispatcher
    from headstart.cluster.serving.driver import ReplicaDriver
    from headstart.cluster.serving.front import ReplicaFrontend
    from headstart.engine.params import SamplingParams

__all__ = ["ReplicatedLLM"]

_LOG = logging.getLogger("headstart.server")


class ReplicatedLLM(AsyncLLM):
    """Answers by replicas. What looks into one engine's pool, this has not: see `dispatcher`."""

    def __init__(
        self,
        front: ReplicaFrontend,
        driver: ReplicaDriver,
        dispatcher: Dispatcher,
        sampling: SamplingParams,
        chat_template: str | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._replicas = driver
        self._take(Started(front, ChatRequests(front, chat_template), driver, sampling))

    @property
    def has_engine(self) -> bool:
        """Whether a replica runs; until one does, requests wait."""
        return bool(self.dispatcher.answering)

    def read_metrics(self) -> list[Metric]:
        """Those of all replicas: sums, and of shares the mean. For any thread.

        What replicas counted that are gone stays counted: a sum that falls is taken for a start.
        """
        return add_up(self.dispatcher.list_metrics())

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `AsyncLLM.reset_prefix_cache`, of every replica; False if one would not."""
        again = check_flag("reset_running_requests", reset_running_requests)
        tiers = check_flag("reset_connector", reset_connector)
        return all(await asyncio.to_thread(self._replicas.ask_all, "reset", again, tiers))

    async def unload_adapter(self, name: str) -> None:
        """As `AsyncLLM.unload_adapter`; replicas forget the name, too, but for those out of reach.

        One that is asked for it by a request that still runs reads it anew.
        """
        adapters = self.frontend.adapters
        found = adapters.find(name)
        await asyncio.to_thread(adapters.unload, name)
        try:
            await asyncio.to_thread(self._replicas.ask_all, "unload_adapter", found)
        except ReplicaLostError as error:
            _LOG.info("not every replica has forgotten adapter %r: %s", name, error)

    async def forget_inputs(self) -> None:
        """As `AsyncLLM.forget_inputs`, of the server and of every replica."""
        await super().forget_inputs()
        if self.takes_images:
            await asyncio.to_thread(self._replicas.ask_all, "forget_inputs")
