"""Explanations of cache misses, and advice: changes that would have saved the most tokens."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.cache import MissExplanation, MissReason, Namespace
from headstart.server.cache.traffic import (
    ClosestPrompt,
    PastPrompt,
    Tokens,
    Traffic,
    count_repeated,
)

_BEFORE, _AFTER = 64, 512  # tokens to decode before and after a difference
_MOST_CAUSES = 10
_LONGEST_WORD = 16  # tokens
# Two prompts may differ only in the order of retrieved passages. Then the passage that one prompt
# has at the difference occurs in the other prompt, at least `_MOVED` tokens later. The passages'
# tokens from `_NUMBER` to `_HEAD` are compared. Earlier tokens may be a number, such as "[1]".
_NUMBER, _HEAD, _MOVED = 8, 40, 64


class Adviser:
    """Explanations of misses, and advice, from comparisons with earlier prompts."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, block_size: int) -> None:
        """Use `decode` to show texts of prompts. If it is None, show no texts."""
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

        The entry `closest` describes the closest earlier prompt and its first difference from this
        prompt. It is None if no earlier prompt begins with the same token.
        """
        tokens = np.asarray(token_ids, np.int32)
        closest = traffic.closest(namespace, tokens)
        text, earlier = str(missed), None
        if closest is not None and closest.num_common:
            now = traffic.now()
            seconds, difference = now - closest.prompt.times.arrived, Difference()
            text = f"the closest earlier prompt arrived {_ago(seconds)} and has the same first "
            text += f"{closest.num_common:,} of {len(tokens):,} tokens"
            if closest.num_common < len(tokens):
                difference = self._difference(tokens, closest)
            num_evicted = closest.num_evicted_tokens(missed.position, missed, now)
            if num_evicted >= self._block_size:
                missed = MissExplanation(MissReason.EVICTED, missed.position)
                text += f"; {num_evicted:,} of these tokens were evicted since then"
            elif difference.looks_like not in (None, ENDS):
                text += f"; the difference looks like {difference.looks_like}"
            text = f"{missed}; {text}"
            earlier = {
                "request_id": closest.prompt.request_id,
                "common_tokens": closest.num_common,
                "seconds_ago": round(seconds, 1),
                **difference._asdict(),
            }
        elif missed.reason is not MissReason.SALT:  # prompts of another salt are not compared
            text += "; no recent prompt begins with the same token"
        return {
            "reason": missed.reason.name.lower(),
            "position": missed.position,
            "text": text,
            "closest": earlier,
        }

    def _difference(self, tokens: Tokens, closest: ClosestPrompt) -> Difference:
        if self._decode is None:
            return Difference()
        start = closest.num_common
        sides = tokens, closest.prompt.tokens
        before = self._decode(tokens[max(0, start - _BEFORE) : start].tolist())
        here, there = (
            # The text of a token may depend on the previous token, so decode both together.
            self._decode(side[max(0, start - _BEFORE) : start + _AFTER].tolist())[len(before) :]
            for side in sides
        )
        difference = describe_difference(before, here, there)
        # A passage may be longer than the decoded texts, so compare tokens. After a swap, both
        # passages occur later in the other prompt. After an edit, at most one passage does.
        if difference.looks_like == OTHER and all(
            count_repeated(mine[start + _NUMBER : start + _HEAD], theirs[start + _MOVED :])
            for mine, theirs in (sides, sides[::-1])
        ):
            return difference._replace(looks_like=PASSAGES)
        return difference

    def advise(self, recent: Sequence[Sequence[PastPrompt]]) -> dict[str, Any]:
        """Return the causes of misses that cost the most tokens.

        recent: each tenant's prompts, oldest first. Prompts of a tenant have the same cause if they
        differ from earlier prompts at the same word after the same text, even under different
        salts.
        """
        by_head: dict[tuple[Any, ...], list[PastPrompt]] = defaultdict(list)
        for tenant, prompts in enumerate(recent):
            for prompt in prompts:
                closest = prompt.closest
                if closest is None or not prompt.num_repeated:
                    continue
                if prompt.num_evicted_tokens < self._block_size:
                    head = prompt.tokens[: self._word_start(prompt.tokens, closest.num_common)]
                    by_head[tenant, prompt.namespace.adapter, head.tobytes()].append(prompt)
        # A cause that occurred once is reported only if no cause occurred twice.
        causes = [cause for cause in by_head.values() if len(cause) > 1] or list(by_head.values())
        causes.sort(key=lambda cause: -sum(prompt.num_repeated for prompt in cause))
        all_prompts = [prompt for prompts in recent for prompt in prompts]
        return {
            "prompts": len(all_prompts),
            "prompt_tokens": sum(len(prompt.tokens) for prompt in all_prompts),
            "cached_tokens": sum(prompt.num_cached for prompt in all_prompts),
            "forks": [self._describe_cause(cause) for cause in causes[:_MOST_CAUSES]],
            "salts": [advice for prompts in recent if (advice := _describe_salts(prompts))],
        }

    def _word_start(self, tokens: Tokens, index: int) -> int:
        """Return the index of the first token of the word that contains the token at `index`.

        Return `index` if none of the last `_LONGEST_WORD` tokens begins with a space.

        Prompts that begin with a time may differ at any digit of the time. If these prompts were
        grouped by the digit, the advice would report one cause several times.
        """
        if self._decode is None:
            return index
        for start in range(index, max(-1, index - _LONGEST_WORD), -1):
            if self._decode([int(tokens[start])])[:1].isspace():
                return start
        return index

    def _describe_cause(self, cause: list[PastPrompt]) -> dict[str, Any]:
        closest = [prompt.closest for prompt in cause if prompt.closest is not None]
        difference = self._difference(cause[-1].tokens, closest[-1])
        looks_like = difference.looks_like or OTHER
        saved = sum(prompt.num_repeated for prompt in cause)
        positions = {earlier.num_common for earlier in closest}
        position = f"token {min(positions):,}"
        if len(positions) > 1:
            position = f"tokens {min(positions):,} to {max(positions):,}"
        subject, verb = f"{len(cause):,} prompts differ", "continue"
        if len(cause) == 1:
            subject, verb = "1 prompt differs", "continues"
        advice = f"{subject} from an earlier prompt at {position}"
        if looks_like != OTHER:
            advice += f" (probably {looks_like})"
        remedy = _REMEDIES.get(looks_like, "moving the differing text to the end")
        advice += f" and {verb} with equal text: {remedy} would have saved {saved:,} tokens"
        if looks_like == OTHER:
            advice += "; no change is needed if the user edited a turn"
        return {
            "position": closest[-1].num_common,
            "prompts": len(cause),
            "tokens_computed_again": saved,
            **difference._replace(looks_like=looks_like)._asdict(),
            "advice": advice,
        }


def _describe_salts(prompts: Sequence[PastPrompt]) -> dict[str, Any] | None:
    """Return the cost of a tenant's equal prompts under several salts; None if there are none."""
    equal: dict[tuple[str | None, bytes], dict[str | None, PastPrompt]] = defaultdict(dict)
    for prompt in prompts:
        key = prompt.namespace.adapter, prompt.key
        equal[key].setdefault(prompt.namespace.salt, prompt)
    repeated = [prompt for salts in equal.values() for prompt in list(salts.values())[1:]]
    if not repeated:
        return None
    salts = max(map(len, equal.values()))
    saved = sum(len(prompt.tokens) - 1 - prompt.num_cached for prompt in repeated)
    equals = f"{len(repeated):,} prompts equal" if len(repeated) > 1 else "1 prompt equals"
    return {
        "prompts": len(repeated),
        "salts": salts,
        "tokens_computed_again": saved,
        "advice": (
            f"{equals} an earlier prompt under another salt (up to {salts:,} salts per prompt), "
            f"and salts share no K/V: one salt would have saved {saved:,} tokens"
        ),
    }


