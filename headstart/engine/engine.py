"""The engine: requests in, one step at a time, outputs out. Synchronous and without threads.

prepare   check and tokenise a request; nothing is allocated
submit    queue it
step      schedule, run, sample, deliver
abort     forget a request at any time between steps
"""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from headstart.attention import PagedKVMemory, make_backend
from headstart.cache import BlockNames, CacheConfig, KVCacheManager, TokenSequence
from headstart.engine.adapter_store import AdapterStore
from headstart.engine.batch import Batch, ScheduledTokens
from headstart.engine.config import EngineConfig
from headstart.engine.detokenizer import Detokenizer
from headstart.engine.hooks import EngineHooks
from headstart.engine.image_prompt import make_image_prompts
from headstart.engine.images import Tenant
from headstart.engine.inputs import InputProcessor, Prompt, check_request
from headstart.engine.logprobs import token_logprobs
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request, RequestGroup
from headstart.engine.runner import Runner, StepLogits
from headstart.engine.sampler import SampledToken, Sampler, SamplingState
from headstart.engine.scheduler import Scheduler
from headstart.engine.sizing import count_blocks, longest_sequence
from headstart.engine.text import OutputText
from headstart.errors import EngineError, RequestError
from headstart.models.decoder import DecoderModel
from headstart.models.vision import VisionModel, load_vision


