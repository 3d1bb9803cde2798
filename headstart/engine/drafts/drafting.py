"""Drafts: tokens that probably follow, which one step verifies together.

Decoding is memory-bound: a step reads all weights, for one row or for several. A drafted token
is accepted if the sampler chooses it from the logits before it. So the answer, its distribution and
the random numbers of each token are the same with and without drafts.

These are the sources of a request's drafts:

    the answer that the client expects
    the tree of cached prefixes     an earlier request of the tenant had the same tokens
    the tiers                       an earlier process stored the reply to the same prompt
    the request's own tokens        the latest two tokens have occurred before
    another request's tokens        both requests share a prefix and then differ, as after an edit

They are tried in this order, until a draft is expected to raise the step's tokens per second. A
draft of k tokens, each right with probability p, gives 1 + p + p^2 + ... + p^k tokens on average
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023). But each
drafted token adds a row, and rows make the step longer for all of its requests. So the draft gets
the length that gives the most tokens per second. The estimate uses the measured acceptance of the
source's drafts, in this request and in the tenant's earlier requests, and the measured seconds of
steps by number of rows (`RowCost`).
"""

from collections import deque
from collections.abc import Sequence

from headstart.cache import KVCacheManager, Namespace
from headstart.engine.config import EngineConfig
from headstart.engine.drafts.drafters import (
    AnswerDrafter,
    Drafter,
    DraftSource,
    RepetitionDrafter,
    TreeDrafter,
)
from headstart.engine.request import Request
from headstart.engine.step import Batch

_SHARED = 40  # tokens; a shorter prefix is attended to separately by each request
_EARLIER = 2048  # tokens of another request that drafts are taken from
# Draft lengths. With the last token, a request has 2, 4, 8 or 16 rows: the sizes of `RowCost`.
_LENGTHS = (1, 3, 7, 15)
# If several requests run, a draft must raise the tokens per second by this factor. A smaller gain
# is lost later: requests with drafts finish first, and the steps of the remaining requests take
# almost as long as before.
_GAIN = 1.1
_MAX_ACCEPTANCE = 0.97  # highest expected acceptance; `expect_accepted` needs less than 1
# Expected acceptance of a tenant's first drafts. Later requests start with a decaying average of
# the acceptance that earlier requests measured.
_PRIORS: dict[type[Drafter], float] = {
    AnswerDrafter: 0.9,
    TreeDrafter: 0.9,
    RepetitionDrafter: 0.6,
}
_SMOOTHING = 0.2  # weight of the latest request in this average
_MAX_AVERAGES = 4096  # averages that are kept; those that were updated longest ago are removed


