"""Reasons of misses in words, and advice on the changes that would have saved most tokens."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.cache import MissExplanation, MissReason, Namespace
from headstart.server.cache.traffic import Closest, Seen, Tokens, Traffic, count_again

_BEFORE, _AFTER = 64, 512  # tokens shown to `describe_difference`
_MOST_FORKS = 10
_LONGEST_WORD = 16  # tokens
_NUMBERED, _HEAD, _MOVED = 8, 40, 64  # tokens: a passage's number and head, and how far it moved


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
    ) -> dict[str, Any]:
        """Return the reason why a prompt does not hit more tokens. missed: the cache's explanation.

        closest: the closest earlier prompt, with the texts where the two differ; None if there is
        none, or if it may not be shown.
        """
        tokens = np.asarray(token_ids, np.int32)
        closest = traffic.closest(namespace, tokens)
        text, earlier = str(missed), None
        if closest is not None and closest.num_common:
            now = traffic.now()
            seconds, difference = now - closest.seen.times.came, Difference()
            text = f"the closest earlier prompt came {_ago(seconds)} and has the first "
            text += f"{closest.num_common:,} of {len(tokens):,} tokens in common"
            if closest.num_common < len(tokens):
                difference = self._difference(tokens, closest)
            num_lost = closest.num_lost(missed.position, missed, now)
            if num_lost >= self._block_size:
                missed = MissExplanation(MissReason.EVICTED, missed.position)
                text += f"; since then {num_lost:,} of these were evicted"
            elif difference.looks_like not in (None, ENDS):
                text += f"; what differs there looks like {difference.looks_like}"
            text = f"{missed}; {text}"
            earlier = {
                "request_id": closest.seen.request_id,
                "common_tokens": closest.num_common,
                "seconds_ago": round(seconds, 1),
                **difference._asdict(),
            }
        elif missed.reason is not MissReason.SALT:  # prompts of another salt are not compared
            text += "; no answered prompt begins like this one"
        return {
            "reason": missed.reason.name.lower(),
            "position": missed.position,
            "text": text,
            "closest": earlier,
        }

    def _difference(self, tokens: Tokens, closest: Closest) -> Difference:
        if self._decode is None:
            return Difference()
        start = closest.num_common
        sides = tokens, closest.seen.tokens
        before = self._decode(tokens[max(0, start - _BEFORE) : start].tolist())
        here, there = (
            # Decode the tokens before it too: a token's text may depend on the previous token.
            self._decode(side[max(0, start - _BEFORE) : start + _AFTER].tolist())[len(before) :]
            for side in sides
        )
        difference = describe_difference(before, here, there)
        # Passages are longer than these texts. If two passages are swapped, the head of each one
        # (possibly after a number) is found later in the other prompt. After an edit, that is true
        # of at most one of them.
        if difference.looks_like == OTHER and all(
            count_again(mine[start + _NUMBERED : start + _HEAD], theirs[start + _MOVED :])
            for mine, theirs in (sides, sides[::-1])
        ):
            return difference._replace(looks_like=PASSAGES)
        return difference

    def sum_up(self, recent: Sequence[Sequence[Seen]]) -> dict[str, Any]:
        """Return the causes that cost most tokens of each tenant's prompts.

        recent: each tenant's prompts, oldest first. If several prompts of a tenant begin to differ
        at the same word, they count as one cause, even under different salts.
        """
        forks: dict[tuple[Any, ...], list[Seen]] = defaultdict(list)
        for place, prompts in enumerate(recent):
            for seen in prompts:
                if seen.num_lost < self._block_size and seen.num_again and seen.closest is not None:
                    head = seen.tokens[: self._word_begins(seen.tokens, seen.closest.num_common)]
                    forks[place, seen.namespace.adapter, head.tobytes()].append(seen)
        # A cause that occurred once is reported only if no cause occurred twice.
        causes = [cause for cause in forks.values() if len(cause) > 1] or list(forks.values())
        causes.sort(key=lambda cause: -sum(seen.num_again for seen in cause))
        all_seen = [seen for prompts in recent for seen in prompts]
        return {
            "prompts": len(all_seen),
            "prompt_tokens": sum(len(seen.tokens) for seen in all_seen),
            "cached_tokens": sum(seen.num_cached for seen in all_seen),
            "forks": [self._describe_fork(cause) for cause in causes[:_MOST_FORKS]],
            "salts": [advice for seen in recent if (advice := _describe_salts(seen)) is not None],
        }

    def _word_begins(self, tokens: Tokens, place: int) -> int:
        """Return where the word with the token at `place` begins; `place` if no space is near.

        Prompts that begin with a time may differ at any of its digits. Grouped by digit, this one
        cause would be reported as several.
        """
        if self._decode is None:
            return place
        for begin in range(place, max(-1, place - _LONGEST_WORD), -1):
            if self._decode([int(tokens[begin])])[:1].isspace():
                return begin
        return place

    def _describe_fork(self, cause: list[Seen]) -> dict[str, Any]:
        forks = [(seen, seen.closest) for seen in cause if seen.closest is not None]
        last, closest = forks[-1]
        saved = sum(seen.num_again for seen in cause)
        difference = self._difference(last.tokens, closest)
        looks_like = difference.looks_like or OTHER
        places = {closest.num_common for _, closest in forks}
        position = f"token {min(places):,}"
        if len(places) > 1:
            position = f"tokens {min(places):,} to {max(places):,}"
        part, on = f"{len(cause):,} prompts part", "go on alike"
        if len(cause) == 1:
            part, on = "1 prompt parts", "goes on alike (no fork came twice so far)"
        remedy = _REMEDIES.get(looks_like, "moving it to the end")
        return {
            "position": closest.num_common,
            "prompts": len(cause),
            "tokens_computed_again": saved,
            **difference._replace(looks_like=looks_like)._asdict(),
            "advice": (
                f"{part} from an earlier one at {position} by what looks like {looks_like}, "
                f"and {on}: {remedy} would have saved {saved:,} tokens"
            ),
        }


def _describe_salts(seen: Sequence[Seen]) -> dict[str, Any] | None:
    """Describe the cost of a tenant's equal prompts under several salts; None if there are none."""
    equal: dict[tuple[str | None, bytes], dict[str | None, Seen]] = defaultdict(dict)
    for prompt in seen:
        key = prompt.namespace.adapter, prompt.key
        equal[key].setdefault(prompt.namespace.salt, prompt)
    repeated = [prompt for salts in equal.values() for prompt in list(salts.values())[1:]]
    if not repeated:
        return None
    salts = max(map(len, equal.values()))
    saved = sum(len(prompt.tokens) - 1 - prompt.num_cached for prompt in repeated)
    part = f"{len(repeated):,} prompts equal" if len(repeated) > 1 else "1 prompt equals"
    return {
        "prompts": len(repeated),
        "salts": salts,
        "tokens_computed_again": saved,
        "advice": (
            f"{part} an earlier one under another salt (up to {salts:,} salts), which shares "
            f"nothing with it: one salt would have saved {saved:,} tokens"
        ),
    }


