"""The service behind every API of the server: it admits calls and runs their requests.

    take a slot ──▶ read the body, prepare prompts, wait, compute, send ──▶ release the slot

The number of slots limits the calls in progress, and thereby their memory. A call takes a slot
before its body is read. It releases the slot when its answer is sent or its client is gone. A call
with several prompts takes a slot for each prompt.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from headstart.engine.params import RequestOutputKind, SamplingParams
from headstart.engine.tenant_queue import TENANT
from headstart.errors import EngineError
from headstart.server.cache.live import Live
from headstart.server.errors import ApiError
from headstart.server.monitoring.logs import current_line
from headstart.server.monitoring.watch import Watch
from headstart.server.options import MOST_LOGGED, ServerOptions, read_template_options
from headstart.server.tenants import EVERYBODY, Tenant, Tenants, tenant_of
from headstart.validation import in_one_line

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.frontend.streams import AsyncOutputStream
    from headstart.omni.omni import AsyncOmni
    from headstart.omni.params import OmniOutput
    from headstart.server.monitoring.logs import Tracer


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


@dataclass(eq=False, slots=True)
class Call:
    """One call: its tenant, its slots, and its deadline in the event loop's time.

    trace: the headers of W3C's trace context. streams: the call's open output streams.
    """

    tenant: Tenant
    deadline: float
    num_slots: int = 1
    num_prompts: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)
    streams: set[AsyncOutputStream[Any]] = field(default_factory=set)


@asynccontextmanager
async def time_limit(
    call: Call, grace: float, error: Callable[[], ApiError]
) -> AsyncIterator[None]:
    """Cancel the `with` block when a call's time is over, and raise `error()`.

        without open streams  ──deadline──▶ cancelled
        with open streams     ──deadline──▶ the streams raise error() ──grace──▶ cancelled

    grace: seconds for the answer to report this error to the client.
    """

    def end() -> None:
        limit.reschedule(call.deadline + grace if call.streams else call.deadline)
        for outputs in list(call.streams):
            outputs.fail(error())

    timer = asyncio.get_running_loop().call_at(call.deadline, end)
    limit = asyncio.timeout(None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise error() from None
    finally:
        timer.cancel()


class Calls:
    """The calls in progress, in one event loop.

    max_slots: number of slots. max_of_tenant: maximum number of slots of one tenant. seconds: time
    limit of a call.
    """

    def __init__(self, max_slots: int, max_of_tenant: int, seconds: float) -> None:
        self._max_slots = max_slots
        self._max_of_tenant = max_of_tenant
        self._seconds = seconds
        self._slots: Counter[str] = Counter()  # by tenant

    @property
    def num_slots(self) -> int:
        """The number of slots in use."""
        return self._slots.total()

    @contextmanager
    def call(self, tenant: Tenant) -> Iterator[Call]:
        """Hold a slot during the `with` block. Raises ApiError (429) if none is free."""
        self._take(tenant)
        call = Call(tenant, asyncio.get_running_loop().time() + self._seconds)
        token, before = _CALL.set(call), TENANT.set(tenant.key)
        try:
            yield call
        finally:
            _CALL.reset(token)
            TENANT.reset(before)
            self._slots[tenant.key] -= call.num_slots
            self._slots += Counter()  # drops tenants without a slot

    def count_prompt(self) -> None:
        """Count a prompt of the current call; each prompt after the first takes another slot.

        Raises ApiError (429) if none is free. Does nothing outside of calls.
        """
        if (call := _CALL.get()) is not None:
            if call.num_prompts:
                self._take(call.tenant)
                call.num_slots += 1
            call.num_prompts += 1

    def _take(self, tenant: Tenant) -> None:
        num_taken = self.num_slots
        if num_taken >= self._max_slots:
            text = f"{num_taken} requests are in progress; allowed: {self._max_slots}"
            raise _too_many_requests(text)
        num_own, limit = self._slots[tenant.key], self._max_of_tenant
        if tenant is not EVERYBODY and num_own >= limit:
            raise _too_many_requests(
                f"{num_own} requests of {tenant.name!r} are in progress; allowed: {limit}"
            )
        self._slots[tenant.key] += 1


def current_call() -> Call | None:
    """Return the current call; None outside of calls."""
    return _CALL.get()


def random_id() -> str:
    """Return an id that cannot be guessed: 32 hexadecimal digits.

    The id is the keyed hash of a counter. Reading random bytes would release the interpreter's
    lock, and so let other threads delay the event loop.
    """
    return blake2b(b"%d" % next(_NUMBERS), key=_SECRET, digest_size=16).hexdigest()


_SECRET = os.urandom(32)
_NUMBERS = count()


def _too_many_requests(text: str) -> ApiError:
    return ApiError(429, text, code="rate_limit_exceeded", retry_after=1)


Answer = TypeVar("Answer")
Work = TypeVar("Work")
Output = TypeVar("Output", bound="RequestOutput | OmniOutput")
_CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; only the log shows it


class BaseService(ABC, Generic[Work, Output]):
    """The model behind a server, and the calls in progress."""

    def __init__(
        self,
        engine: AsyncLLM | AsyncOmni,
        name: str,
        options: ServerOptions,
        tenants: Tenants,
        *,
        max_running: int,
        max_model_len: int,
    ) -> None:
        """Allow `max_running` running and `options.max_waiting` waiting requests.

        max_model_len: maximum number of tokens of a prompt and its answer.
        """
        self._engine = engine
        self.max_model_len = max_model_len
        self.name = options.served_model_name or name
        self.names = (self.name, *options.model_alias)
        self.options = options
        self.tenants = tenants
        self.is_draining = False
        max_slots = max_running + options.max_waiting
        max_of_tenant = options.max_requests_per_tenant or max(1, max_slots // 2)
        self.calls = Calls(max_slots, max_of_tenant, options.request_timeout)
        self.started = int(time.time())
        self._streams: set[AsyncOutputStream[Output]] = set()  # of calls in progress

    @property
    def is_running(self) -> bool:
        return self._engine.is_running

    @abstractmethod
    async def read_metrics(self) -> bytes:
        """Return the text of `/metrics`."""

    @abstractmethod
    def _open(self, work: Work) -> AsyncOutputStream[Output]:
        """Return the outputs of a request."""

    @abstractmethod
    async def _finish(self, work: Work, output: Output) -> None:
        """Record the last output of a request, before it is sent."""

    @abstractmethod
    def _end(self, work: Work, reason: str) -> None:
        """Record the end of a request: "answered", "abort" or "error"."""

    @property
    def adapters(self) -> tuple[str, ...]:
        return ()

    @property
    def has_engine(self) -> bool:
        """True if requests can be computed now; False if they wait for a replica."""
        return True

    def check_ready(self) -> None:
        """Raise ApiError (503) if the server is stopping."""
        if self.is_draining or not self.is_running:
            raise ApiError(503, "the server is stopping", retry_after=5)

    def cut_off(self) -> None:
        """End all answers in progress with the error that the server stopped."""
        for outputs in list(self._streams):
            outputs.fail(stopped())

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request names as its model; None for the model itself.

        Raises ApiError (404) for any other name, unless `any_model` is set.
        """
        if model is None or model in self.names:
            return None
        if model in self.adapters:
            return model
        if self.options.any_model:
            return None
        names = [repr(name) for name in (*self.names, *self.adapters)]
        raise ApiError(
            404,
            f"the model {model!r} does not exist; allowed: {', '.join(names)}",
            param="model",
            code="model_not_found",
        )

    def new_id(self, kind: str) -> str:
        """Return a unique id for a request, with the prefix that its API uses."""
        return f"{kind}-{random_id()}"

    def salt(self, request: Request, requested: str | None) -> str | None:
        """Return the cache salt of a request, derived from its tenant and the salt of its body."""
        return self.tenants.salt(tenant_of(request), requested)

    async def run(self, work: Work) -> AsyncGenerator[Output]:
        """Yield the outputs of a request. Raises ApiError (504) when its time is over."""
        reason, call = "abort", current_call()
        try:
            async with aclosing(self._open(work)) as outputs:
                open_streams = [self._streams, *([] if call is None else [call.streams])]
                for streams in open_streams:
                    streams.add(outputs)
                try:
                    async for output in outputs:
                        if output.finished:
                            reason = "answered"
                            await self._finish(work, output)
                        yield output
                finally:
                    for streams in open_streams:
                        streams.discard(outputs)
        except (ApiError, EngineError) as error:
            # The log shows status 200 for a stream, even if it fails later.
            current_line().error = in_one_line(str(error))
            reason = "error" if isinstance(error, EngineError) else reason
            raise
        finally:
            self._end(work, reason)

    async def answer(self, work: Work) -> Output:
        async with aclosing(self.run(work)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise EngineError("the engine ended a request without an answer")


class Service(BaseService["RequestGroup", "RequestOutput"]):
    """A text model behind the server."""

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        options: ServerOptions,
        tenants: Tenants,
        tracer: Tracer | None = None,
    ) -> None:
        most, length = llm.config.max_num_seqs, llm.max_model_len
        super().__init__(llm, name, options, tenants, max_running=most, max_model_len=length)
        self.llm = llm
        self.tracer = tracer
        self._template_options = read_template_options(options.default_chat_template_kwargs)
        self.watch = Watch(llm, self.name, by_tenant=tenants.requires_keys)
        self.live = Live(llm, self.watch, tenants)

    @property
    def has_engine(self) -> bool:
        return self.llm.has_engine

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.llm.adapters)

    async def read_metrics(self) -> bytes:
        await asyncio.to_thread(self.watch.flush)
        return await self.llm.call(self.watch.metrics.read)

    def salt(self, request: Request, requested: str | None) -> str | None:
        """Return the cache salt of a request, and set the weight of its tenant."""
        tenant = tenant_of(request)
        if tenant.salt is not None:
            self.llm.set_share(tenant.salt, tenant.weight)
        return super().salt(request, requested)

    def _open(self, work: RequestGroup) -> AsyncOutputStream[RequestOutput]:
        return self.llm.outputs(work, paced=True)

    async def _finish(self, work: RequestGroup, output: RequestOutput) -> None:
        output = work.output()  # a stream's last output has only the last tokens
        line = current_line()
        line.add_answer(
            prompt=len(output.prompt_token_ids),
            cached=output.num_cached_tokens,
            generated=sum(len(answer.token_ids) for answer in output.outputs),
            first=output.metrics.time_to_first_token,
        )
        if output.why_missed is not None:
            line.missed = output.why_missed.reason.name.lower()
        if self.options.log_texts:
            tokens, decode = output.prompt_token_ids[:MOST_LOGGED], self.watch.decode
            prompt = "" if decode is None else await asyncio.to_thread(decode, tokens)
            texts = [answer.text[:MOST_LOGGED] for answer in output.outputs]
            line.prompts = [*(line.prompts or ()), prompt[:MOST_LOGGED]]
            line.answers = [*(line.answers or ()), *texts]
        self.watch.ended(work, output)

    def _end(self, work: RequestGroup, reason: str) -> None:
        if reason != "answered":
            self.watch.ended(work, reason)
        if self.tracer is not None:
            call = current_call()
            self.tracer.trace(work, reason, call.trace if call is not None else {})

    def template_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's template options, with the server's defaults.

        Raises ApiError for a chat template in the request, unless the server trusts the templates
        of requests: a template is a program.
        """
        if "chat_template" in options and not self.options.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template is set; allowed: none, unless the server was started with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        variables = self._template_options | (options.get("chat_template_kwargs") or {})
        return {**options, "chat_template_kwargs": variables} if variables else dict(options)

    def params(self, values: Mapping[str, Any], *, stream: bool) -> SamplingParams:
        """Return the default sampling parameters with a request's fields. Raises RequestError.

        A field that is None keeps its default, except `max_tokens`: None sets no limit.
        """
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        fields = {name: v for name, v in values.items() if v is not None or name == "max_tokens"}
        return replace(self.llm.get_default_sampling_params(), **fields, output_kind=kind)

    async def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *,
        will_run: bool = True,
        **options: Any,
    ) -> RequestGroup:
        """Return a request for a prompt or a conversation; see `AsyncLLM.prepare`.

        will_run: False if the prompt is only tokenized; it then takes no slot.
        """
        if will_run:
            self.check_ready()
            call, priority = current_call(), options.get("priority") or 0
            if priority < 0 and call is not None and not call.tenant.is_admin:
                raise ApiError(
                    403,
                    f"priority is {priority}; allowed without an administrator's key: at least 0",
                    param="priority",
                )
            self.calls.count_prompt()
        return await self.llm.prepare(prompt, params, request_id, **options)


def stopped() -> ApiError:
    """Return the error of a request that still ran when the server stopped."""
    return ApiError(503, "the server stopped before the answer was complete", retry_after=5)


def base_service_of(request: Request) -> BaseService[Any, Any]:
    """Return the service of a request, for any kind of model."""
    service: BaseService[Any, Any] = request.app.state.service
    return service


def service_of(request: Request) -> Service:
    """Return the service of a request to a text model."""
    service: Service = request.app.state.service
    return service


class ClientDisconnected(ApiError):
    """The client of a request closed the connection."""

    def __init__(self) -> None:
        super().__init__(_CLIENT_CLOSED, "the client disconnected")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of `work`. Cancel it if the client disconnects.

    After a disconnect, raises ClientDisconnected. An error of `receive` also cancels `work`, and is
    raised. On return, `work` has ended.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watcher.result()
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
