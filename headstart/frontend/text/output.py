"""An answer's text as it grows, and when it ends.

An answer ends with the end of the text or a stop id (not part of the text), before a stop
string, or when it is as long as it may be. Text that could still turn out to begin a stop
string is held back until that is decided.
"""

from headstart.engine.params import SamplingParams
from headstart.frontend.text.detokenizer import Detokenizer


class OutputText:
    """One answer's text. `stop_reason` is the stop string or id.

    Tokens are decoded when the text is read, all at once if that is at the end; where a stop
    string could end the answer, as they come. max_total_tokens: how long prompt and answer may
    be together.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        max_total_tokens: int,
    ) -> None:
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._stops = params.stop_strings
        self._longest_stop = max(map(len, self._stops), default=0)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._ends = self._stop_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._max_total_tokens = max_total_tokens
        self._unread: list[int] = []  # tokens that are not decoded yet
        self._all = ""  # what is decoded, with what is held back
        self._num_tokens = 0
        self._ended = False  # no more tokens come
        self._whole = False  # nor is anything left to decode

    def push(self, token_id: int, total_tokens: int) -> str | None:
        """Take a token; the finish reason if it was the last, "stop" or "length".

        total_tokens: length of prompt and answer, this token included.
        """
        self._num_tokens += 1
        enough = self._num_tokens >= self._min_tokens
        if enough and token_id in self._ends:
            return self._end(token_id)
        self._unread.append(token_id)
        if self._stops and self._stops_now(enough):
            return "stop"
        if total_tokens >= self._max_total_tokens or self._num_tokens == self._max_tokens:
            self._ended = True
            return "length"
        return None

    def end(self) -> None:
        """The answer is complete with the tokens that it has."""
        self._ended = True

    @property
    def text(self) -> str:
        """The text that may be shown by now."""
        if self._ended:
            if not self._whole:
                self._all += self._detokenizer.finish(self._unread)
                self._whole = True
            return self._all
        self._decode()
        return self._all[: len(self._all) - self._undecided()]

    def _decode(self) -> None:
        """One by one: a character that is not whole yet keeps back none before it."""
        for token_id in self._unread:
            self._all += self._detokenizer.push(token_id)
        self._unread.clear()

    def _end(self, token_id: int) -> str:
        if token_id in self._stop_ids:
            self.stop_reason = token_id
            if self._keep_stop:
                self._unread.append(token_id)
        self._ended = True
        return "stop"

    def _stops_now(self, enough: bool) -> bool:
        seen = len(self._all)
        self._decode()
        return enough and self._find_stop(seen)

    def _find_stop(self, seen: int) -> bool:
        """True if a stop string ends in the text after `seen`; the first to begin counts."""
        found = [(self._all.find(stop, max(0, seen - len(stop) + 1)), stop) for stop in self._stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return False
        at, stop = min(hits, key=lambda hit: hit[0])
        self.stop_reason = stop
        self._all = self._all[: at + len(stop) * self._keep_stop]
        self._ended = self._whole = True
        return True

    def _undecided(self) -> int:
        """Characters at the end that are the beginning of a stop string."""
        for count in range(min(self._longest_stop - 1, len(self._all)), 0, -1):
            if any(stop.startswith(self._all[-count:]) for stop in self._stops):
                return count
        return 0
