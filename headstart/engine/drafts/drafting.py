"""Drafts: tokens that probably follow, which one step verifies together.

Decoding is limited by memory: a step reads all weights, for one row or for several. A drafted token
is accepted if the sampler chooses it from the logits before it. So the answer, its distribution and
the random numbers of each token are the same with and without drafts.

Drafts come from the first of these sources that has any: the answer that the client predicts; the
tree of cached prefixes, which has what followed the same tokens in an earlier request of the
tenant; the reply that the tiers have from an earlier process; the request's own tokens, which may
have what followed the latest three before; and the latest request that branched off from the same
prefix, such as the answer before an edit. A request's drafts become longer while they are accepted,
and rarer while they are not.
"""

from collections.abc import Sequence

from headstart.cache import KVCacheManager
from headstart.engine.drafts.drafters import DraftLength
from headstart.engine.request import Request

_EARLIER = 2048  # tokens of another request that drafts are taken from
_ROWS = 16  # of all decoding requests together; a step with more costs notably more


class Drafting:
    """The drafts of an engine's requests.

    num_drafts: of all requests; num_drafted and num_accepted: their tokens. accepted_by_position:
    accepted tokens by their position in a draft.
    """

    def __init__(self, manager: KVCacheManager, max_tokens: int, max_model_len: int) -> None:
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.accepted_by_position = [0] * max_tokens
        self._manager = manager
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len

    def propose(self, request: Request, budget: int, num_running: int) -> tuple[int, ...]:
        """Return a decoding request's draft. budget: tokens that the step may still compute."""
        sequence, params = request.sequence, request.group.params
        output, reply = request.sampling.output_token_ids, request.group.reply
        if request.drafts is None:
            earlier = self._manager.branch(sequence, _EARLIER)
            request.drafts = DraftLength(earlier or (reply.tokens if reply is not None else ()))
        limit = self._max_model_len - len(sequence.token_ids)
        if params.max_tokens is not None:  # the last token needs no K/V
            limit = min(limit, params.max_tokens - len(output) - 1)
        limit = min(limit, budget, self._max_tokens, _ROWS // num_running - 1)
        if limit <= 0:
            return ()
        count = min(limit, request.drafts.next())
        if not count:
            return ()
        tokens: Sequence[int] = ()
        if request.prediction is not None:
            tokens = request.prediction.propose(sequence, count)
        tokens = tokens or self._manager.draft(sequence, count)
        if not tokens and reply is not None:
            tokens = reply.propose(output, count)
        return tuple(tokens or request.drafts.repetition.propose(sequence, count))

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Note how many tokens of a request's draft were accepted."""
        assert request.drafts is not None
        request.drafts.verified(drafted, accepted)
        request.num_drafted += drafted
        request.num_accepted += accepted
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        for position in range(accepted):
            self.accepted_by_position[position] += 1
