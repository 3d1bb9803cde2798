"""Keeps an answer within a grammar: masks the tokens that cannot come next."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headstart.engine.logits.protocol import Failures, Rows, TokenMask
from headstart.errors import NoTokenError
from headstart.frontend.structured.grammar import TokenMasks, explain

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarMask"]


class GrammarMask(TokenMask):
    """One answer's place in its grammar. Applied last, so no other processor allows more.

    end_ids: tokens that end the answer where the grammar is satisfied and may go on; where nothing
    else may follow, the model's own end it. special: whether the grammar may name special tokens.
    """

    rank = 4

    def __init__(
        self, matcher: "LLMatcher", masks: TokenMasks, end_ids: Iterable[int], *, special: bool
    ) -> None:
        self._matcher = matcher
        self._masks = masks
        self._ends = masks.pack(end_ids)
        barred = masks.pack(masks.tokenizer.eos_tokens)
        self._spellable = ~(barred if special else barred | masks.special)
        self.complete = False

    @classmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        """Mask all rows; the matchers' masks are computed in parallel."""
        masks: TokenMasks = rows[0][1]._masks
        computed = masks.compute([one._matcher for _, one in rows])
        failed: Failures = {}
        for (row, one), mask in zip(rows, computed, strict=True):
            if one._matcher.is_error():
                failed[row] = NoTokenError(
                    "structured_outputs could not be followed to the answer's end: "
                    f"{explain(one._matcher.get_error())}"
                )
            one._finish(mask)
            allowed[row] &= mask[: allowed.shape[1]]
        return failed

    def accept(self, token_id: int) -> None:
        """Move on by a token. An error of the matcher is told with the next mask."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()

    def _finish(self, mask: np.ndarray) -> None:
        """Put the answer's own ends where llguidance has the tokenizer's."""
        place, bit = divmod(self._masks.end_bit, 8)
        may_end = mask[place] >> bit & 1
        np.bitwise_and(mask, self._spellable, out=mask)
        self.complete = not mask.any()
        if may_end:
            mask |= self._masks.ends if self.complete else self._ends
