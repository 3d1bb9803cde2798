"""The engine: requests in, one step at a time, outputs out. Synchronous and without threads.

prepare   check and tokenise a request; nothing is allocated
submit    queue it
step      schedule, compute, sample, commit, deliver: all of it, or none (`advance`, `take_results`)
abort     forget a request at any time between steps

A step is a transaction. Whatever is raised in it, Ctrl-C included, rolls it back: no block that
it was to fill can be found, every request waits again or ends with an error that names the cause.
An exception may even interrupt the rolling back; the next call then completes it.
"""

import time
from collections.abc import Sequence

from headstart.attention import make_backend
from headstart.engine.adapters.store import AdapterStore
from headstart.engine.batch import Batch
from headstart.engine.config import EngineConfig
from headstart.engine.hooks import EngineHooks
from headstart.engine.limits import Limit
from headstart.engine.limits.fair_share import FairShare
from headstart.engine.logits.vocabulary import Vocabulary
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request, RequestGroup
from headstart.engine.runner import Runner, StepLogits
from headstart.engine.sampling.sampler import SampledToken, Sampler
from headstart.engine.scheduler import Scheduler
from headstart.engine.startup.parts import Parts, make_parts
from headstart.engine.step import Choice, OpenStep, Phase, StepResult, choose_tokens, engine_error
from headstart.engine.tiering.tiers import make_tiers
from headstart.errors import EngineError, RequestError
from headstart.frontend.images.prompt import make_image_prompts
from headstart.frontend.inputs import InputProcessor, Prompt, RequestOptions, check_request
from headstart.frontend.request_maker import RequestMaker
from headstart.frontend.text.max_length import TextLimit
from headstart.models.decoder import DecoderModel
from headstart.models.tokenizer import Tokenizer


