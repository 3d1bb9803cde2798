"""Drafts from a text that the client expects as the answer."""

from collections.abc import Sequence

from headstart.cache import TokenSequence

_MATCH = 3  # tokens


class PredictionDrafter:
    """Drafts of the tokens of a predicted answer, in their order.

    Where the answer differs, drafts stop until its latest three tokens occur in the prediction, and
    continue after them. The next place is preferred to earlier ones.
    """

    def __init__(self, prediction: Sequence[int], num_prompt_tokens: int) -> None:
        """Draft an answer. num_prompt_tokens: tokens of the sequence before the answer."""
        self._prediction = _as_text(prediction)
        self._num_read = num_prompt_tokens
        self._latest = ""  # tokens of the answer
        self._position = 0  # of the next token in the prediction
        self._follows = True

    def propose(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        """Return up to `count` tokens that may follow the sequence's tokens; empty for none."""
        new = _as_text(sequence.token_ids[self._num_read :])
        self._num_read += len(new)
        self._latest = (self._latest + new)[-_MATCH:]
        if self._follows and self._prediction.startswith(new, self._position):
            self._position += len(new)
        else:
            self._follows = self._search()
        if not self._follows:
            return []
        return [ord(token) for token in self._prediction[self._position : self._position + count]]

    def _search(self) -> bool:
        """Move to the place after the answer's latest tokens; return False if there is none."""
        if len(self._latest) < _MATCH:
            return False
        place = self._prediction.find(self._latest, self._position)
        if place < 0:
            place = self._prediction.find(self._latest)
        if place >= 0:
            self._position = place + _MATCH
        return place >= 0


def _as_text(token_ids: Sequence[int]) -> str:
    """Return the tokens as characters of a string, which is searched fast."""
    return "".join(map(chr, token_ids))
