"""`LLMEngine`: an engine whose steps the program makes itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from headstart.engine.adapters.request import LoRARequest
from headstart.engine.metrics import Metric, read_metrics
from headstart.engine.outputs import ShownOutputs
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, EngineError, RequestError
from headstart.frontend.engine_args import EngineArgs, require_engine_args
from headstart.frontend.start import start_engine
from headstart.frontend.vllm_api.call_options import StreamOptions, read_call, spread_params
from headstart.frontend.vllm_api.calls import ADD_REQUEST, FROM_ENGINE_ARGS
from headstart.frontend.vllm_api.members import LLM_ENGINE
from headstart.frontend.vllm_api.signatures import OfOneProcess, check_calls
from headstart.frontend.vllm_api.views import PARTS, ModelView, VllmView, read_config
from headstart.validation import check_flag, describe

# What brings torch with it waits until the model's name is known: see `start_engine`.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.inputs import Prompt

__all__ = ["LLMEngine"]

Answer = TypeVar("Answer")


@check_calls(ConfigError)
class LLMEngine(OfOneProcess):
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

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model; `options` are those of `LLM`. Raises what `LLM` does."""
        started = start_engine(model, options)
        self.engine, self._driver, self._sampling = started.engine, started.driver, started.sampling
        self._shown: dict[str, ShownOutputs] = {}
        self._errors: dict[str, Exception] = {}  # of requests, each for a step of its own
        # Of steps that were interrupted as they ended: what is to be shown, and what is to be told.
        self._moved: dict[RequestGroup, EngineError | None] = {}
        self._outputs: list[list[RequestOutput]] = []
        weakref.finalize(self, self._driver.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> LLMEngine:
        """As `LLMEngine(...)`, with vLLM's object of arguments; its options change nothing here."""
        FROM_ENGINE_ARGS.read(options)
        given = require_engine_args(engine_args)
        return cls(given.model, **given.options)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[StreamOptions],
    ) -> str:
        """Queue a request; returns its id. Raises RequestError, and nothing is queued then.

        options: see `StreamOptions`.
        """
        self.engine.require_open()
        if request_id in self._untold():
            raise RequestError(f"request {request_id!r} has an output that the next step tells")
        call = read_call(ADD_REQUEST, options, 1)
        [chosen] = spread_params(params, self._sampling, 1)
        group = self.engine.prepare(
            prompt,
            chosen,
            request_id=request_id,
            salt=call.salt,
            adapter=self.engine.adapters.require(call.adapters[0], _now),
            priority=call.priorities[0],
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
        is_list = isinstance(names, Sequence | set) and all(isinstance(one, str) for one in names)
        if not is_list:
            raise RequestError(f"request_ids is {describe(request_ids)}; allowed: texts in a list")
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
        """Whether a step would tell something."""
        return bool(self._outputs or self._errors or self._moved) or self.engine.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not all of their answer."""
        return sum(map(self.engine.is_unfinished, self._shown))

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, None if it came without one."""
        self.engine.require_open()
        return self.engine.tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """As `get_tokenizer`."""
        return self.get_tokenizer()

    @property
    def vllm_config(self) -> VllmView:
        """The configuration, in vLLM's names."""
        return read_config(self.engine)

    @property
    def model_config(self) -> ModelView:
        """The part of `vllm_config` that is the model's."""
        return self.vllm_config.model_config

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before it is first asked for."""
        self.engine.require_open()
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request is {describe(lora_request)}; allowed: a LoRARequest")
        self.engine.adapters.require(lora_request, _now)
        return True

    def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`."""
        return read_metrics(self.engine)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `LLM.reset_prefix_cache`."""
        again = check_flag("reset_running_requests", reset_running_requests)
        tiers = check_flag("reset_connector", reset_connector)
        return self.engine.reset_prefix_cache(reset_running_requests=again, reset_tiers=tiers)

    def close(self) -> None:
        """Forget all requests and free the K/V memory. Idempotent."""
        self._shown.clear()
        self._errors.clear()
        self._moved.clear()
        self._outputs.clear()
        self._driver.close()

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:
            return getattr(self.vllm_config, name)
        raise LLM_ENGINE.missing(name, dir(type(self)))


def _now(function: Callable[[], Answer]) -> Answer:
    """No step is under way: nothing is to be waited for."""
    return function()
