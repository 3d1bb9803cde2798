"""What every API of the server does with a request: admit it, answer it, let go of it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from headstart.engine.params import RequestOutputKind, SamplingParams
from headstart.errors import EngineError
from headstart.server.cache.live import Live
from headstart.server.calls import Calls, Outputs, current_call, new_name
from headstart.server.errors import ApiError
from headstart.server.monitoring.logs import note_error, note_output, note_texts
from headstart.server.monitoring.watch import Watch
from headstart.server.options import MOST_LOGGED, ServerOptions, read_template_options
from headstart.server.tenants import Tenants, tenant_of

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.frontend.inputs import Prompt
    from headstart.server.monitoring.tracing import Tracer

__all__ = [
    "ClientGone",
    "BaseService",
    "Service",
    "front_of",
    "service_of",
    "stopped",
    "too_late",
    "unless_gone",
]

Answer = TypeVar("Answer")
_GONE = 499  # nginx's status for a client that closed the connection; nobody reads it


class BaseService(ABC):
    """One model behind a server, and the calls under way: what every model's server needs."""

    def __init__(
        self, name: str, options: ServerOptions, tenants: Tenants, max_running: int
    ) -> None:
        """`max_running` requests run at a time, and `options.max_waiting` more may wait."""
        self.name = options.served_model_name or name
        self.names = (self.name, *options.model_alias)
        self.options = options
        self.tenants = tenants
        self.is_draining = False
        most = max_running + options.max_waiting
        of_tenant = options.max_requests_per_tenant or max(1, most // 2)
        self.calls = Calls(most, of_tenant, options.request_timeout)
        self.started = int(time.time())
        self._read: set[Outputs] = set()  # by a call

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """True until the engine is closed."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer at the most."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that a request may name in the model's place."""
        return ()

    @property
    def has_engine(self) -> bool:
        """Whether a request that is taken is computed now, and waits for no replica."""
        return True

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not self.is_draining and self.is_running

    def check_ready(self) -> None:
        """Raise ApiError (503) if no request is taken any more."""
        if not self.is_ready:
            raise ApiError(503, "the server is stopping", retry_after=5)

    def cut_off(self) -> None:
        """End the answers that clients read with an error that says so."""
        for outputs in list(self._read):
            outputs.fail(stopped())

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request's model names, None for the model itself.

        Raises ApiError (404) for any other name, unless `any_model` is set.
        """
        if model is None or model in self.names:
            return None
        if model in self.adapters:
            return model
        if self.options.any_model:
            return None
        known = [repr(name) for name in (*self.names, *self.adapters)]
        verb = "is" if len(known) == 1 else "are"
        raise ApiError(
            404,
            f"the model {model!r} does not exist; there {verb} {', '.join(known)}",
            param="model",
            code="model_not_found",
        )

    def new_id(self, kind: str) -> str:
        """A name for a request, which no other has; `kind` is what the API begins it with."""
        return f"{kind}-{new_name()}"

    def salt(self, request: Request, asked: str | None) -> str | None:
        """The cache salt of a request: its tenant's, narrowed by what its body asks for."""
        return self.tenants.salt(tenant_of(request), asked)

    @contextmanager
    def reading(self, outputs: Outputs) -> Iterator[None]:
        """These outputs are read inside: `cut_off` ends them, and the end of the call's time."""
        call = current_call()
        if call is None:
            yield
            return
        self._read.add(outputs)
        call.read.add(outputs)
        try:
            yield
        finally:
            self._read.discard(outputs)
            call.read.discard(outputs)


class Service(BaseService):
    """A text model behind the server."""

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        options: ServerOptions,
        tenants: Tenants,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(name, options, tenants, llm.config.max_num_seqs)
        self.llm = llm
        self.tracer = tracer
        self._template_options = read_template_options(options.default_chat_template_kwargs)
        self.watch = Watch(llm, self.name, by_tenant=tenants.ask_for_keys)
        self.live = Live(llm, self.watch, tenants)

    @property
    def is_running(self) -> bool:
        return self.llm.is_running

    @property
    def has_engine(self) -> bool:
        return self.llm.has_engine

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.llm.adapters)

    def salt(self, request: Request, asked: str | None) -> str | None:
        """Return the salt of a tenant, and set the tenant's share of the pool."""
        tenant = tenant_of(request)
        if tenant.salt is not None:
            self.llm.set_share(tenant.salt, tenant.weight)
        return super().salt(request, asked)

    async def run(self, request: RequestGroup) -> AsyncGenerator[RequestOutput]:
        """The outputs of a prepared request. Raises ApiError (504) when its time is over."""
        end = "abort"
        try:
            async with aclosing(self.llm.outputs(request, paced=True)) as outputs:
                with self.reading(outputs):
                    async for output in outputs:
                        if output.finished:
                            end = "told"
                            whole = request.output()  # of a stream the last one has what is new
                            note_output(whole)
                            if self.options.log_texts:
                                await self._log_texts(whole)
                            self.watch.finished(request, whole)
                        yield output
        except (ApiError, EngineError) as error:
            note_error(error)
            end = "error" if isinstance(error, EngineError) else end
            raise
        finally:
            if end != "told":
                self.watch.metrics.cut_off(request, end)
            if self.tracer is not None:
                call = current_call()
                self.tracer.trace(request, end, call.trace if call is not None else {})

    async def _log_texts(self, output: RequestOutput) -> None:
        """Note the texts of a request for its line in the log."""
        tokens, decode = output.prompt_token_ids[:MOST_LOGGED], self.watch.decode
        prompt = "" if decode is None else await asyncio.to_thread(decode, tokens)
        note_texts(prompt, [answer.text for answer in output.outputs])

    async def answer(self, request: RequestGroup) -> RequestOutput:
        """The whole answer to a prepared request."""
        async with aclosing(self.run(request)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise EngineError("the engine ended a request without an answer")

    def template_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """How a conversation is rendered: what a request says of it, and the server's defaults.

        Raises ApiError for a template, a program, unless the server runs those of requests.
        """
        if "chat_template" in given and not self.options.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template is given; allowed: none, unless the server was started with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        more = self._template_options | (given.get("chat_template_kwargs") or {})
        return {**given, "chat_template_kwargs": more} if more else dict(given)

    def params(self, given: Mapping[str, Any], *, stream: bool) -> SamplingParams:
        """The model's default sampling with what a request says. Raises RequestError.

        Values that are None were not said.
        """
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        said = {name: v for name, v in given.items() if v is not None or name == "max_tokens"}
        params = self.llm.get_default_sampling_params()
        return replace(params, **said, output_kind=kind)

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> RequestGroup:
        """A request of a prompt; see `AsyncLLM.prepare`."""
        self._admit(options)
        return await self.llm.prepare(prompt, params, request_id, **options)

    async def prepare_chat(
        self,
        messages: Any,
        params: SamplingParams,
        request_id: str,
        *,
        is_kept: bool = True,
        **options: Any,
    ) -> RequestGroup:
        """A request of a conversation; see `AsyncLLM.prepare_chat`.

        is_kept: it takes a place; one that is let go of at once does not.
        """
        if is_kept:
            self._admit(options)
        return await self.llm.prepare_chat(messages, params, request_id, **options)

    def _admit(self, options: Mapping[str, Any]) -> None:
        self.check_ready()
        call = current_call()
        if call is not None and not call.tenant.is_admin and (options.get("priority") or 0) < 0:
            raise ApiError(
                403,
                f"priority is {options['priority']}; allowed: at least 0, or a key that was made "
                "with --admin",
                param="priority",
            )
        self.calls.count_prompt()


def too_late(options: ServerOptions) -> ApiError:
    """The error of a request that took too long."""
    return ApiError(504, f"the request took longer than {options.request_timeout:g} s")


def stopped() -> ApiError:
    """The error of a request that ran when the server's time was over."""
    return ApiError(503, "the server stopped before the answer was complete", retry_after=5)


def front_of(request: Request) -> BaseService:
    """The service of the app that a request came to, whatever its model."""
    front: BaseService = request.app.state.service
    return front


def service_of(request: Request) -> Service:
    """The service of the app that a request came to, of a text model."""
    service: Service = request.app.state.service
    return service


class ClientGone(ApiError):
    """The client of a request closed the connection."""

    def __init__(self) -> None:
        super().__init__(_GONE, "the client went away")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer:
    """What `work` returns; it is cancelled when the client goes away. Raises ClientGone then.

    It is a task of its own: what it waits for again and again does not go through its caller. An
    error of `receive` ends it, too, and is raised. Who cancels the caller (its time is over) gets
    CancelledError, whatever else happened.
    """
    caller = asyncio.current_task()
    assert caller is not None
    before = caller.cancelling()
    task = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    watching.add_done_callback(lambda _: watching.cancelled() or task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if caller.cancelling() > before or not watching.done():
            raise
        watching.result()
        raise ClientGone from None
    finally:
        if not watching.cancel():  # it has ended: an error that nobody wants any more is no news
            watching.exception()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