class StepResult(NamedTuple):
    """A request that a step moved, and the error that ended it, if one did.

    Its `group.output()` is what it has so far; read it before the next step.
    """

    group: RequestGroup
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is put together from."""

    model: DecoderModel
    tokenizer: PreTrainedTokenizerBase | None
    memory: PagedKVMemory
    manager: KVCacheManager
    max_model_len: int
    vision: VisionModel | None = None


class Engine:
    """Continuous batching over one model with automatic prefix caching.

    Not thread-safe: whoever drives it calls everything from one thread, but `prepare`, which
    changes nothing.
    """

    def __init__(
        self, parts: Parts, config: EngineConfig, hooks: EngineHooks | None = None
    ) -> None:
        self.config = config
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.manager = parts.manager
        self.max_model_len = parts.max_model_len
        backend = make_backend(parts.memory, share=config.share_attention)
        self.model.attach(backend)
        self.images = make_image_prompts(parts.vision, parts.tokenizer, config)
        self._inputs = InputProcessor(
            parts.tokenizer, self.model.vocab_size, parts.max_model_len, self.images
        )
        self.adapters = AdapterStore(self.model, config)
        self._runner = Runner(
            self.model, backend, parts.memory, self.adapters, deterministic=config.deterministic
        )
        self._sampler = Sampler(self.model.vocab_size)
        self._scheduler = Scheduler(
            self.manager,
            max_tokens=config.max_num_batched_tokens,
            max_running=config.max_num_seqs,
            max_overtaken=config.max_overtaken,
            may_run=self.adapters.may_run,
            hooks=hooks,
        )
        self._scheduler.gate = self.images.gate if self.images is not None else None
        self._hooks = hooks
        self._groups: dict[str, RequestGroup] = {}
        self._names = itertools.count()
        self._seeds = itertools.count()

    @classmethod
    def of_model(
        cls,
        decoder: DecoderModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
        hooks: EngineHooks | None = None,
    ) -> "Engine":
        """An engine for a model that is loaded. Raises OutOfMemoryError."""
        vision = load_vision(decoder, tokenizer)
        blocks = count_blocks(config, decoder, vision.bytes_per_row if vision is not None else 0)
        limit = longest_sequence(config, decoder.max_model_len, blocks)
        memory = PagedKVMemory(
            decoder.layouts, blocks, config.block_size, decoder.dtype, decoder.device
        )
        cache = CacheConfig(
            num_blocks=blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            deduplicate=config.deduplicate,
            partial_hits=config.partial_hits and not config.deterministic,
            eviction=config.eviction,
        )
        manager = KVCacheManager(cache, BlockNames(config.block_size))
        return cls(Parts(decoder, tokenizer, memory, manager, limit, vision), config, hooks)

    # Requests

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> RequestGroup:
        """Check and tokenise a request, for the adapter of a name if one is given.

        Raises RequestError; nothing is kept of it.
        """
        check_request(params, request_id=request_id, salt=salt, adapter=adapter)
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        if name in self._groups:
            raise RequestError(f"request id {name!r} is in use")
        ready = self._inputs.process(prompt, Tenant(salt, params.similar_images))
        group = RequestGroup(
            name,
            ready.text,
            list(ready.token_ids),
            params,
            time.perf_counter(),
            ready.extras,
            ready.images,
        )
        if adapter is not None:
            group.adapter = self.adapters.find(adapter)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        group.requests = [self._make_request(group, index, salt) for index in range(params.n)]
        return group

    def _make_request(self, group: RequestGroup, index: int, salt: str | None) -> Request:
        params = group.params
        items = group.extras.items if group.extras is not None else ()
        sequence = TokenSequence(
            f"{group.request_id}/{index}",
            group.prompt_token_ids,
            adapter=group.adapter.digest if group.adapter is not None else None,
            salt=salt,
            items=items,
        )
        generator = None
        if params.temperature > 0:
            seed = self.config.seed + next(self._seeds) if params.seed is None else params.seed
            generator = torch.Generator().manual_seed(seed + index)
        sampling = SamplingState(
            params, group.prompt_token_ids, [], generator, self.model.eos_token_ids
        )
        text = OutputText(
            Detokenizer(self.tokenizer, params.skip_special_tokens),
            params,
            self.model.eos_token_ids,
            self.max_model_len,
        )
        request = Request(group, index, sequence, sampling, text)
        if params.logprobs is not None:
            request.logprobs = []
        return request

    def submit(self, group: RequestGroup) -> None:
        """Queue a prepared request. Raises RequestError when its id came into use meanwhile."""
        if group.request_id in self._groups:
            raise RequestError(f"request id {group.request_id!r} is in use")
        self._groups[group.request_id] = group
        for request in group.requests:
            self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request; its output so far, with finish reason "abort", or None if unknown."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        for request in group.requests:
            if request.finish_reason is None:
                self._scheduler.remove(request)
                request.finish_reason = "abort"
        return group.output()

    def unload_adapter(self, name: str) -> None:
        """Requests may ask for the adapter no more; those that have it finish.

        From the engine's thread. Raises RequestError for a name that is not loaded.
        """
        self.adapters.unload(name)
        self.adapters.forget_unnamed(self._groups.values())

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do something."""
        return bool(self._groups)

    @property
    def num_preemptions(self) -> int:
        """How often a running request had to give up its blocks."""
        return self._scheduler.num_preemptions

    # Steps

    def step(self) -> list[StepResult]:
        """Run one step; the requests that got a token or ended, with what they have so far.

        When the model fails, the step's requests end with an EngineError and give their blocks
        back; the others go on. When an image cannot be encoded, that ends the requests that need
        it, and the others are let in again by the next step.
        """
        if self.adapters.has_unnamed:
            self.adapters.forget_unnamed(self._groups.values())
        batch = self._scheduler.schedule()
        refused = [
            self._end(self._groups[name], _engine_error("no adapter to run it with", error))
            for name, error in self.adapters.take_refused().items()
        ]
        if not batch.scheduled:
            if not refused and self._groups and not self._scheduler.waits_for_inputs:
                raise EngineError("requests wait, and none can run: the scheduler is stuck")
            return refused
        now = time.perf_counter()
        try:
            unseen = self.images.cache.encode_wanted() if self.images is not None else {}
            logits = None if unseen else self._compute(batch, now)
        except BaseException as error:  # whatever a model, a kernel or Ctrl-C raises
            reason = _engine_error("the step failed", error)
            failed = self._call_off(batch, {part.request: reason for part in batch.scheduled})
            if isinstance(error, Exception):
                return refused + failed
            raise
        if logits is None:
            return refused + self._call_off(batch, unseen)
        self.manager.commit_step()
        results = refused + self._deliver(batch, self._sample(batch, logits))
        if self.config.debug:
            self._check()
        return results

    def _compute(self, batch: Batch, now: float) -> StepLogits:
        for part in batch.scheduled:
            if part.request.group.start_time is None:
                part.request.group.start_time = now
                self.adapters.name_miss(part.request)
        logits = self._runner.run(batch)
        if self._hooks is not None:
            self._hooks.computed(batch)
        return logits

    def _sample(self, batch: Batch, logits: StepLogits) -> list[SampledToken | EngineError | None]:
        """The next token of each part, None for one that ends before its last token."""
        if logits.values is None:
            chosen = (SampledToken(token_id, None, ()) for token_id in logits.likeliest)
            return [next(chosen) if part.samples else None for part in batch.scheduled]
        at = 0
        rows: list[int] = []
        states: list[SamplingState] = []
        for part, count in zip(batch.scheduled, logits.counts, strict=True):
            request = part.request
            if request.needs_prompt_logits:
                self._add_prompt_logprobs(part, logits.values[at : at + count])
            at += count
            if part.samples:
                rows.append(at - 1)
                states.append(request.sampling)
        values = logits.values if len(rows) == len(logits.values) else logits.values[rows]
        tokens = iter(self._sample_rows(values, states))
        return [next(tokens) if part.samples else None for part in batch.scheduled]

    def _sample_rows(
        self, values: torch.Tensor, states: list[SamplingState]
    ) -> list[SampledToken | EngineError]:
        """A token a row; a row that cannot be sampled (logits that are no numbers) ends alone."""
        if not states:
            return []
        try:
            return list(self._sampler.sample(values, states))
        except Exception as error:
            if len(states) == 1:
                return [_engine_error("sampling failed", error)]
        return [
            token
            for at, state in enumerate(states)
            for token in self._sample_rows(values[at : at + 1], [state])
        ]

    def _add_prompt_logprobs(self, part: ScheduledTokens, logits: torch.Tensor) -> None:
        """Row i of the logits tells of the token after position start + i."""
        group = part.request.group
        following = group.prompt_token_ids[part.start + 1 : part.stop + 1]
        top = group.params.prompt_logprobs or 0
        entries = token_logprobs(logits[: len(following)], following, top)
        group.add_prompt_logprobs(part.start + 1, entries)

    def _deliver(
        self, batch: Batch, sampled: list[SampledToken | EngineError | None]
    ) -> list[StepResult]:
        now = time.perf_counter()
        moved: dict[str, StepResult] = {}
        for part, token in zip(batch.scheduled, sampled, strict=True):
            request = part.request
            if token is None or request.finish_reason is not None:
                continue
            group = request.group
            name = group.request_id
            if isinstance(token, EngineError):
                moved[name] = self._end(group, token)
                continue
            request.append(token, now)
            if request.finish_reason is not None:
                self._scheduler.remove(request)
                if group.finished:
                    self._groups.pop(name, None)
            if name not in moved:
                moved[name] = StepResult(group)
        return list(moved.values())

    def _call_off(self, batch: Batch, errors: Mapping[object, EngineError]) -> list[StepResult]:
        """Undo the step: these of its requests end, siblings included, the others wait again."""
        self.manager.fail_step()
        failed = [part.request for part in batch.scheduled if part.request in errors]
        self._scheduler.drop_failed(failed)
        self._scheduler.put_back(part for part in batch.scheduled if part.request not in errors)
        if self.images is not None:
            self.images.cache.drop_wanted()
        for request in failed:
            request.finish_reason = "error"
        reasons = {request.group.request_id: errors[request] for request in failed}
        return [self._end(self._groups[name], reason) for name, reason in reasons.items()]

    def _end(self, group: RequestGroup, error: EngineError) -> StepResult:
        """End what is left of a request with an error."""
        for request in group.requests:
            if request.finish_reason is None:
                self._scheduler.remove(request)
                request.finish_reason = "error"
        self._groups.pop(group.request_id, None)
        return StepResult(group, error)

    def _check(self) -> None:
        self.manager.check()
        if self.images is not None:
            self.images.cache.check()

    def close(self) -> None:
        """Let go of the model's attention function and, with it, of the K/V memory."""
        self.model.detach()


def _engine_error(what: str, cause: BaseException) -> EngineError:
    error = EngineError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