def _ago(seconds: float) -> str:
    """Return how long ago a prompt came, in words.

    >>> _ago(0.4), _ago(0.6), _ago(100)
    ('just now', '1 s ago', '2 min ago')
    """
    if seconds <= 0.5:
        return "just now"
    if seconds < 90:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"


ENDS = "one ends where the other goes on"
OTHER = "another text"
PASSAGES = "the same passages in another order"
_TOOLS = "the same tools in another order"
_ENTRIES = "the same entries in another order"
_SPACE = "white space"
_REMEDIES = {
    _TOOLS: "keeping one order of the tools",
    _ENTRIES: "keeping one order of the entries",
    PASSAGES: "sorting the passages, or moving them behind what stays the same,",
    _SPACE: "writing it with the same white space",
    OTHER: "if this is an edited turn, nothing needs to be done; otherwise moving it to the end",
}
_AROUND = 80  # characters shown on either side
_NEAR = 24  # characters in which a date or an id is looked for
_FAR = 2000  # characters in which the same lines or keys in another order are looked for
_MOST = 0.75  # share of the entries that must match; the last entry may be cut off
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS = "mon|tue|wed|thu|fri|sat|sun"
_TIMES = re.compile(
    rf"\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|\d\d?:\d\d|\b1\d{{9}}(\d{{3}})?\b"
    rf"|\b({_MONTHS})[a-z]*\.?\s+\d|\b\d{{1,2}}\.?\s+({_MONTHS})|\b({_DAYS})[a-z]*day\b",
    re.IGNORECASE,
)
_IDS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-|\b[0-9a-f]{12,}\b|\b(?=\w*\d)(?=\w*[a-z])[\w-]{10,}\b",
    re.IGNORECASE,
)
_KEYS = re.compile(r'"([^"\\]{1,80})"\s*:')
_TOOL_WORDS = re.compile(r'"(parameters|input_schema|function)"')
_NAMES = re.compile(r'"name"\s*:\s*"([^"\\]{1,80})"')  # of tools, whose JSON keys are all equal