class RowCost:
    """Seconds of a decoding step by its number of rows, measured while the engine runs.

    The sizes 1, 2, 4, 8, ... have an estimate each. Between two sizes, the estimate is
    interpolated. A measured step counts for the nearest size. The estimate of a size is the
    shortest of its last eight steps, because other work on the machine only makes steps longer.
    Each size is estimated to take at least as long as the next smaller size, and at most twice as
    long, because two steps of the smaller size would compute as many rows.

    A size with fewer than three measured steps is estimated at 1.25 times the next smaller size.
    This ratio is usual if reading the weights takes most of a step. So drafts are tried at first,
    and then the measured steps decide. Every 512 steps, the measured steps of all sizes above the
    latest step's size are removed, because the contexts or the machine's load may have changed.
    """

    _PRIOR = 1.25  # expected ratio of a size's seconds to those of the next smaller size
    _NUM_SIZES = 20
    _MIN_STEPS = 3  # measured steps; the first step of a size may take much longer
    _NUM_STEPS = 512  # steps until the measured steps of larger sizes are removed

    def __init__(self) -> None:
        self._estimates = [self._PRIOR**size for size in range(self._NUM_SIZES)]
        self._recent: dict[int, deque[float]] = {}
        self._num_steps = 0

    def note(self, rows: int, seconds: float) -> None:
        """Record the seconds of a step that only decodes."""
        current = (2 * rows // 3).bit_length()
        recent = self._recent.setdefault(current, deque(maxlen=8))
        shortest = min(recent, default=0.0)
        recent.append(seconds)
        self._num_steps += 1
        if self._num_steps % self._NUM_STEPS == 0:
            self._recent = {size: r for size, r in self._recent.items() if size <= current}
        elif len(recent) > self._MIN_STEPS and min(recent) == shortest:
            return  # the estimates stay the same
        smallest = min(self._recent)
        estimate = min(self._recent[smallest]) / self._PRIOR ** (smallest + 1)
        for size in range(self._NUM_SIZES):
            low, high, estimate = estimate, 2 * estimate, self._PRIOR * estimate
            if size > smallest and len(self._recent.get(size, ())) >= self._MIN_STEPS:
                estimate = max(low, min(high, *self._recent[size]))
            self._estimates[size] = estimate

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a decoding step with this many rows."""
        size = (rows - 1).bit_length()
        estimate, share = self._estimates[size], (1 << size) - rows
        if not share:
            return estimate
        return estimate - (estimate - self._estimates[size - 1]) * share / (1 << size - 1)


class Drafting:
    """The drafts of an engine's requests.

    num_drafts: verified drafts of all requests. num_drafted, num_accepted: drafted and accepted
    tokens. accepted_by_position: accepted tokens by their position in a draft.
    """

    def __init__(self, manager: KVCacheManager, config: EngineConfig, max_model_len: int) -> None:
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.accepted_by_position = [0] * config.max_draft
        self.row_cost = RowCost()
        self._manager = manager
        self._max_tokens = config.max_draft
        self._max_model_len = max_model_len
        # Attention over a shared prefix is computed for a group of rows. Its results round
        # differently from those of a single row. Drafts change the groups and depend on measured
        # times, so the same batch could give different answers. Therefore "auto" drafts nothing in
        # a step whose requests share a prefix.
        shares = config.share_attention and not config.deterministic
        self._excludes_shared = shares and config.speculation == "auto"
        self._num_rows = 0  # rows of the next step, with the drafts so far
        self._num_tokens = 0.0  # tokens that the next step is expected to give
        self._gain = 1.0  # factor by which a draft must raise the tokens per second
        self._may_gain = False  # True if a draft may raise the next step's tokens per second
        # Average acceptance by kind of drafter. Each namespace has its own, so that the speed of a
        # tenant's requests reveals nothing about other tenants.
        self._averages: dict[tuple[Namespace, type[Drafter]], float] = {}

    def begin_step(self, running: Sequence[Request]) -> None:
        """Prepare drafts for a step. running: its requests, with one row each before drafts."""
        self._num_rows, self._num_tokens = len(running), len(running)
        self._gain = _GAIN if len(running) > 1 else 1.0
        self._may_gain = self._choose_length(_MAX_ACCEPTANCE, self._max_tokens) > 0
        if self._may_gain and self._excludes_shared:
            sequences = [request.sequence for request in running]
            self._may_gain = not self._manager.share_prefix(sequences, _SHARED)

    def propose(self, request: Request, budget: int) -> Sequence[int]:
        """Return a decoding request's draft. budget: tokens that the step may still compute."""
        if not self._may_gain:
            return ()
        sequence, params = request.sequence, request.group.params
        limit = min(budget, self._max_tokens, self._max_model_len - len(sequence.token_ids))
        if params.max_tokens is not None:  # a step gives one more token than it drafts
            limit = min(limit, params.max_tokens - len(request.sampling.output_token_ids) - 1)
        if limit <= 0:
            return ()
        for source in request.drafts or self._add_sources(request):
            tokens = source.propose(sequence, limit)
            count = self._choose_length(source.acceptance, len(tokens)) if tokens else 0
            if count:
                self._num_rows += count
                self._num_tokens += expect_accepted(source.acceptance, count)
                return tuple(tokens[:count])
        return ()

    def _add_sources(self, request: Request) -> list[DraftSource]:
        group = request.group
        num_prompt_tokens = len(group.prompt_token_ids)
        drafters: list[Drafter] = [TreeDrafter(self._manager)]
        if group.prediction:
            drafters.insert(0, AnswerDrafter(group.prediction, num_prompt_tokens))
        if group.reply is not None:
            drafters.append(AnswerDrafter(group.reply.tokens, num_prompt_tokens))
        earlier = self._manager.branch(request.sequence, _EARLIER)
        drafters.append(RepetitionDrafter(earlier))
        for drafter in drafters:
            kind = type(drafter)
            prior = self._averages.get((group.namespace, kind), _PRIORS[kind])
            request.drafts.append(DraftSource(drafter, prior))
        return request.drafts

    def end(self, request: Request) -> None:
        """Remove the sources of a request that ended, and learn from their acceptance."""
        for source in request.drafts:
            source.measure(request.sequence)
            if not source.num_compared:
                continue
            key = request.group.namespace, type(source.drafter)
            average = self._averages.pop(key, source.prior)
            average += _SMOOTHING * (source.overall_acceptance - average)
            self._averages[key] = min(_MAX_ACCEPTANCE, average)
        while len(self._averages) > _MAX_AVERAGES:
            del self._averages[next(iter(self._averages))]
        request.drafts.clear()  # megabytes for a long prompt; the caller may retain the request

    def _choose_length(self, acceptance: float, limit: int) -> int:
        """Return the draft length that gives the most tokens per second; 0 for no draft."""
        best, best_rate = 0, self._gain * self._num_tokens / self.row_cost.seconds(self._num_rows)
        for length in _LENGTHS:
            count = min(length, limit)
            tokens = self._num_tokens + expect_accepted(acceptance, count)
            rate = tokens / self.row_cost.seconds(self._num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
            if count == limit:
                break
        return best

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Count a verified draft and its accepted tokens."""
        request.num_drafted += drafted
        request.num_accepted += accepted
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def measure(self, batch: Batch, seconds: float) -> None:
        """Record the seconds of a step if it only decodes."""
        if all(part.stop - part.start == 1 for part in batch.scheduled):
            self.row_cost.note(batch.num_tokens, seconds)


def expect_accepted(acceptance: float, count: int) -> float:
    """Return how many of `count` drafted tokens are accepted on average.

    >>> expect_accepted(0.5, 3)
    0.875
    """
    return acceptance * (1 - acceptance**count) / (1 - acceptance)
