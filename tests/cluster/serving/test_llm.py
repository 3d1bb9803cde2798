"""`AsyncLLM` over replicas: what they have not is told in one sentence."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from headstart import SamplingParams
from headstart.cluster.serving.llm import ReplicatedLLM
from headstart.engine.adapters.request import LoRARequest
from headstart.errors import HeadstartError
from tests.cluster.serving.scripted import Server

LORA = LoRARequest("tables", 1, "/adapters/tables")


@pytest.fixture(scope="module")
def llm() -> Iterator[ReplicatedLLM]:
    server = Server()
    made = ReplicatedLLM(server.front, server.driver, server.dispatcher, SamplingParams())
    yield made
    made.close()


async def _ask(llm: ReplicatedLLM) -> None:
    async for _ in llm.generate("Anna is 31.", lora_request=LORA):
        pass


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.load_adapter("tables", "/adapters/tables"),
        lambda llm: llm.unload_adapter("tables"),
        lambda llm: llm.add_lora(LORA),
        _ask,
    ],
    ids=["load_adapter", "unload_adapter", "add_lora", "generate"],
)
def test_replicas_take_no_adapters(
    llm: ReplicatedLLM, call: Callable[[ReplicatedLLM], Coroutine[Any, Any, Any]]
) -> None:
    with pytest.raises(HeadstartError, match=r"'tables'.*: replicas take no adapters"):
        asyncio.run(call(llm))
