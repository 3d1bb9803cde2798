"""The engine core: token ids in, token ids out, one step at a time. Synchronous, without threads.

submit    queue a request that the frontend has prepared
step      schedule, compute, sample, commit, deliver
abort     remove a request at any time between steps

A step can fail while it computes and samples: the model or a logits processor may raise, or memory
may run out. Its requests then end with an error that names the cause. A step's blocks are committed
only after sampling, so no request can hit a block of a failed step. Any other exception is a bug:
the engine resets its cache, ends all requests with an error, and continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headstart.attention import make_backend
from headstart.engine.adapter_store import AdapterStore
from headstart.engine.config import EngineConfig, count_cores, make_config
from headstart.engine.drafts.drafting import Drafting
from headstart.engine.fair_share import FairShare
from headstart.engine.image_cache import EncoderBudget, EncoderCache
from headstart.engine.outputs import RequestOutput
from headstart.engine.parts import make_engine_parts
from headstart.engine.request import Request, RequestGroup
from headstart.engine.runner import Choice, Runner, StepLogits, choose_row, choose_tokens
from headstart.engine.sampling import SampledToken, Sampler
from headstart.engine.scheduler import Scheduler
from headstart.engine.step import Batch, EngineHooks, Limit, ScheduledTokens, StepResult
from headstart.errors import ConfigError, EngineError, RequestError, engine_error
from headstart.models.decoder import DecoderModel
from headstart.models.loader import load_model
from headstart.models.prefetch import ReadyMemory
from headstart.models.tokenizer import Tokenizer, load_tokenizer

_LOG = logging.getLogger("headstart.engine")


class EngineCore:
    """Continuous batching over one model with automatic prefix caching.

    Not thread-safe: `headstart.engine.driver` calls it from one thread. images: the budget of image
    embeddings, None for a model without vision.
    """

    def __init__(
        self,
        decoder: DecoderModel,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        hooks: EngineHooks | None = None,
        *,
        is_observed: bool = False,
    ) -> None:
        """Create an engine for a loaded model. Raises ConfigError or OutOfMemoryError.

        tokenizer: only for image processors, and for texts that tiers store with blocks.
        is_observed: see `make_engine_parts`.
        """
        rows = hooks.stored_rows if hooks is not None else None
        parts = make_engine_parts(decoder, tokenizer, config, rows=rows, is_observed=is_observed)
        self.config = config
        self.model, self.vision = decoder, parts.vision
        self.manager, self.max_model_len = parts.manager, parts.max_model_len
        self.kv_cache_bytes = parts.memory.nbytes
        self.state_bytes = parts.states.rows.nbytes if parts.states is not None else 0
        if config.deterministic:
            self.model.fix_rows()
        backend = make_backend(parts.memory, share=config.share_attention)
        self.model.attach(backend, parts.states)
        self.tiers = parts.tiers
        self.images: EncoderBudget | None = None
        if parts.vision is not None:
            store = self.tiers.image_loads if self.tiers is not None else None
            cache = EncoderCache(
                parts.vision, config.encoder_cache_rows, store, self.manager.shares
            )
            self.images = EncoderBudget(cache, config.block_size if config.deterministic else None)
        self.adapters = AdapterStore(self.model, config)
        self._runner = Runner(parts, backend, self.adapters, deterministic=config.deterministic)
        self._sampler = Sampler(self.model.vocab_size)
        self._fair_share = FairShare(self.manager, config)
        # Hooks and loads come first. While a request waits for its inputs, they return None, and
        # any number of requests may bypass it. If another limit came first, only a few could.
        loads = self.tiers.loads if self.tiers is not None else None
        limits: list[Limit | None] = [hooks, loads, self.adapters, self.images, self._fair_share]
        self.drafting: Drafting | None = None
        on_cpu = self.model.device.type == "cpu"
        self._clock = time.thread_time if on_cpu else time.perf_counter  # CPU time is less noisy
        if config.max_draft and hooks is None and parts.states is None:
            self.drafting = Drafting(self.manager, config, self.max_model_len)
        elif config.max_draft and config.speculation != "auto":
            _LOG.warning("speculation has no effect: recurrent layers and pipelines exclude it")
        self._scheduler = Scheduler(
            self.manager,
            config,
            limits=[limit for limit in limits if limit is not None],
            max_prompt_tokens=self._fair_share.max_prompt_tokens,
            hooks=hooks,
            drafting=self.drafting,
        )
        self._hooks = hooks
        self._groups: dict[str, RequestGroup] = {}
        self._closed: str | None = None  # the reason, once it is closed

    # Requests

    def submit(self, group: RequestGroup) -> None:
        """Queue a prepared request. Raises RequestError when its id is in use."""
        self.require_open()
        if group.request_id in self._groups:
            raise RequestError(f"request id {group.request_id!r} is in use")
        self._groups[group.request_id] = group
        if self.tiers is not None:
            if self.drafting is not None:
                self.tiers.replies.queue(group)
            self.tiers.loads.queue(group)
        if self._fair_share.catch_up():
            self._scheduler.reorder()
        for request in group.requests:
            self._scheduler.add(self._fair_share.queue(request))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Remove a request; return its output, with finish reason "abort", or None if unknown."""
        if (group := self._groups.get(request_id)) is not None:
            self._leave(group, "abort")
        if self.tiers is not None and not self._groups:
            self.tiers.idle()
        return group.output() if group is not None else None

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter's name. Requests that already use the adapter continue.

        Raises RequestError for a name that is not loaded.
        """
        self.require_open()
        self.adapters.unload(name)
        self.adapters.release_unloaded(self._groups.values())

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_tiers: bool = False
    ) -> bool:
        """Empty the cache and return True. If a request runs, change nothing and return False.

        reset_running_requests: preempt running requests first; they are computed again.
        reset_tiers: clear the tiers too; raises TierError if blocks may be left in a tier.
        """
        self.require_open()
        if reset_running_requests:
            self._scheduler.preempt_all()
        done = self.manager.reset_prefix_cache()
        if done and reset_tiers and self.tiers is not None:
            self.tiers.clear()
        return done

    @property
    def has_unfinished(self) -> bool:
        """True if there are unfinished requests."""
        return bool(self._groups)

    @property
    def num_preemptions(self) -> int:
        """Number of times that a running request gave up its blocks."""
        return self._scheduler.num_preemptions

    @property
    def requests(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """The running and the waiting requests, one `Request` per answer. Do not change them."""
        return self._scheduler.running, self._scheduler.waiting

    # Steps

    def step(self) -> list[StepResult]:
        """Run one step; return the requests that got a token or ended.

        If the model, a logits processor or the sampler fails, the step's requests end with an
        EngineError. If K/V or logits of a request are not finite, only that request ends. If an
        image cannot be encoded, the requests that need it end, and the step's other requests are
        queued again. Any other exception ends all requests (`reset`).
        """
        self.require_open()
        results: list[StepResult] = []
        try:
            self._step(results)
            if self.config.debug:
                self.manager.check()
                if self.images is not None:
                    self.images.cache.check()
        except BaseException as error:
            ended_requests = [r for r in results if r.error is not None or r.group.finished]
            results = [*ended_requests, *self.reset(error)]
        return results

    def reset(self, cause: BaseException) -> list[StepResult]:
        """Empty the cache after an unexpected exception; end and return all requests."""
        _LOG.error("the engine broke: its requests end, its cache is emptied", exc_info=cause)
        self.manager.reset()
        self._runner.end_step()
        self.adapters.restore()
        if self.tiers is not None:
            self.tiers.reset()
        ended = list(self._groups.values())
        self._groups.clear()
        for request in [request for group in ended for request in group.requests]:
            request.finish_reason = request.finish_reason or "error"
        self._scheduler.reset()
        return [StepResult(group, engine_error("the engine broke", cause)) for group in ended]

    def _step(self, results: list[StepResult]) -> None:
        """Schedule, compute and commit one step; add the results of its requests to `results`.

        If `_compute` returns failed requests, the step is rolled back.
        """
        if self.adapters.has_unloaded:
            self.adapters.release_unloaded(self._groups.values())
        start = self._clock()
        batch = self._schedule()
        if not batch.scheduled and self.tiers is not None and self.tiers.wait():
            batch = self._schedule()
        for request_id, refusal in self.adapters.take_refused().items():
            error = engine_error("the request's adapter cannot be used", refusal)
            self._end(results, self._groups[request_id], error)
        if not batch.scheduled:
            waits = self._scheduler.waits_for_inputs or (self.tiers and self.tiers.is_loading)
            if not results and self._groups and not waits:
                raise EngineError("requests wait, and none can run: the scheduler is stuck")
            return
        tokens, failed, logits = self._compute(batch)
        if failed:
            self._roll_back()
            for request, error in failed.items():
                self._end(results, request.group, error)
            return
        self._discard_failed(results, batch, tokens)
        self.manager.commit_step()
        self._scheduler.committed()
        self._deliver(results, batch, tokens, logits)
        if self.tiers is not None:
            self.tiers.committed(batch, is_last=not self._groups)
        if self.drafting is not None:
            self.drafting.measure(batch, self._clock() - start)

    def _compute(
        self, batch: Batch
    ) -> tuple[list[Choice], dict[Any, EngineError], StepLogits | None]:
        """Return a token or an error for each scheduled part, errors by failed request, the logits.

        If a request failed, there are no tokens and no logits. If an image cannot be encoded, the
        requests with this image fail before the model runs. If the model, a logits processor or the
        sampler raises, all requests of the batch fail.
        """
        try:
            if self.tiers is not None:
                self.tiers.scheduled(batch)
            if self.images is not None and (failed := self.images.cache.encode_pending()):
                return [], failed, None
            logits = self._run_model(batch)
            return choose_tokens(self._sampler, batch, logits), {}, logits
        except BaseException as cause:
            failed = {p.request: engine_error("the step failed", cause) for p in batch.scheduled}
            return [], failed, None

    def _roll_back(self) -> None:
        """Roll back a failed step and queue its requests again; the caller ends the failed ones."""
        self.manager.fail_step()
        self._scheduler.restart()
        if self.tiers is not None:
            self.tiers.roll_back()

    def _schedule(self) -> Batch:
        """Return the next batch; if nothing can run, wait for adapters that are being read."""
        last_read = None
        while True:
            self.adapters.poll()
            if self.tiers is not None:
                self.tiers.poll()
            batch = self._scheduler.schedule()
            if batch.scheduled or (read := self.adapters.wait_for_reading()) is last_read:
                return batch
            last_read = read

    def _run_model(self, batch: Batch) -> StepLogits:
        now = time.perf_counter()
        for part in batch.scheduled:
            if part.request.group.start_time is None:
                part.request.group.start_time = now
                self.adapters.add_adapter_name(part.request)
        logits = self._runner.run(batch)
        if self._hooks is not None:
            self._hooks.computed(batch)
        return logits

    def _discard_failed(
        self, results: list[StepResult], batch: Batch, tokens: Sequence[Choice]
    ) -> None:
        """End the requests that failed in this step, before other requests can hit their blocks."""
        failed = {
            part.request.group: token
            for part, token in zip(batch.scheduled, tokens, strict=True)
            if isinstance(token, EngineError)
        }
        if not failed:
            return
        sequences = [request.sequence for group in failed for request in group.requests]
        self.manager.discard([s for s in sequences if self.manager.is_known(s)])
        for group, error in failed.items():
            self._end(results, group, error)

    def _deliver(
        self,
        results: list[StepResult],
        batch: Batch,
        tokens: Sequence[Choice],
        logits: StepLogits | None,
    ) -> None:
        now = time.perf_counter()
        updated: dict[RequestGroup, None] = {}
        for number, (part, token) in enumerate(zip(batch.scheduled, tokens, strict=True)):
            request = part.request
            request.num_read = request.sequence.num_computed_tokens
            if request.finish_reason is not None or not isinstance(token, SampledToken):
                continue
            try:
                request.append(token, now)
                if part.draft:
                    assert logits is not None
                    self._verify(part, token, logits, number, now)
            except Exception as cause:  # a tokenizer that cannot decode must end only this request
                updated.pop(request.group, None)
                if not isinstance(cause, EngineError):  # `_verify` raises EngineErrors
                    cause = engine_error("the answer cannot be decoded", cause)
                self._end(results, request.group, cause)
                continue
            updated[request.group] = None
            if request.finish_reason is not None:
                self._scheduler.remove(request)
                if request.group.finished:
                    self._groups.pop(request.group.request_id, None)
        results += map(StepResult, updated)

    def _verify(
        self,
        part: ScheduledTokens,
        token: SampledToken,
        logits: StepLogits,
        number: int,
        now: float,
    ) -> None:
        """Accept drafted tokens that the sampler also chooses, and append the sampler's tokens.

        token: the last token of the request. number: the part's index in the step. If K or V of
        drafted tokens are not finite, the draft is rejected without an error. If the sampler then
        chooses one of these tokens, the step that computes it ends the request with an error.
        """
        request, num_accepted = part.request, 0
        row = sum(logits.counts[:number])  # the row from which `token` was sampled
        for expected in part.draft if number not in logits.bad_drafts else ():
            if request.finish_reason is not None or token.token_id != expected:
                break
            row += 1
            choice = choose_row(self._sampler, logits, row, request.sampling)
            if not isinstance(choice, SampledToken):
                # Do not reject the draft instead: the next step would sample this token again, and
                # call the logits processors twice for it.
                raise choice
            token = choice
            num_accepted += 1
            request.append(token, now)
        self.manager.accept(request.sequence, num_accepted)
        request.num_read += num_accepted
        assert self.drafting is not None
        self.drafting.verified(request, len(part.draft), num_accepted)

    def _end(self, results: list[StepResult], group: RequestGroup, error: EngineError) -> None:
        """End the unfinished answers of a request with an error."""
        if self._groups.get(group.request_id) is group:
            results.append(StepResult(group, error))
            self._leave(group, "error")

    def _leave(self, group: RequestGroup, reason: str) -> None:
        """Remove a request; its unfinished answers get this finish reason."""
        for request in group.requests:
            if request.finish_reason is None:
                self._scheduler.remove(request)
                request.finish_reason = reason
        self._groups.pop(group.request_id, None)

    def require_open(self) -> None:
        """Raise EngineError after `close`."""
        if self._closed is not None:
            raise EngineError(self._closed)

    def close(self, reason: str = "the engine is closed") -> None:
        """Release requests, threads and K/V memory. Later calls except `close` raise."""
        self._closed = self._closed or reason
        self._groups.clear()
        self.adapters.close()
        if self.images is not None:
            self.images.cache.clear()
        if self.tiers is not None:
            self.tiers.close()
        self.model.detach()
        self._runner.close()


def load_engine(
    model: str | Path,
    *,
    tokenizer_folder: Path | None = None,
    ready_memory: ReadyMemory | None = None,
    is_observed: bool = False,
    **options: Any,
) -> tuple[EngineCore, Tokenizer | None]:
    """Load a model by path or name, and its tokenizer; `options` are those of `EngineConfig`.

    tokenizer_folder: None for the model's. ready_memory: memory for packed weights, used if it is
    large enough. Raises ConfigError, ModelError or OutOfMemoryError after freeing all memory.
    """
    config = make_config(options)
    # Load with all cores, even if steps use fewer, since more threads allocate memory faster.
    torch.set_num_threads(max(config.threads, count_cores()))
    try:
        tokenizer = load_tokenizer(tokenizer_folder or model)
        if tokenizer is None and tokenizer_folder is not None:
            raise ConfigError(f"tokenizer is {tokenizer_folder}, a folder without a tokenizer")
        decoder = load_model(
            model, config.dtype, config.device, ready_memory, weights=config.weights
        )
    finally:
        torch.set_num_threads(config.threads)
    return EngineCore(decoder, tokenizer, config, is_observed=is_observed), tokenizer