class Difference(NamedTuple):
    """The text before a difference, the text of each prompt there, and the likely cause.

    All are None if texts may not be shown, or if one prompt is a prefix of the other.
    """

    before: str | None = None
    here: str | None = None
    there: str | None = None
    looks_like: str | None = None


def describe_difference(before: str, here: str, there: str) -> Difference:
    """Classify the difference between two texts after their common prefix.

    >>> describe_difference("It is 2026-11-", "21. Hello", "22. Hello").looks_like
    'a date or time'
    """
    before = before[-_AROUND:]
    mine, theirs = _around(before, here), _around(before, there)
    if not here or not there:
        kind = ENDS
    elif _TIMES.search(mine) and _TIMES.search(theirs):
        kind = "a date or time"
    elif _IDS.search(mine) and _IDS.search(theirs):
        kind = "a random id"
    elif "".join(here[:_AROUND].split())[:40] == "".join(there[:_AROUND].split())[:40]:
        kind = _SPACE
    elif order := _find_order(before, here, there):
        kind = order
    elif _word(before, here).isdigit() and _word(before, there).isdigit():
        kind = "a number"
    else:
        kind = OTHER
    return Difference(before, here[:_AROUND], there[:_AROUND], kind)


def _around(before: str, after: str) -> str:
    """Return the text around the difference, within its line."""
    same_line = before.rsplit("\n", 1)[-1][-_NEAR:]
    return same_line + after[:_NEAR].split("\n", 1)[0]


def _word(before: str, after: str) -> str:
    """Return the word that contains the first character of `after`."""
    head = "".join(takewhile(str.isalnum, reversed(before)))[::-1]
    return head + "".join(takewhile(str.isalnum, after))


def _find_order(before: str, here: str, there: str) -> str | None:
    """Return the kind of entries that are equal but in another order; None if they differ."""
    line = before.rsplit("\n", 1)[-1]
    mine, theirs = line + here[:_FAR], line + there[:_FAR]
    if _is_moved(_NAMES.findall(mine), _NAMES.findall(theirs)):
        return _TOOLS if _TOOL_WORDS.search(mine) else _ENTRIES
    if _is_moved(_KEYS.findall(mine), _KEYS.findall(theirs)):
        return _ENTRIES
    if _is_moved(*(re.split(r"\n\s*\n", text) for text in (mine, theirs))):
        return PASSAGES
    return _ENTRIES if _is_moved(mine.splitlines(), theirs.splitlines()) else None


