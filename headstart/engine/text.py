"""An answer's text as it grows, and when it ends.

An answer ends with the end of the text or a stop id (not part of the text), before a stop
string, or when it is as long as it may be. Text that could still turn out to begin a stop
string is held back until that is decided.
"""

from headstart.engine.detokenizer import Detokenizer
from headstart.engine.params import SamplingParams


class OutputText:
    """One answer's text. `text` is what may be shown; `stop_reason` the stop string or id.

    max_total_tokens: how long prompt and answer may be together.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        max_total_tokens: int,
    ) -> None:
        self.text = ""
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._params = params
        self._stops = params.stop_strings
        self._longest_stop = max(map(len, self._stops), default=0)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._max_total_tokens = max_total_tokens
        self._all = ""  # with what is held back
        self._num_tokens = 0

    def push(self, token_id: int, total_tokens: int) -> str | None:
        """Take a token; the finish reason if it was the last, "stop" or "length".

        total_tokens: length of prompt and answer, this token included.
        """
        self._num_tokens += 1
        enough = self._num_tokens >= self._params.min_tokens
        if enough and (token_id in self._stop_ids or token_id in self._eos):
            return self._end(token_id)
        seen = len(self._all)
        self._all += self._detokenizer.push(token_id)
        if enough and self._find_stop(seen):
            return "stop"
        limit = self._params.max_tokens
        if total_tokens >= self._max_total_tokens or self._num_tokens == limit:
            self.text = self._all + self._detokenizer.finish()
            return "length"
        self.text = self._all[: len(self._all) - self._undecided()]
        return None

    def _end(self, token_id: int) -> str:
        if token_id in self._stop_ids:
            self.stop_reason = token_id
            if self._params.include_stop_str_in_output:
                self._all += self._detokenizer.push(token_id)
        self.text = self._all + self._detokenizer.finish()
        return "stop"

    def _find_stop(self, seen: int) -> bool:
        """Whether a stop string ends in the text after `seen`; the first to begin counts."""
        found = [(self._all.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self._stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return False
        at, stop = min(hits, key=lambda hit: hit[0])
        self.stop_reason = stop
        self.text = self._all[: at + len(stop) * self._params.include_stop_str_in_output]
        return True

    def _undecided(self) -> int:
        """Characters at the end that are the beginning of a stop string."""
        for count in range(min(self._longest_stop - 1, len(self._all)), 0, -1):
            if any(stop.startswith(self._all[-count:]) for stop in self._stops):
                return count
        return 0
