"""Why prompts missed, in words, and what would have helped most over the traffic of late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headstart.cache import MissExplanation, MissReason, Namespace
from headstart.server.cache.difference import (
    ENDS,
    OTHER,
    PASSAGES,
    Difference,
    describe_difference,
    find_remedy,
)
from headstart.server.cache.traffic import Closest, Seen, Tokens, Traffic, count_again

__all__ = ["Adviser", "Explanation"]

_BEFORE, _AFTER = 64, 512  # tokens shown to `describe_difference`
_MOST_FORKS = 10
_LONGEST_WORD = 16  # tokens
_NUMBERED, _HEAD, _MOVED = 8, 40, 64  # tokens: a passage's number and head, and how far it moved


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hits what it does.

    num_common: tokens that the closest earlier prompt shares with it. seconds_ago: since that
    one came. difference: where the two part; None where one is the other's beginning, or where
    texts are not to be told.
    """

    missed: MissExplanation
    text: str
    closest_id: str | None = None
    num_common: int = 0
    seconds_ago: float | None = None
    difference: Difference | None = None


class Adviser:
    """Explains misses by the prompts that came before."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, block_size: int) -> None:
        self._decode = decode
        self._block_size = block_size

    def explain(
        self,
        traffic: Traffic,
        namespace: Namespace,
        token_ids: Sequence[int],
        missed: MissExplanation,
    ) -> Explanation:
        """Why a prompt would hit as much as `missed` says, and not more."""
        tokens = np.asarray(token_ids, np.int32)
        closest = traffic.closest(namespace, tokens)
        if closest is None or not closest.num_common:
            if missed.reason is MissReason.SALT:  # of which no prompts are compared
                return Explanation(missed, str(missed))
            return Explanation(missed, f"{missed}; no answered prompt begins like this one")
        now = traffic.now()
        seconds = now - closest.seen.times.came
        told = f"the closest earlier prompt came {_ago(seconds)} and has the first "
        told += f"{closest.num_common:,} of {len(tokens):,} tokens in common"
        difference = None
        if closest.num_common < len(tokens):
            difference = self._difference(tokens, closest)
        lost = closest.num_lost(missed.position, missed, now)
        if lost >= self._block_size:
            missed = MissExplanation(MissReason.EVICTED, missed.position)
            told += f"; since then {lost:,} of these were evicted"
        elif difference is not None and difference.looks_like != ENDS:
            told += f"; what differs there looks like {difference.looks_like}"
        return Explanation(
            missed,
            f"{missed}; {told}",
            closest.seen.request_id,
            closest.num_common,
            round(seconds, 1),
            difference,
        )

    def _difference(self, tokens: Tokens, closest: Closest) -> Difference | None:
        if self._decode is None:
            return None
        at = closest.num_common
        before = self._decode(tokens[max(0, at - _BEFORE) : at].tolist())
        here, there = (
            # With the tokens in front, since a token's text may depend on its neighbour.
            self._decode(one[max(0, at - _BEFORE) : at + _AFTER].tolist())[len(before) :]
            for one in (tokens, closest.seen.tokens)
        )
        difference = describe_difference(before, here, there)
        if difference.looks_like == OTHER and _is_swapped(tokens[at:], closest.seen.tokens[at:]):
            difference = replace(difference, looks_like=PASSAGES)
        return difference

    def sum_up(self, recent: Sequence[Sequence[Seen]]) -> dict[str, Any]:
        """What would have saved most tokens of each tenant's prompts, oldest first.

        What parts a tenant's prompts at the same word is one cause, whatever their salts.
        """
        forks: dict[tuple[Any, ...], list[Seen]] = defaultdict(list)
        all_seen = [(place, seen) for place, those in enumerate(recent) for seen in those]
        for place, seen in all_seen:
            if seen.num_lost < self._block_size and seen.num_again and seen.closest is not None:
                head = seen.tokens[: self._word_begins(seen.tokens, seen.closest.num_common)]
                forks[place, seen.namespace.adapter, head.tobytes()].append(seen)
        again = [those for those in forks.values() if len(those) > 1]
        # Once is no habit; where there is none, it is told all the same, as what came once.
        told = again or list(forks.values())
        told.sort(key=lambda those: -sum(one.num_again for one in those))
        return {
            "prompts": len(all_seen),
            "prompt_tokens": sum(len(seen.tokens) for _, seen in all_seen),
            "cached_tokens": sum(seen.num_cached for _, seen in all_seen),
            "forks": [self._describe_fork(those) for those in told[:_MOST_FORKS]],
            "salts": [advice for seen in recent if (advice := _describe_salts(seen)) is not None],
        }

    def _word_begins(self, tokens: Tokens, at: int) -> int:
        """Where the word begins whose token `at` differs; `at` itself if no space is near.

        Prompts that begin with a time part at any of its digits. By the digit, one cause would be
        told as many, and what each saves would be too little.
        """
        if self._decode is None:
            return at
        for begin in range(at, max(-1, at - _LONGEST_WORD), -1):
            if self._decode([int(tokens[begin])])[:1].isspace():
                return begin
        return at

    def _describe_fork(self, those: list[Seen]) -> dict[str, Any]:
        last = those[-1]
        assert last.closest is not None
        saved = sum(seen.num_again for seen in those)
        difference = self._difference(last.tokens, last.closest)
        looks_like = difference.looks_like if difference is not None else OTHER
        places = {seen.closest.num_common for seen in those if seen.closest is not None}
        where = f"token {min(places):,}"
        if len(places) > 1:
            where = f"tokens {min(places):,} to {max(places):,}"
        part = f"{len(those):,} prompts part" if len(those) > 1 else "1 prompt parts"
        on = "go on alike" if len(those) > 1 else "goes on alike (no fork came twice so far)"
        return {
            "position": last.closest.num_common,
            "prompts": len(those),
            "tokens_computed_again": saved,
            "looks_like": looks_like,
            "before": difference.before if difference is not None else None,
            "here": difference.here if difference is not None else None,
            "there": difference.there if difference is not None else None,
            "advice": (
                f"{part} from an earlier one at {where} by what looks like {looks_like}, "
                f"and {on}: {find_remedy(looks_like)} would have saved {saved:,} tokens"
            ),
        }


def _is_swapped(tokens: Tokens, earlier: Tokens) -> bool:
    """Return True if the passage that each begins with stands further on in the other.

    Passages are longer than the text that `describe_difference` sees. What an edit or an insertion
    changes stands further on in one of the two at most. Their numbers may differ.
    """
    pairs = ((tokens, earlier), (earlier, tokens))
    return all(count_again(one[_NUMBERED:_HEAD], other[_MOVED:]) for one, other in pairs)


def _describe_salts(seen: Sequence[Seen]) -> dict[str, Any] | None:
    """Describe what equal prompts under several salts of a tenant cost; None if there are none."""
    equal: dict[tuple[str | None, bytes], dict[str | None, Seen]] = defaultdict(dict)
    for one in seen:
        equal[one.namespace.adapter, one.tokens.tobytes()].setdefault(one.namespace.salt, one)
    again = [one for salts in equal.values() for one in list(salts.values())[1:]]
    if not again:
        return None
    salts = max(map(len, equal.values()))
    saved = sum(len(one.tokens) - 1 - one.num_cached for one in again)
    part = f"{len(again):,} prompts equal" if len(again) > 1 else "1 prompt equals"
    return {
        "prompts": len(again),
        "salts": salts,
        "tokens_computed_again": saved,
        "advice": (
            f"{part} an earlier one under another salt (up to {salts:,} salts), which shares "
            f"nothing with it: one salt would have saved {saved:,} tokens"
        ),
    }


def _ago(seconds: float) -> str:
    """How long ago a prompt came.

    >>> _ago(0.4), _ago(0.6), _ago(100)
    ('just now', '1 s ago', '2 min ago')
    """
    if seconds <= 0.5:
        return "just now"
    if seconds < 90:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"
