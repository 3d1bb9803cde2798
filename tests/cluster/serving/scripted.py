"""Replicas that say what a test wrote down, in place of Ray Serve's handle."""

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
LIMIT = 20.0  # seconds until a test that waits for ever fails
HEAD = PromptResult(0, {}, None, None, 0.0)


def part(start: int, *tokens: int, finished: bool = False) -> RequestDelta:
    """Tokens of a request's only answer."""
    reason = "length" if finished else None
    return RequestDelta(
        HEAD if start == 0 else None, (OutputDelta(0, start, [*tokens], None, reason),), finished
    )


class Stream:
    """The answers of one call: what is put, until an exception is. `cancelled` is set by cancel."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def put(self, *items: Any) -> "Stream":
        """Say these next."""
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
        self.told: list[tuple[Any, ...]] = []  # all replicas: a method and what it was given
        self.asked: queue.SimpleQueue[AnswerRequest] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.feed = Stream()
        self.may_follow = threading.Event()  # until then the driver's thread is held up
        self.may_follow.set()
        self.is_asked_to_follow = threading.Event()
        self.answer, self.follow = _Method(self._answer), _Method(self._follow)

    def options(self, stream: bool) -> "Handle":
        """Return the handle, as Ray Serve does."""
        return self

    def broadcast(self, *called: Any) -> _Broadcast:
        """Call the method on every replica, as Ray Serve does."""
        self.told.append(called)
        return _Broadcast()

    def _answer(self, asked: AnswerRequest) -> Stream:
        self.asked.put(asked)
        return self.answers.get_nowait()

    def _follow(self, who: Follow) -> Stream:
        self.is_asked_to_follow.set()
        assert self.may_follow.wait(LIMIT)
        return self.feed


class Told:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def __call__(self, update: Update) -> None:
        self.updates.put(update)

    def next(self) -> Update:
        """The next update, waited for."""
        return self.updates.get(timeout=LIMIT)

    def tokens(self) -> list[int]:
        """Return the tokens of the next update."""
        update = self.next()
        assert not isinstance(update, BaseException), update
        return list(update.outputs[0].token_ids)


class Put:
    """An object in Ray's store, to which it was pickled."""

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
        """A prepared request that wants four tokens."""
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
        made = Stream()
        self.handle.answers.put(made)
        return made

    def asked(self) -> AnswerRequest:
        """The next request that a replica was sent, waited for."""
        return self.handle.asked.get(timeout=LIMIT)

    def report(self, **progress: RequestDelta) -> None:
        """Send tokens of several requests in one message of the replica."""
        self.handle.feed.put(Report(progress={(name, 0): one for name, one in progress.items()}))