def _is_moved(mine: list[str], theirs: list[str]) -> bool:
    """Return True if most entries are in both lists, and each first entry comes later in the other.

    >>> _is_moved(["id", "a", "b"], ["id", "b", "a"]), _is_moved(["a", "b"], ["c", "b"])
    (True, False)
    """
    pairs = zip(mine, theirs, strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    mine, theirs = mine[num_same:], theirs[num_same:]
    if not mine or not theirs or mine[0] not in theirs or theirs[0] not in mine:
        return False
    return (Counter(mine) & Counter(theirs)).total() >= _MOST * min(len(mine), len(theirs))


_MOST_SAMPLES = 256  # evicted prompts to examine; if there are more, evenly spaced ones
_SHARE = 0.9  # the advised size saves this share of the recomputed tokens
_ANSWER = b""


class PoolSize(NamedTuple):
    """The number of blocks of the pool, and the tokens and bytes of a block."""

    num_blocks: int
    block_size: int
    bytes_per_block: int


def _number_blocks(
    seen: Seen,
    numbers: dict[tuple[Namespace | int, bytes], int],
    fresh: Iterator[int],
    block_size: int,
) -> list[int]:
    """Return numbers for the blocks of a prompt and its answer, equal for equal content.

    The tokens of answers are unknown. If a later prompt continues the conversation, its next
    blocks are assumed to be the answer's.
    """
    step = block_size * seen.tokens.itemsize
    data = seen.tokens[: len(seen.tokens) // block_size * block_size].tobytes()
    keys = [data[start : start + step] for start in range(0, len(data), step)]
    keys += [_ANSWER] * (-(-seen.num_computed // block_size) - len(keys))
    path: list[int] = []
    for key in keys:
        parent = path[-1] if path else seen.namespace
        number = numbers.get((parent, key)) if key else None
        if number is None:
            number = numbers.pop((parent, _ANSWER), None) if key else None
            if number is None:
                number = next(fresh)
            numbers[parent, key] = number
        path.append(number)
    return path


def _reuse_distances(
    prompts: Sequence[Seen], samples: Sequence[Seen], forgotten: float, block_size: int
) -> Iterator[tuple[int, int]]:
    """Yield the reuse distance of each evicted prefix in blocks, and its lost tokens.

    The reuse distance is the number of blocks used between two uses of a prefix, plus its own
    blocks. An LRU pool of that many blocks would not have evicted the prefix.
    """
    sample_ids = set(map(id, samples))
    by_content: dict[tuple[Namespace | int, bytes], int] = {}
    fresh = count()
    last_used: NDArray[np.float64] = np.full(0, -np.inf)
    for seen in sorted(prompts, key=lambda seen: seen.times.looked_up):
        numbers = np.array(_number_blocks(seen, by_content, fresh, block_size), np.int64)
        num_new = max(0, int(numbers.max(initial=-1)) + 1 - len(last_used))
        last_used = np.pad(last_used, (0, num_new), constant_values=-np.inf)
        if id(seen) in sample_ids and seen.closest is not None:
            prefix = last_used[numbers[: seen.closest.num_common // block_size]]
            if prefix[-1] > forgotten:
                since = np.count_nonzero(last_used > prefix[-1])
                yield int(since + np.count_nonzero(prefix <= prefix[-1])), seen.num_lost
        last_used[numbers] = np.maximum(last_used[numbers], seen.ended)


def advise_memory(prompts: Sequence[Seen], forgotten: float, pool: PoolSize) -> dict[str, Any]:
    """Return how many more blocks would have saved most of the evicted tokens.

    prompts: the prompts of all tenants. forgotten: the latest end of a prompt that is no longer
    stored. Values are None if no reuse distance is known: the earlier use is older than
    `forgotten`, or the prompts account for fewer blocks than the pool has.
    """
    evicted = [seen for seen in prompts if seen.num_lost >= pool.block_size]
    samples = evicted[:: -(-len(evicted) // _MOST_SAMPLES) or 1]
    more_blocks = saved = None
    if samples:
        all_distances = _reuse_distances(prompts, samples, forgotten, pool.block_size)
        distances = sorted(entry for entry in all_distances if entry[0] > pool.num_blocks)
        if distances:
            sums = np.cumsum([lost for _, lost in distances])
            place = int(np.searchsorted(sums, _SHARE * sums[-1]))
            more_blocks = distances[place][0] - pool.num_blocks
            saved = int(sums[place]) * len(evicted) // len(samples)
    return {
        "evicted_prompts": len(evicted),
        "tokens_computed_again": sum(seen.num_lost for seen in evicted),
        "more_blocks": more_blocks,
        "more_bytes": more_blocks * pool.bytes_per_block if more_blocks is not None else None,
        "tokens_saved": saved,
    }