def _ago(seconds: float) -> str:
    """Return a time span in words.

    >>> _ago(0.4), _ago(0.6), _ago(100)
    ('just now', '1 s ago', '2 min ago')
    """
    if seconds <= 0.5:
        return "just now"
    if seconds < 90:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"


ENDS = "one prompt is the beginning of the other"
OTHER = "another text"
PASSAGES = "the same passages in another order"
_TOOLS = "the same tools in another order"
_ENTRIES = "the same entries in another order"
_SPACE = "white space"
_REMEDIES = {
    _TOOLS: "sending the tools in one order",
    _ENTRIES: "sending the entries in one order",
    PASSAGES: "sorting the passages or moving them to the end",
    _SPACE: "sending the same white space",
}
_AROUND = 80  # characters to show before and after a difference
_NEAR = 24  # characters to search for a date or an id
_FAR = 2000  # characters to search for the same entries in another order
_MIN_MOVED = 0.75  # share of the entries that must be in both texts; the last entry may be cut off
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS = "mon|tue|wed|thu|fri|sat|sun"
_TIMES = re.compile(
    rf"\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|\d\d?:\d\d|\b1\d{{9}}(\d{{3}})?\b"
    rf"|\b({_MONTHS})[a-z]*\.?\s+\d|\b\d{{1,2}}\.?\s+({_MONTHS})|\b({_DAYS})[a-z]*day\b",
    re.IGNORECASE,
)
_IDS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-|\b[0-9a-f]{12,}\b|\b(?=\w*\d)(?=\w*[a-z])[\w-]{10,}\b", re.IGNORECASE
)
_KEYS = re.compile(r'"([^"\\]{1,80})"\s*:')
_TOOL_WORDS = re.compile(r'"(parameters|input_schema|function)"')
_NAMES = re.compile(r'"name"\s*:\s*"([^"\\]{1,80})"')  # tools have equal keys, but different names


