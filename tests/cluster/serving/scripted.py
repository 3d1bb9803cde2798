"""Replicas with scripted answers, in place of Ray Serve's handle."""

import asyncio
import pickle
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any

from headstart import SamplingParams
from headstart.cluster.serving.dispatch import Dispatcher
from headstart.cluster.serving.driver import ReplicaAdapters, ReplicaDriver, ReplicaFrontend
from headstart.cluster.serving.heartbeat import SILENCE
from headstart.cluster.serving.messages import (
    AnswerRequest,
    EngineFacts,
    Follow,
    OutputDelta,
    PromptResult,
    Report,
    RequestDelta,
)
from headstart.engine.adapter_names import Adapter
from headstart.engine.config import make_config
from headstart.engine.driver import Update
from headstart.engine.request import RequestGroup
from headstart.errors import AdapterNotFoundError
from headstart.frontend.vllm_compat import read_options

MODEL = "headstart-tiny"
REPLICA = "one"
LIMIT = 20.0  # seconds until a test that waits forever fails
HEAD = PromptResult(0, {}, None, None, 0.0)


def part(start: int, *tokens: int, finished: bool = False) -> RequestDelta:
    """Return a delta with tokens of a request's only answer."""
    reason = "length" if finished else None
    return RequestDelta(
        HEAD if start == 0 else None, (OutputDelta(0, start, [*tokens], None, reason),), finished
    )


class Stream:
    """The items of one call, until an exception is put. `cancel` sets `cancelled`."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def put(self, *items: Any) -> "Stream":
        """Add items; an exception ends the stream."""
        for item in items:
            self.items.put(item)
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            if self.items.empty():
                await asyncio.sleep(0.001)
                continue
            item = self.items.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        """Cancel, as Ray Serve does."""
        self.cancelled.set()


class _Method:
    def __init__(self, call: Callable[..., Stream]) -> None:
        self.remote = call


class _Broadcast:
    async def results_async(self, return_exceptions: bool) -> list[Any]:
        """Return the results, as Ray Serve does."""
        return []


class Handle:
    """A deployment with one replica. Each call of `answer` takes the next of `answers`."""

    def __init__(self) -> None:
        self.broadcasts: list[tuple[Any, ...]] = []  # a method and its arguments
        self.requests: queue.SimpleQueue[AnswerRequest] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.feed = Stream()
        self.may_follow = threading.Event()  # blocks the driver's thread until it is set
        self.may_follow.set()
        self.follow_called = threading.Event()
        self.answer, self.follow = _Method(self._answer), _Method(self._follow)

    def options(self, stream: bool) -> "Handle":
        """Return the handle, as Ray Serve does."""
        return self

    def broadcast(self, *called: Any) -> _Broadcast:
        """Call the method on every replica, as Ray Serve does."""
        self.broadcasts.append(called)
        return _Broadcast()

    def _answer(self, request: AnswerRequest) -> Stream:
        self.requests.put(request)
        return self.answers.get_nowait()

    def _follow(self, call: Follow) -> Stream:
        self.follow_called.set()
        assert self.may_follow.wait(LIMIT)
        return self.feed


class Receiver:
    """A receiver that stores its updates."""

    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def __call__(self, update: Update) -> None:
        self.updates.put(update)

    def next(self) -> Update:
        """Wait for the next update, and return it."""
        return self.updates.get(timeout=LIMIT)

    def tokens(self) -> list[int]:
        """Return the tokens of the next update."""
        update = self.next()
        assert not isinstance(update, BaseException), update
        return list(update.outputs[0].token_ids)


class Put:
    """An object in Ray's store, pickled and unpickled as Ray does."""

    def __init__(self, value: Any) -> None:
        self.value = pickle.loads(pickle.dumps(value))

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.value


class Server:
    """A driver over scripted replicas."""

    def __init__(
        self, silence: float = SILENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        facts = EngineFacts(512, frozenset({0}), 2048, 16, 64, 1 << 20, "", silence)
        adapters = ReplicaAdapters(self.read_adapter)
        config = make_config(read_options(MODEL, {}).config)
        self.frontend = ReplicaFrontend(MODEL, facts, config, 1, adapters)
        self.handle, self.dispatcher = Handle(), Dispatcher("expected", 1)
        handle: Any = self.handle
        self.driver = ReplicaDriver(handle, self.frontend, self.dispatcher, Put, clock)

    def request(self, name: str, adapter: str | None = None) -> RequestGroup:
        """Return a prepared request for four tokens."""
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        return self.frontend.prepare(prompt, params, request_id=name, adapter=adapter)

    def read_adapter(self, name: str, path: Path) -> Adapter:
        """Return an adapter as a replica reports it, with a digest of its folder's name."""
        if path.name == "broken":
            raise AdapterNotFoundError(f"there is no adapter in {path}")
        return Adapter(name, path, f"digest of {path.name}")

    def stream(self) -> Stream:
        """Create the stream that the next call of `answer` returns."""
        stream = Stream()
        self.handle.answers.put(stream)
        return stream

    def next_request(self) -> AnswerRequest:
        """Wait for the next request that a replica receives, and return it."""
        return self.handle.requests.get(timeout=LIMIT)

    def report(self, **progress: RequestDelta) -> None:
        """Send tokens of several requests in one message of the replica."""
        self.handle.feed.put(
            Report(progress={(name, 0): delta for name, delta in progress.items()})
        )
