"""A replica of a vision model in this process, and helpers for requests to it.

Messages go through pickle, as Ray sends them.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from headstart import AsyncLLM, SamplingParams
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.driver import ReplicaAdapters, ReplicaDriver, ReplicaFrontend
from headstart.cluster.serving.llm import ReplicatedLLM
from headstart.cluster.serving.messages import AnswerRequest, EngineFacts
from headstart.cluster.serving.replica import EngineReplica
from headstart.engine.config import make_config
from headstart.engine.outputs import RequestOutput
from headstart.errors import ReplicaLostError
from headstart.frontend.vllm_compat import read_options
from tests.cluster.serving.scripted import REPLICA, Put
from tests.engine.images.test_generate import PLACEHOLDERS

OPTIONS = {"num_blocks": 64, "block_size": 16, "debug": True, "max_images": 3, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def llm_of(replica: EngineReplica) -> AsyncLLM:
    """Return the engine of a replica."""
    return replica._llm


class _Call:
    """A call of a replica's generator, as Ray Serve returns one."""

    def __init__(self, parts: AsyncGenerator[Any]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncGenerator[Any]:
        return self._parts

    def cancel(self) -> None:
        """Cancel, as Ray Serve does."""
        self._closing = asyncio.ensure_future(self._parts.aclose())


class _Method:
    def __init__(self, call: Callable[[Any], AsyncGenerator[Any]]) -> None:
        self._call = call

    def remote(self, message: Any) -> _Call:
        """Call the method, as Ray Serve does."""
        return _Call(self._call(message))


class _Broadcast:
    def __init__(self, called: Any) -> None:
        self._called = called

    async def results_async(self, return_exceptions: bool) -> list[Any]:
        """Return the results, as Ray Serve does."""
        return [await self._called]


class LocalHandle:
    """A deployment with one replica, in this process. The first `lost` attempts raise."""

    def __init__(self, replica: EngineReplica) -> None:
        self._replica = replica
        self.requests: list[AnswerRequest] = []
        self.sizes: list[int] = []
        self.lost = 0
        self.answer, self.follow = _Method(self._answer), _Method(replica.follow)

    def options(self, stream: bool) -> "LocalHandle":
        """Return the handle, as Ray Serve does."""
        return self

    def broadcast(self, method: str, *args: Any) -> _Broadcast:
        """Call the method on every replica, as Ray Serve does."""
        return _Broadcast(getattr(self._replica, method)(*args))

    async def _answer(self, request: AnswerRequest) -> AsyncGenerator[Any]:
        sent = pickle.dumps(request)
        self.sizes.append(len(sent))
        self.requests.append(pickle.loads(sent))
        if self.lost:
            self.lost -= 1
            raise ReplicaLostError("it is dead")
        async for part in self._replica.answer(self.requests[-1]):
            yield pickle.loads(pickle.dumps(part))


class Replicas:
    """One replica of the model in a folder, and a `ReplicatedLLM` over it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        merged = OPTIONS | options
        self.replica = EngineReplica(str(folder), merged)
        self.handle = LocalHandle(self.replica)
        facts: EngineFacts = pickle.loads(pickle.dumps(asyncio.run(self.replica.facts())))
        config = make_config(read_options(str(folder), merged).config)
        self.frontend = ReplicaFrontend(folder, facts, config, 1, ReplicaAdapters(_no_adapter))
        dispatcher = Dispatcher("expected", 1)
        driver = ReplicaDriver(self.handle, self.frontend, dispatcher, Put)  # type: ignore[arg-type]
        self.llm = ReplicatedLLM(self.frontend, driver, dispatcher, SamplingParams())
        dispatcher.set_replicas([REPLICA])

    @property
    def num_encoded(self) -> int:
        """Images that the replica encoded."""
        assert llm_of(self.replica).frontend.images is not None
        return llm_of(self.replica).frontend.images.cache.num_encoded

    def close(self) -> None:
        """Close the server's engine and the replica's."""
        self.llm.close()
        llm_of(self.replica).close()


def _no_adapter(name: str, path: Path) -> Any:
    raise AssertionError("no test here has one")


def prompt(text: str, *images: Any, name: str = "qwen2_vl", **more: Any) -> dict[str, Any]:
    """Return a prompt in which each `@` of the text is an image."""
    placed = text.replace("@", PLACEHOLDERS.get(name, "<image>"))
    return {"prompt": placed, "multi_modal_data": {"image": list(images)}, **more}


def ask(llm: AsyncLLM, inputs: Any, params: SamplingParams = GREEDY, **more: Any) -> RequestOutput:
    async def last() -> RequestOutput:
        chat = isinstance(inputs, list)
        async for output in (llm.chat if chat else llm.generate)(inputs, params, **more):
            final = output
        return final

    return asyncio.run(last())


def visible_parts(output: RequestOutput) -> tuple[Any, ...]:
    """Return the parts of an output that a user sees."""
    tokens = [list(completion.token_ids) for completion in output.outputs]
    return (tokens, output.prompt_token_ids, output.num_cached_tokens, output.images)