class Engine:
    """Continuous batching over one model with automatic prefix caching.

    Not thread-safe, but for `prepare`: `headstart.engine.driver` calls all else from one thread.
    """

    def __init__(
        self, parts: Parts, config: EngineConfig, hooks: EngineHooks | None = None
    ) -> None:
        self.config = config
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.manager, self.max_model_len = parts.manager, parts.max_model_len
        self.kv_cache_bytes = parts.memory.nbytes
        if config.deterministic:
            self.model.fix_rows()
        self.model.attach(backend := make_backend(parts.memory, share=config.share_attention))
        self.tiers = make_tiers(parts.stores, self.manager)
        kept = self.tiers.image_loads if self.tiers is not None else None
        self.images = make_image_prompts(
            parts.vision, parts.tokenizer, config, kept, self.manager.shares
        )
        self.adapters = AdapterStore(self.model, config)
        self.text_limit = TextLimit(parts.tokenizer, parts.max_model_len)
        self._maker = RequestMaker(
            InputProcessor(parts.tokenizer, self.model.vocab_size, self.text_limit, self.images),
            Vocabulary(parts.tokenizer, self.model.vocab_size, self.model.eos_token_ids),
            self.adapters,
            max_model_len=parts.max_model_len,
            first_seed=config.seed,
            public=self.manager.names.public,
        )
        self._runner = Runner(
            self.model, backend, parts.memory, self.adapters, deterministic=config.deterministic
        )
        self._sampler, self._turns = Sampler(self.model.vocab_size), FairShare(self.manager, config)
        self._scheduler = Scheduler(
            self.manager,
            max_tokens=config.max_num_batched_tokens,
            max_running=config.max_num_seqs,
            max_bypassed=config.max_bypassed,
            limits=self._limits(hooks),
            max_prompt_tokens=self._turns.max_prompt_tokens,
            hooks=hooks,
        )
        self._hooks = hooks
        self._groups: dict[str, RequestGroup] = {}
        self._open: list[OpenStep] = []  # at most one: a step under way, or to be rolled back
        self._closed: str | None = None  # why, once it is

    def _limits(self, hooks: EngineHooks | None) -> list[Limit]:
        """The limits of a step. Inputs come first: who waits for them is in nobody's way."""
        images = [self.images.budget] if self.images is not None else []
        inputs: list[Limit] = [] if hooks is None else [hooks]
        if self.tiers is not None:
            inputs.append(self.tiers.loads)
        return [*inputs, self.adapters, *images, self._turns]

    @classmethod
    def of_model(
        cls,
        decoder: DecoderModel,
        tokenizer: "Tokenizer | None",
        config: EngineConfig,
        hooks: EngineHooks | None = None,
    ) -> "Engine":
        """An engine for a model that is loaded. Raises ConfigError or OutOfMemoryError."""
        rows = hooks.kept_rows if hooks is not None else None
        return cls(make_parts(decoder, tokenizer, config, rows=rows), config, hooks)

    # Requests

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> RequestGroup:
        """Check and tokenise a request, for the adapter of a name if one is given.

        Raises RequestError; nothing is kept of it. EngineError after `close`.
        """
        self.require_open()
        check_request(params, options := RequestOptions(request_id, salt, adapter, priority))
        return self._maker.make(prompt, params, options)

    def submit(self, group: RequestGroup) -> None:
        """Queue a prepared request. Raises RequestError when its id is in use."""
        self.require_open()
        step = self._begin()
        if group.request_id in self._groups:
            self._close_step(step)
            raise RequestError(f"request id {group.request_id!r} is in use")
        self._groups[group.request_id] = group
        if self.tiers is not None:
            self.tiers.loads.queue(group)
        if self._turns.catch_up():
            self._scheduler.reorder()
        for request in group.requests:
            self._scheduler.add(self._turns.queue(request))
        self._close_step(step)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request; its output so far, with finish reason "abort", or None if unknown."""
        step = self._begin()
        if (group := self._groups.get(request_id)) is not None:
            self._leave(group, "abort")
        if self.tiers is not None and not self._groups:
            self.tiers.idle()
        self._close_step(step)
        return group.output() if group is not None else None

    def unload_adapter(self, name: str) -> None:
        """Requests may ask for the adapter no more; those that have it finish.

        Raises RequestError for a name that is not loaded.
        """
        self.require_open()
        self.adapters.unload(name)
        self.adapters.forget_unnamed(self._groups.values())

    def reset_prefix_cache(
        self, *, reset_running_requests: bool = False, reset_tiers: bool = False
    ) -> bool:
        """Forget everything cached; False, and nothing done, while a request runs.

        reset_running_requests: have those that run wait, and be computed anew, instead.
        reset_tiers: forget what tiers have of it too; raises TierError if one may not have.
        """
        self.require_open()
        step = self._begin()
        if reset_running_requests:
            self._scheduler.preempt_all()
        done = self.manager.reset_prefix_cache()
        self._close_step(step)
        if done and reset_tiers and self.tiers is not None:
            self.tiers.clear()
        return done

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do something."""
        return bool(self._groups or self._open)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether this request was queued, and has not ended."""
        return request_id in self._groups

    @property
    def num_preemptions(self) -> int:
        """How often a running request had to give up its blocks."""
        return self._scheduler.num_preemptions

    @property
    def requests(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """Answers that are computed, and those that wait: to look at, not to change."""
        return self._scheduler.running, self._scheduler.waiting

    # Steps

    def step(self) -> list[StepResult]:
        """Run one step; the requests that got a token or ended, with what they have so far.

        When the model fails, the step's requests end with an EngineError and give their blocks
        back. A request whose K/V or logits are not finite ends so alone. When an image cannot be
        encoded, that ends the requests that need it, and the others are let in again by the next
        step. Whatever else is raised rolls the step back and reaches the caller; results that
        were there by then come with the next step.
        """
        self.advance()
        return self.take_results()

    def advance(self) -> None:
        """As `step`, but the results wait for `take_results`, whatever interrupts its caller."""
        self.require_open()
        step = self._begin()
        try:
            self._advance(step)
        except BaseException as error:
            step.note_failure(error)
            self._roll_back(step)
            over = step.batch is None or step.phase is Phase.DELIVERED
            if over or not isinstance(error, Exception):
                self._close_step(step)
                raise
        if self.config.debug:
            self._check()
        self._close_step(step)

    @property
    def results(self) -> list[StepResult]:
        """Results that nobody has taken yet."""
        return self._open[0].results if self._open else []

    def take_results(self) -> list[StepResult]:
        """Results that nobody has taken yet, which the caller now has. Completes a rolling back."""
        self._close_step(self._begin())
        return self._open.pop().results if self._open else []  # at once: Ctrl-C would lose them

    def _advance(self, step: OpenStep) -> None:
        if self.adapters.has_unnamed:
            self.adapters.forget_unnamed(self._groups.values())
        batch, waited = self._schedule(), None
        while not batch.scheduled and (read := self.adapters.wait_for_reading()) is not waited:
            waited, batch = read, self._schedule()
        if not batch.scheduled and self.tiers is not None and self.tiers.wait():
            batch = self._schedule()
        for name, error in self.adapters.take_refused().items():
            self._end(step, self._groups[name], engine_error("no adapter to run it with", error))
        if not batch.scheduled:
            waits = self._scheduler.waits_for_inputs or (self.tiers and self.tiers.is_loading)
            if not step.results and self._groups and not waits:
                raise EngineError("requests wait, and none can run: the scheduler is stuck")
            return
        step.batch, step.phase = batch, Phase.COMPUTING
        step.failed = self.images.cache.encode_wanted() if self.images is not None else {}
        if step.failed:
            self._roll_back(step)
            return
        logits = self._compute(batch)
        step.phase = Phase.CHANGING
        tokens = choose_tokens(self._sampler, batch, logits)
        self._discard_failed(step, batch, tokens)
        self.manager.commit_step()
        self._scheduler.committed()
        self._deliver(step, batch, tokens)
        if self.tiers is not None:
            self.tiers.committed(batch, is_last=not self._groups)

    def _schedule(self) -> Batch:
        self.adapters.take_in()
        if self.tiers is not None:
            self.tiers.take_in()
        batch = self._scheduler.schedule()
        if self.tiers is not None and batch.scheduled:
            self.tiers.scheduled(batch)
        return batch

    def _compute(self, batch: Batch) -> StepLogits:
        now = time.perf_counter()
        for part in batch.scheduled:
            if part.request.group.start_time is None:
                part.request.group.start_time = now
                self.adapters.name_miss(part.request)
        logits = self._runner.run(batch)
        if self._hooks is not None:
            self._hooks.computed(batch)
        return logits

    def _discard_failed(self, step: OpenStep, batch: Batch, tokens: Sequence[Choice]) -> None:
        """End the requests whose part failed, before anything that they computed can be found."""
        failed = {
            part.request.group: token
            for part, token in zip(batch.scheduled, tokens, strict=True)
            if isinstance(token, EngineError)
        }
        if not failed:
            return
        sequences = [request.sequence for group in failed for request in group.requests]
        self.manager.discard([one for one in sequences if self.manager.is_known(one)])
        for group, error in failed.items():
            self._end(step, group, error)

    def _deliver(self, step: OpenStep, batch: Batch, tokens: Sequence[Choice]) -> None:
        """Give each request its token; what they have then is told as a whole, or not at all."""
        now = time.perf_counter()
        moved: dict[RequestGroup, None] = {}
        ended: list[RequestGroup] = []  # an answer of each
        for part, token in zip(batch.scheduled, tokens, strict=True):
            request = part.request
            request.num_read = request.sequence.num_computed_tokens
            if request.finish_reason is not None or not isinstance(token, SampledToken):
                continue
            try:
                request.append(token, now)
            except Exception as error:  # a tokenizer that cannot decode ends this request alone
                moved.pop(request.group, None)
                self._end(step, request.group, engine_error("the answer cannot be decoded", error))
                continue
            moved[request.group] = None
            if request.finish_reason is not None:
                self._scheduler.remove(request)
                ended.append(request.group)
        earlier = [r for r in step.results if r.error is not None or r.group not in moved]
        step.results, step.phase = [*earlier, *map(StepResult, moved)], Phase.DELIVERED
        for name in [group.request_id for group in ended if group.finished]:
            self._groups.pop(name, None)

    # What ends a request, or rolls a step back. All of it may be interrupted and called again.
    def _begin(self) -> OpenStep:
        """Begin a change; if interrupted before `_close_step`, the next call rolls it back."""
        if self._open and self._open[0].begun:
            self._roll_back(self._open[0])
        step = OpenStep(self.results, begun=True)
        self._open[:] = [step]
        return step

    def _close_step(self, step: OpenStep) -> None:
        """All is done; results that nobody was given yet wait for the next step."""
        self._open[:] = [OpenStep(step.results)] if step.results else []

    def _roll_back(self, step: OpenStep) -> None:
        """Nothing that the step was to fill can be found; its requests wait again or have ended."""
        self._runner.end_step()
        self.manager.fail_step()
        self._scheduler.restart(
            request for group in self._groups.values() for request in group.going_on()
        )
        self.adapters.restore()
        if self.tiers is not None:
            self.tiers.roll_back()
        if self.images is not None:
            self.images.cache.drop_wanted()
        if step.phase is Phase.CHANGING and not step.failed:  # interrupted before it was noted
            step.note_failure(EngineError("the step was interrupted"))
        for part in step.batch.scheduled if step.batch is not None else ():
            if part.request in step.failed:
                self._end(step, part.request.group, step.failed[part.request])
        for name in [name for name, group in self._groups.items() if group.finished]:
            del self._groups[name]

    def _end(self, step: OpenStep, group: RequestGroup, error: EngineError) -> None:
        """End what is left of a request with an error; told once."""
        if self._groups.get(group.request_id) is group:
            if all(result.group is not group for result in step.results):
                step.results.append(StepResult(group, error))
            self._leave(group, "error")

    def _leave(self, group: RequestGroup, reason: str) -> None:
        """The request is gone: out of the scheduler first, out of the table last."""
        for request in group.requests:
            if request.finish_reason is None:
                self._scheduler.remove(request)
                request.finish_reason = reason
        self._groups.pop(group.request_id, None)

    def _check(self) -> None:
        self.manager.check()
        if self.images is not None:
            self.images.cache.check()

    def require_open(self) -> None:
        """Raise EngineError after `close`."""
        if self._closed is not None:
            raise EngineError(self._closed)

    def close(self, reason: str = "the engine is closed") -> None:
        """Let go of requests, threads and K/V memory. Later calls, but not `close`, raise."""
        self._closed = self._closed or reason
        self._groups.clear()
        self._open.clear()
        self.adapters.close()
        if self.images is not None:
            self.images.cache.clear()
        if self.tiers is not None:
            self.tiers.close()
        self.model.detach()
        self._runner.close()
