"""Watches every request that the server answers: for metrics, explanations and advice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.cache import MissExplanation, Namespace
from headstart.server.cache.advice import Adviser, Explanation, PoolSize, advise_memory
from headstart.server.cache.traffic import Seen, Times, Traffics
from headstart.server.monitoring.metrics import Metrics

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestMetrics, RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.async_llm import AsyncLLM

__all__ = ["Watch"]

_MOST_REQUESTS = 200  # told to pages
_MOMENT = 0.02  # seconds; then those who were answered together have asked again
_MOST_ENDED = 1024  # whose notes wait to be taken


class _Answered(NamedTuple):
    """What is kept of a request that was answered."""

    request_id: str
    at: float  # `time.time`
    num_prompt: int
    num_cached: int
    num_generated: int
    first: float | None  # seconds to its first token
    missed: MissExplanation | None

    def describe(self) -> dict[str, Any]:
        """As it is told."""
        missed = self.missed
        return {
            "id": self.request_id,
            "time": round(self.at, 3),
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "generated_tokens": self.num_generated,
            "time_to_first_token": self.first,
            "missed": missed.reason.name.lower() if missed is not None else None,
            "why": str(missed) if missed is not None else None,
        }


class _Ended(NamedTuple):
    """A request that has its last token, and when that came."""

    request: RequestGroup
    output: RequestOutput
    since: float  # `time.monotonic`
    at: float  # `time.time`


class Watch:
    """Keeps what is told of requests later. May be used from several threads."""

    def __init__(self, llm: AsyncLLM, name: str, *, by_tenant: bool) -> None:
        """by_tenant: see `Traffics`."""
        self._tokenizer = llm.tokenizer
        self.decode = self._decode if llm.tokenizer is not None else None
        blocks = llm.num_blocks
        self._pool = PoolSize(blocks, llm.block_size, llm.kv_cache_bytes // blocks)
        self._lock = threading.Lock()
        self._ended: deque[_Ended] = deque()
        self._is_due = False
        self._traffics = Traffics(by_tenant=by_tenant)
        self._adviser = Adviser(self.decode, llm.block_size)
        self._recent: deque[_Answered] = deque(maxlen=_MOST_REQUESTS)
        self.metrics = Metrics(llm, name)

    def finished(self, request: RequestGroup, output: RequestOutput) -> None:
        """A request has its last token; of one that is not stored only counts are kept.

        For an event loop: a moment later a thread takes notes, which takes as long for a small
        model as some of its tokens, and whoever waits for the answer has it by then.
        """
        self._ended.append(_Ended(request, output, time.monotonic(), time.time()))
        if len(self._ended) > _MOST_ENDED:
            self._settle(1)
        if not self._is_due:
            self._is_due = True
            # In no call's context: one tenant's work in threads must not hold up all notes.
            loop = asyncio.get_running_loop()
            loop.call_later(_MOMENT, self._take_notes, context=Context())

    def _take_notes(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self.settle)

    def settle(self) -> None:
        """Take notes of all that have ended, which every other answer here begins with.

        Also where there are none: another thread may be taking those of the last one.
        """
        self._settle(max(1, len(self._ended)))

    def recent_prompts(self) -> list[Seen]:
        """The last prompts of all tenants that were stored."""
        self.settle()
        with self._lock:
            return [seen for tenant in self._traffics.recent for seen in tenant]

    def _settle(self, most: int) -> None:
        for _ in range(most):
            with self._lock:
                if not self._ended:
                    return
                self._note(self._ended.popleft())

    def _note(self, ended: _Ended) -> None:
        request, output, since, at = ended
        age, num_lost = None, 0
        if request.params.is_stored:
            seen = self._traffics.of(request.namespace.salt).add(
                output.request_id,
                request.namespace,
                output.prompt_token_ids,
                output.num_cached_tokens,
                output.why_missed,
                _ago(output.metrics, time.monotonic() - since),
                sum(len(answer.token_ids) for answer in output.outputs),
            )
            age, num_lost = _age(seen), seen.num_lost
        self.metrics.finished(request, output, age, num_lost)
        self._recent.append(
            _Answered(
                output.request_id,
                at,
                len(output.prompt_token_ids),
                output.num_cached_tokens,
                sum(len(answer.token_ids) for answer in output.outputs),
                output.metrics.time_to_first_token,
                output.why_missed,
            )
        )

    def cut_off(self, request: RequestGroup, reason: str) -> None:
        """A request ended without an answer: reason "abort", or "error"."""
        self.metrics.cut_off(request, reason)

    def explain(
        self, namespace: Namespace, token_ids: Sequence[int], missed: MissExplanation
    ) -> Explanation:
        """See `Adviser.explain`."""
        self.settle()
        with self._lock:
            traffic = self._traffics.of(namespace.salt)
            return self._adviser.explain(traffic, namespace, token_ids, missed)

    def advise(self) -> dict[str, Any]:
        """What would have saved most tokens of all prompts of late; see `Adviser.sum_up`."""
        self.settle()
        with self._lock:
            recent, forgotten = self._traffics.recent, self._traffics.forgotten
        prompts = [seen for tenant in recent for seen in tenant]
        memory = advise_memory(prompts, forgotten, self._pool)
        return self._adviser.sum_up(recent) | {"memory": memory}

    def advise_tenant(self, salt: str | None) -> dict[str, Any]:
        """Return the advice on the prompts of the tenant with this salt alone.

        `memory` is None because it would depend on other tenants' data.
        """
        self.settle()
        with self._lock:
            recent = self._traffics.of(salt).recent
        return self._adviser.sum_up([recent]) | {"memory": None}

    def recent_requests(self) -> list[dict[str, Any]]:
        """The last requests that were answered, oldest first: counts and times, no text."""
        self.settle()
        with self._lock:
            recent = list(self._recent)
        return [one.describe() for one in recent]

    def clear(self) -> None:
        """Forget the prompts of late."""
        self.settle()
        with self._lock:
            self._traffics.clear()

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(token_ids)))


def _ago(metrics: RequestMetrics, ended: float) -> Times:
    """When a request that ended so many seconds ago came, was admitted, had its first token."""
    spent = ended + (metrics.total or 0.0)
    return Times(
        spent, spent - (metrics.queue or 0.0), spent - (metrics.time_to_first_token or 0.0)
    )


def _age(seen: Seen) -> float | None:
    """Seconds since the prompt that this one hit came, None if it hit none."""
    if not seen.num_cached or seen.closest is None:
        return None
    return seen.times.came - seen.closest.seen.times.came
