"""Drafts: tokens that probably follow, which one step verifies together.

Decoding is limited by memory: a step reads all weights, for one row or for several. A drafted token
is accepted if the sampler chooses it from the logits before it. So the answer, its distribution and
the random numbers of each token are the same with and without drafts.

Drafts come from the first of these sources with a draft that pays: the answer that the client
expects; the tree of cached prefixes, in which an earlier request of the tenant continues the same
tokens; the reply that the tiers have from an earlier process; the request's own tokens, in which
the latest three may have occurred before; and the latest request that branched off from the same
prefix, such as the answer before an edit.

A draft of k tokens, each right with probability p, gives 1 + p + p^2 + ... + p^k tokens on average
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023). Each is a
row, and rows make the step longer for all of its requests. So a request's draft has the length with
which the step gives most tokens per second, by the measured acceptance of the request's drafts and
the measured seconds of a step by its rows. If every draft would give fewer, nothing is drafted.
"""

from collections import deque
from collections.abc import Sequence

from headstart.cache import KVCacheManager
from headstart.engine.config import EngineConfig
from headstart.engine.drafts.drafters import (
    AnswerDrafter,
    Drafter,
    RepetitionDrafter,
    Source,
    TreeDrafter,
)
from headstart.engine.request import Request
from headstart.engine.step import Batch

_SHARED = 40  # tokens; requests with fewer in common do not attend to them together
_EARLIER = 2048  # tokens of another request that drafts are taken from
_LENGTHS = (1, 3, 7, 15)  # with its own token, a request has as many rows as a size of `RowCost`
# The least gain of a draft if several requests run. When the requests that draft have finished, the
# others share steps that take almost as long as before.
_GAIN = 1.1
_LIKELIEST = 0.97  # the highest acceptance that is expected of any draft
_OF_ANSWERS, _OF_REPETITIONS = 0.9, 0.6  # acceptances that are expected of a new request's drafts


class RowCost:
    """Seconds of a decoding step by its number of rows, measured while the engine runs.

    The sizes 1, 2, 4, 8, ... have an estimate each; between two sizes it is interpolated, and a
    step is measured for the nearest size. An estimate is the shortest of the last eight steps,
    since other work on the machine only makes a step longer. It is at least that of the next
    smaller size and at most twice as much, which two steps would take. A size with fewer than three
    steps is expected to take a quarter more than the next smaller one, as usual while a step's time
    is that of reading the weights. So drafts are tried, and the measured steps then decide. From
    time to time larger sizes than the current one are forgotten and tried again, since the
    contexts, or the load of the machine, may have changed.
    """

    _PRIOR = 1.25  # of a size to the next smaller one
    _NUM_SIZES = 20
    _LEAST = 3  # steps; the first of a size may take much longer
    _NUM_STEPS = 512  # until larger sizes are forgotten

    def __init__(self) -> None:
        self._estimates = [self._PRIOR**size for size in range(self._NUM_SIZES)]
        self._recent: dict[int, deque[float]] = {}
        self._num_steps = 0

    def note(self, rows: int, seconds: float) -> None:
        """Note the seconds of a step that only decodes."""
        current = (2 * rows // 3).bit_length()
        self._recent.setdefault(current, deque(maxlen=8)).append(seconds)
        self._num_steps += 1
        if self._num_steps % self._NUM_STEPS == 0:
            self._recent = {size: r for size, r in self._recent.items() if size <= current}
        smallest = min(self._recent)
        estimate = min(self._recent[smallest]) / self._PRIOR ** (smallest + 1)
        for size in range(self._NUM_SIZES):
            low, high, estimate = estimate, 2 * estimate, self._PRIOR * estimate
            if size > smallest and len(self._recent.get(size, ())) >= self._LEAST:
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

    num_drafts: of all requests; num_drafted and num_accepted: their tokens. accepted_by_position:
    accepted tokens by their position in a draft.
    """

    def __init__(self, manager: KVCacheManager, config: EngineConfig, max_model_len: int) -> None:
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.accepted_by_position = [0] * config.max_draft
        self.row_cost = RowCost()
        self._manager = manager
        self._max_tokens = config.max_draft
        self._max_model_len = max_model_len
        # A row that is attended to alone rounds differently from one in a group. Since measured
        # times decide which rows are drafted, the same batch would give different answers.
        shares = config.share_attention and not config.deterministic
        self._avoids_sharing = shares and config.speculation == "auto"
        self._num_rows = 0  # of the next step, with the drafts so far
        self._num_tokens = 0.0  # that the next step is expected to give
        self._gain = 1.0  # the least gain of a draft
        self._pays = False

    def begin_step(self, running: Sequence[Request]) -> None:
        """Begin the drafts of a step. running: the requests that get a token."""
        self._num_rows, self._num_tokens = len(running), len(running)
        self._gain = _GAIN if len(running) > 1 else 1.0
        self._pays = self._choose_length(_LIKELIEST, self._max_tokens) > 0
        if self._pays and self._avoids_sharing:
            sequences = [request.sequence for request in running]
            self._pays = not self._manager.share_prefix(sequences, _SHARED)

    def propose(self, request: Request, budget: int) -> Sequence[int]:
        """Return a decoding request's draft. budget: tokens that the step may still compute."""
        if not self._pays:
            return ()
        sequence, params = request.sequence, request.group.params
        limit = min(budget, self._max_tokens, self._max_model_len - len(sequence.token_ids))
        if params.max_tokens is not None:  # the last token needs no K/V
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

    def _add_sources(self, request: Request) -> list[Source]:
        group = request.group
        num_prompt_tokens = len(group.prompt_token_ids)
        drafters: list[Drafter] = [TreeDrafter(self._manager)]
        if group.prediction:
            drafters.insert(0, AnswerDrafter(group.prediction, num_prompt_tokens))
        if group.reply is not None:
            drafters.append(AnswerDrafter(group.reply.tokens, num_prompt_tokens))
        request.drafts = [Source(drafter, _OF_ANSWERS) for drafter in drafters]
        earlier = self._manager.branch(request.sequence, _EARLIER)
        request.drafts.append(Source(RepetitionDrafter(earlier), _OF_REPETITIONS))
        return request.drafts

    def _choose_length(self, acceptance: float, limit: int) -> int:
        """Return the length of a draft with which the step gives most tokens per second."""
        best, most = 0, self._gain * self._num_tokens / self.row_cost.seconds(self._num_rows)
        for length in _LENGTHS:
            count = min(length, limit)
            tokens = self._num_tokens + expect_accepted(acceptance, count)
            rate = tokens / self.row_cost.seconds(self._num_rows + count)
            if rate > most:
                best, most = count, rate
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
        """Note the seconds of a step, if it only decodes."""
        if all(part.stop - part.start == 1 for part in batch.scheduled):
            self.row_cost.note(batch.num_tokens, seconds)


def expect_accepted(acceptance: float, count: int) -> float:
    """Return how many of `count` drafted tokens are accepted on average.

    >>> expect_accepted(0.5, 3)
    0.875
    """
    return acceptance * (1 - acceptance**count) / (1 - acceptance)
