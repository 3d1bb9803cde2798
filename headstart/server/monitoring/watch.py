"""Records of every request that the server answers: for metrics, explanations and advice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.cache import MissExplanation, Namespace
from headstart.server.cache.advice import Adviser, PoolSize, advise_memory
from headstart.server.cache.traffic import Seen, Times, Traffics
from headstart.server.monitoring.metrics import Metrics

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.server.tenants import Tenant

_MOST_REQUESTS = 200  # shown on the page
_MOMENT = 0.02  # seconds; by then, clients that were answered together have sent new requests
_MOST_ENDED = 1024  # requests that wait to be recorded


class _Ended(NamedTuple):
    """A request that ended, its last output or else the reason, and when."""

    request: RequestGroup
    output: RequestOutput | str
    since: float  # `time.monotonic`
    time: float  # `time.time`


class Watch:
    """Records requests when they have ended, in a thread. Thread-safe."""

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
        self._recent: deque[dict[str, Any]] = deque(maxlen=_MOST_REQUESTS)
        self.metrics = Metrics(llm, name)

    def ended(self, request: RequestGroup, output: RequestOutput | str) -> None:
        """Record a request a moment later; only its counts if it is not to be stored.

        output: the last one; "abort" or "error" if there is no answer. For the event loop: a thread
        records, which takes as long as some tokens of a small model.
        """
        self._ended.append(_Ended(request, output, time.monotonic(), time.time()))
        if len(self._ended) > _MOST_ENDED:
            self._settle(1)
        if not self._is_due:
            self._is_due = True
            # Outside the context of a call: the threads of one tenant must not delay all records.
            loop = asyncio.get_running_loop()
            loop.call_later(_MOMENT, self._take_notes, context=Context())

    def _take_notes(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self.settle)

    def settle(self) -> None:
        """Record all requests that have ended; every method that reads calls it first.

        Takes the lock also if none is left: another thread may be recording the last one.
        """
        self._settle(max(1, len(self._ended)))

    def _settle(self, most: int) -> None:
        for _ in range(most):
            with self._lock:
                if not self._ended:
                    return
                self._record(*self._ended.popleft())

    def _record(
        self, request: RequestGroup, output: RequestOutput | str, since: float, ended: float
    ) -> None:
        if isinstance(output, str):
            self.metrics.cut_off(request, output)
            return
        metrics, missed = output.metrics, output.why_missed
        num_generated = sum(len(answer.token_ids) for answer in output.outputs)
        age, num_lost = None, 0
        if request.params.is_stored:
            came = time.monotonic() - since + (metrics.total or 0.0)
            first = metrics.time_to_first_token
            seen = self._traffics.of(request.namespace.salt).add(
                output.request_id,
                request.namespace,
                output.prompt_token_ids,
                output.num_cached_tokens,
                missed,
                Times(came, came - (metrics.queue or 0.0), came - (first or 0.0)),
                num_generated,
            )
            num_lost = seen.num_lost
            if seen.num_cached and seen.closest is not None:
                age = seen.times.came - seen.closest.seen.times.came
        self.metrics.finished(request, output, age, num_lost)
        self._recent.append(
            {
                "id": output.request_id,
                "time": round(ended, 3),
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens,
                "generated_tokens": num_generated,
                "time_to_first_token": metrics.time_to_first_token,
                "missed": missed.reason.name.lower() if missed is not None else None,
                "why": str(missed) if missed is not None else None,
            }
        )

    def explain(
        self, namespace: Namespace, token_ids: Sequence[int], missed: MissExplanation
    ) -> dict[str, Any]:
        """Return `Adviser.explain` for a prompt."""
        self.settle()
        with self._lock:
            traffic = self._traffics.of(namespace.salt)
            return self._adviser.explain(traffic, namespace, token_ids, missed)

    def advise(self, tenant: Tenant) -> dict[str, Any]:
        """Return what would have saved most tokens of recent prompts; see `Adviser.sum_up`.

        An administrator sees the prompts of all tenants, and `memory`; for any other tenant it is
        None, because it would depend on the data of others.
        """
        self.settle()
        with self._lock:
            recent, forgotten = self._traffics.recent, self._traffics.forgotten
            if not tenant.is_admin:
                recent = [self._traffics.of(tenant.salt).recent]
        memory = None
        if tenant.is_admin:
            memory = advise_memory([seen for own in recent for seen in own], forgotten, self._pool)
        return self._adviser.sum_up(recent) | {"memory": memory}

    def recent_prompts(self) -> list[Seen]:
        """Return the recent prompts of all tenants that were stored."""
        self.settle()
        with self._lock:
            return [seen for tenant in self._traffics.recent for seen in tenant]

    def recent_requests(self) -> list[dict[str, Any]]:
        """Return the last answered requests, oldest first: counts and times, no text."""
        self.settle()
        with self._lock:
            return list(self._recent)

    def clear(self) -> None:
        """Forget the recent prompts."""
        self.settle()
        with self._lock:
            self._traffics.clear()

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(token_ids)))
