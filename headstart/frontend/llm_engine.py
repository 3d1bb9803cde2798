"""`LLMEngine`: an engine whose steps the program asks for, one by one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.engine.adapter_names import LoRARequest
from headstart.engine.outputs import ShownOutputs
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, RequestError
from headstart.frontend.facade import SyncFacade
from headstart.validation import check_absent

# These bring torch, which waits until the model's name is checked: see `start_engine`.
if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.facade import Started
    from headstart.frontend.inputs import Prompt

__all__ = ["LLMEngine"]


class _Failure(NamedTuple):
    """A request that ended with an error."""

    request_id: str
    error: EngineError


class LLMEngine(SyncFacade):
    """Takes requests, and answers all of them step by step as `step` is called.

    The engine's thread runs each step while `step` waits, so Ctrl-C interrupts the wait alone. To
    be called from one thread.

    >>> from headstart.models.demo import demo_model_path
    >>> engine = LLMEngine(demo_model_path(), num_blocks=64)
    >>> engine.add_request("a", [5, 6], SamplingParams(max_tokens=3))
    'a'
    >>> steps = 0
    >>> while engine.has_unfinished_requests():
    ...     steps += len(engine.step())
    >>> engine.close()
    >>> steps
    3
    """

    def _take(self, started: Started) -> None:
        self.frontend, self._chats, self._driver, self._sampling, self.engine = started
        # Changed in the engine's thread alone, but that `step` takes the first of `_pending`.
        self._shown: dict[str, ShownOutputs] = {}  # of unfinished requests
        self._pending: deque[list[RequestOutput] | _Failure] = deque()  # for the next steps
        weakref.finalize(self, self._driver.close)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: object = None,
    ) -> str:
        """Queue a request; returns its id. Raises RequestError, and nothing is queued then.

        arrival_time, trace_headers and session_id have no effect; tokenization_kwargs, prompt_text
        and kv_hints must ask for nothing.
        """
        check_absent(
            {
                "tokenization_kwargs": tokenization_kwargs,
                "prompt_text": prompt_text,
                "kv_hints": kv_hints,
            }
        )
        self.engine.require_open()
        [(chosen, choice, rank)] = self._spread(1, params, adapter, lora_request, priority)
        group = self.frontend.prepare(
            prompt,
            chosen,
            request_id=request_id,
            salt=cache_salt,
            adapter=self._require_adapter(choice),
            priority=rank,
        )
        self._driver.call(lambda: self._submit(group))
        return group.request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs of the requests that it moved, as `output_kind` says.

        Raises the EngineError of a request that failed; the others' outputs come before it. If it
        is interrupted, such as by Ctrl-C, its outputs come with the next step.
        """
        self.engine.require_open()
        if not self._pending:
            self._driver.call(self._advance)
        moved = self._pending.popleft()
        if isinstance(moved, _Failure):
            raise moved.error
        return moved

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Forget requests; an id that is not known changes nothing."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        self._driver.call(lambda: self._forget(frozenset(names)))

    # In the engine's thread

    def _submit(self, group: RequestGroup) -> None:
        name = group.request_id
        if any(name in _names(moved) for moved in self._pending):
            raise RequestError(f"request {name!r} has an output that the next step tells")
        self.engine.submit(group)
        self._shown[name] = ShownOutputs(group.params.output_kind)

    def _advance(self) -> None:
        """Run a step and make the outputs of the requests that moved."""
        outputs: list[RequestOutput] = []
        failures: list[_Failure] = []
        ended: list[str] = []
        for group, error in self.engine.step():
            name = group.request_id
            try:
                output = group.output() if error is None else None
            except Exception as cause:  # it ends this request alone
                self.engine.abort(name)
                error = EngineError(f"an output cannot be made: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
            if error is not None:
                failures.append(_Failure(name, error))
                ended.append(name)
                continue
            assert output is not None
            if output.finished:
                ended.append(name)
            if (new := self._shown[name].next(output)) is not None:
                outputs.append(new)
        if outputs or not failures:
            self._pending.append(outputs)
        self._pending += failures
        for name in ended:  # last, so that `has_unfinished_requests` misses nothing
            del self._shown[name]

    def _forget(self, names: frozenset[str]) -> None:
        for name in names:
            self.engine.abort(name)
            self._shown.pop(name, None)
        pending = list(self._pending)
        self._pending.clear()
        for moved in pending:
            if isinstance(moved, list):
                self._pending.append([o for o in moved if o.request_id not in names])
            elif moved.request_id not in names:
                self._pending.append(moved)

    def has_unfinished_requests(self) -> bool:
        """Return True if a step would return an output."""
        return bool(self._shown or self._pending)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose answers have not ended."""
        return len(self._shown)

    def close(self) -> None:
        """Forget all requests and free the K/V memory. Idempotent."""
        self._driver.close()
        self._shown.clear()
        self._pending.clear()


def _names(moved: list[RequestOutput] | _Failure) -> list[str]:
    if isinstance(moved, _Failure):
        return [moved.request_id]
    return [output.request_id for output in moved]