class Difference(NamedTuple):
    """The text before a difference, the text of each prompt from there on, and the likely cause.

    All are None without a tokenizer, or if the earlier prompt begins with the whole prompt.
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
    """Return the likely cause if the texts differ only in the order of entries; otherwise None."""
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
    """Return True if most entries are in both lists, in another order.

    The first entry that differs in each list must come later in the other list.

    >>> _is_moved(["id", "a", "b"], ["id", "b", "a"]), _is_moved(["a", "b"], ["c", "b"])
    (True, False)
    """
    pairs = zip(mine, theirs, strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    mine, theirs = mine[num_same:], theirs[num_same:]
    if not mine or not theirs or mine[0] not in theirs or theirs[0] not in mine:
        return False
    return (Counter(mine) & Counter(theirs)).total() >= _MIN_MOVED * min(len(mine), len(theirs))


_MOST_SAMPLES = 256  # evicted prompts to examine, evenly spaced
_SHARE = 0.9  # share of the recomputed tokens that the advised size saves
_ANSWER = b""  # the key of a block whose tokens are unknown


class PoolSize(NamedTuple):
    """The number of blocks of the pool, and the tokens and bytes of a block."""

    num_blocks: int
    block_size: int
    bytes_per_block: int


def _number_blocks(
    prompt: PastPrompt,
    numbers: dict[tuple[Namespace | int, bytes], int],
    fresh: Iterator[int],
    block_size: int,
) -> list[int]:
    """Return numbers for the blocks of a prompt and its answer. Equal blocks have equal numbers.

    The tokens of answers are unknown. The first later prompt that begins with this prompt is
    assumed to continue with the answer. So the blocks of the continuation get the numbers of the
    answer's blocks.
    """
    step = block_size * prompt.tokens.itemsize
    data = prompt.tokens[: len(prompt.tokens) // block_size * block_size].tobytes()
    keys = [data[start : start + step] for start in range(0, len(data), step)]
    keys += [_ANSWER] * (-(-prompt.num_computed // block_size) - len(keys))
    path: list[int] = []
    for key in keys:
        parent = path[-1] if path else prompt.namespace
        number = numbers.get((parent, key)) if key else None
        if number is None:
            number = numbers.pop((parent, _ANSWER), None) if key else None
            if number is None:
                number = next(fresh)
            numbers[parent, key] = number
        path.append(number)
    return path


def _reuse_distances(
    prompts: Sequence[PastPrompt],
    samples: Sequence[PastPrompt],
    last_dropped: float,
    block_size: int,
) -> Iterator[tuple[int, int]]:
    """Yield the reuse distance in blocks and the evicted tokens of each sample's evicted prefix.

    The reuse distance is the number of other blocks that were used between two uses of a prefix,
    plus the prefix's blocks. An LRU pool of this size would not have evicted the prefix.
    """
    sample_ids = set(map(id, samples))
    by_content: dict[tuple[Namespace | int, bytes], int] = {}
    fresh = count()
    last_used: NDArray[np.float64] = np.full(0, -np.inf)
    for prompt in sorted(prompts, key=lambda prompt: prompt.times.looked_up):
        numbers = np.array(_number_blocks(prompt, by_content, fresh, block_size), np.int64)
        num_new = max(0, int(numbers.max(initial=-1)) + 1 - len(last_used))
        last_used = np.pad(last_used, (0, num_new), constant_values=-np.inf)
        if id(prompt) in sample_ids and prompt.closest is not None:
            prefix = last_used[numbers[: prompt.closest.num_common // block_size]]
            if prefix[-1] > last_dropped:
                since = np.count_nonzero(last_used > prefix[-1])
                yield int(since + np.count_nonzero(prefix <= prefix[-1])), prompt.num_evicted_tokens
        last_used[numbers] = np.maximum(last_used[numbers], prompt.ended)


def advise_memory(
    prompts: Sequence[PastPrompt], last_dropped: float, pool: PoolSize
) -> dict[str, Any]:
    """Return how many more blocks would have saved most of the evicted tokens.

    prompts: the prompts of all tenants. last_dropped: see `Traffic`. The number of blocks is None
    if no known reuse distance is larger than the pool. A distance is unknown if the earlier use
    ended before `last_dropped`.
    """
    evicted = [prompt for prompt in prompts if prompt.num_evicted_tokens >= pool.block_size]
    samples = evicted[:: -(-len(evicted) // _MOST_SAMPLES) or 1]
    more_blocks = saved = None
    if samples:
        all_distances = _reuse_distances(prompts, samples, last_dropped, pool.block_size)
        distances = sorted(entry for entry in all_distances if entry[0] > pool.num_blocks)
        if distances:
            sums = np.cumsum([tokens for _, tokens in distances])
            index = int(np.searchsorted(sums, _SHARE * sums[-1]))
            more_blocks = distances[index][0] - pool.num_blocks
            saved = int(sums[index]) * len(evicted) // len(samples)
    return {
        "evicted_prompts": len(evicted),
        "tokens_computed_again": sum(prompt.num_evicted_tokens for prompt in evicted),
        "more_blocks": more_blocks,
        "more_bytes": more_blocks * pool.bytes_per_block if more_blocks is not None else None,
        "tokens_saved": saved,
    }
