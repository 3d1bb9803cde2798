"""`LLMEngine`: an engine whose steps the program makes itself."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from headstart.engine.adapters.request import LoRARequest
from headstart.engine.outputs import ShownOutputs
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, RequestError
from headstart.frontend.facade import SyncFacade
from headstart.validation import check_absent

# These bring torch, which waits until the model's name is checked: see `start_engine`.
if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.inputs import Prompt
    from headstart.frontend.start import Started

__all__ = ["LLMEngine"]


class LLMEngine(SyncFacade):
    """Takes requests, and answers all of them step by step as `step` is called.

    For one thread: `AsyncLLM`, and `LLM.stream`, have a thread that makes the steps.

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
        self.engine, self._chats, self._driver, self._sampling = started
        self._shown: dict[str, ShownOutputs] = {}
        self._errors: dict[str, Exception] = {}  # of requests, each for a step of its own
        # Of steps that were interrupted as they ended: what is to be shown, and what is to be told.
        self._moved: dict[RequestGroup, EngineError | None] = {}
        self._outputs: list[list[RequestOutput]] = []
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
        if request_id in self._untold():
            raise RequestError(f"request {request_id!r} has an output that the next step tells")
        [(chosen, choice, rank)] = self._spread(1, params, adapter, lora_request, priority)
        group = self.engine.prepare(
            prompt,
            chosen,
            request_id=request_id,
            salt=cache_salt,
            adapter=self._require_adapter(choice),
            priority=rank,
        )
        self.engine.submit(group)
        self._shown[group.request_id] = ShownOutputs(group.params.output_kind)
        return group.request_id

    def _untold(self) -> list[str]:
        """Requests that an interrupted step moved, and of which nobody knows yet."""
        moved = [*self._moved, *(result.group for result in self.engine.results)]
        told = [output.request_id for outputs in self._outputs for output in outputs]
        return [*self._errors, *(group.request_id for group in moved), *told]

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs of the requests that it moved, as `output_kind` says.

        Raises the EngineError of a request that failed; the others' outputs come before it. If it
        is interrupted, such as by Ctrl-C, what it had to tell comes with the next step.
        """
        self.engine.require_open()
        if not self._outputs and not self._errors:
            if not self._moved:
                self.engine.advance()
            self._collect()
            self._show()
        if self._outputs:
            return self._outputs.pop()
        raise self._errors.pop(next(iter(self._errors)))

    def _collect(self) -> None:
        """Take the engine's results: here first and there last, for none may be in neither."""
        self._moved.update(self.engine.results)
        self._moved.update(self.engine.take_results())  # and what rolling back ended

    def _show(self) -> None:
        """Make the outputs of all that moved. One assignment changes what is known of them."""
        shown, errors = dict(self._shown), dict(self._errors)
        outputs: list[RequestOutput] = []
        for group, error in self._moved.items():
            name = group.request_id
            own = copy(shown.pop(name, None)) or ShownOutputs(group.params.output_kind)
            try:
                output = group.output() if error is None else None
            except Exception as found:  # it ends this request alone
                self.engine.abort(name)
                error = EngineError(f"an output cannot be made: {type(found).__name__}: {found}")
                error.__cause__ = found
            if error is not None:
                errors[name] = error
            elif output is not None:
                if not output.finished:
                    shown[name] = own
                if (new := own.next(output)) is not None:
                    outputs.append(new)
        told = [outputs] if outputs or not errors else []
        self._shown, self._errors, self._moved, self._outputs = shown, errors, {}, told

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Forget requests; an id that is not known changes nothing."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        for name in names:
            self.engine.abort(name)
            self._shown.pop(name, None)
            self._errors.pop(name, None)
        self._collect()
        gone = frozenset(names)
        moved = self._moved.items()
        self._moved = {group: error for group, error in moved if group.request_id not in gone}
        self._outputs = [[o for o in told if o.request_id not in gone] for told in self._outputs]

    def has_unfinished_requests(self) -> bool:
        """Return True if a step would return an output."""
        return bool(self._outputs or self._errors or self._moved) or self.engine.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose answers have not ended."""
        return sum(map(self.engine.is_unfinished, self._shown))

    def close(self) -> None:
        """Forget all requests and free the K/V memory. Idempotent."""
        self._shown.clear()
        self._errors.clear()
        self._moved.clear()
        self._outputs.clear()
        self._driver.close()
