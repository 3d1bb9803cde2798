"""`LLMEngine`: an engine whose steps the program runs, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.engine.adapter_names import LoRARequest
from headstart.engine.outputs import ShownOutputs
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, RequestError
from headstart.frontend.facade import Started, SyncFacade, check_call

# These import torch, which waits until the model's name is checked: see `start_engine`.
if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.inputs import Prompt


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
        super()._take(started)
        # Changed in the engine's thread alone, but that `step` takes the first of `_pending`.
        self._shown: dict[str, ShownOutputs] = {}  # of unfinished requests
        # For the next steps: outputs by request, or the error of one request.
        self._pending: deque[dict[str, RequestOutput | EngineError]] = deque()

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
        check_call(locals())
        make = partial(self.frontend.prepare, request_id=request_id)
        [group] = self._prepare([prompt], params, adapter, lora_request, priority, cache_salt, make)
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
        outputs: list[RequestOutput] = []
        for output in self._pending.popleft().values():
            if isinstance(output, EngineError):
                raise output
            outputs.append(output)
        return outputs

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Forget requests; an id that is not known changes nothing."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        self._driver.call(lambda: self._forget(names))

    # In the engine's thread

    def _submit(self, group: RequestGroup) -> None:
        name = group.request_id
        if any(name in moved for moved in self._pending):
            raise RequestError(f"request {name!r} has an output that the next step returns")
        self.engine.submit(group)
        self._shown[name] = ShownOutputs(group.params.output_kind)

    def _advance(self) -> None:
        """Run a step and make the outputs of the requests that moved."""
        outputs: dict[str, RequestOutput | EngineError] = {}
        failures: list[dict[str, RequestOutput | EngineError]] = []
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
                failures.append({name: error})
                ended.append(name)
                continue
            assert output is not None
            if output.finished:
                ended.append(name)
            if (new := self._shown[name].next(output)) is not None:
                outputs[name] = new
        if outputs or not failures:
            self._pending.append(outputs)
        self._pending += failures
        for name in ended:  # last, so that `has_unfinished_requests` misses nothing
            del self._shown[name]

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.engine.abort(name)
            self._shown.pop(name, None)
            for moved in self._pending:
                moved.pop(name, None)
        self._pending = deque(filter(None, self._pending))

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
