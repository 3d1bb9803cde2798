"""Logits processors, and the times of their calls.

    call         time                                              thread
    __init__     a request is prepared, once for each answer       the caller's
    change       before a token is sampled                         the engine's
    accept       after a token, if the answer continues            the engine's

Processors are never rolled back: if sampling fails, the step's requests end. A preempted request
retains its processors.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.errors import EngineError, NoTokenError, engine_error
from headstart.models.tokenizer import Tokenizer
from headstart.weights.greedy_head import every_token, mask_logits

ALL_BANNED = "every token is banned, or a penalty overflows"

Rows = Sequence[tuple[int, Any]]
"""Rows of a step's logits: each row's index, and the processor of its answer."""

Failures = dict[int, EngineError]
"""Errors by row, for rows from which no token can be chosen. Other rows are unaffected."""

Word = tuple[int, ...]


class Vocabulary(NamedTuple):
    """The tokens of a model. tokenizer: None if their texts are unknown.

    size: the width of the logits, which may be larger than the tokenizer's vocabulary.
    """

    tokenizer: Tokenizer | None
    size: int
    eos_token_ids: frozenset[int]


class LogitsProcessor(ABC):
    """A change of one answer's logits before each token.

    Classes are applied in the order of `rank`, each to all of its rows of the step at once. A
    processor never reads or writes a row of another answer.
    """

    rank: int
    complete = False
    """True once the answer can only end. The answer then ends, even before `min_tokens`."""

    @classmethod
    @abstractmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Change these rows of `logits` float32 `[rows, vocab]` in place.

        `rows` has processors of this class. A processor that fails ends only its own request.
        """

    def accept(self, token_id: int) -> None:  # noqa: B027 (most have no state)
        """Note a new token of the answer."""


class TokenMask(LogitsProcessor):
    """A processor that bans tokens and leaves the logits of allowed tokens unchanged.

    If all processors of a request are masks, its argmax does not need all logits.
    """

    @classmethod
    @abstractmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        """Clear the bits of banned tokens in these rows of `allowed` uint8 `[rows, bytes]`.

        There is a bit for each token, the lowest bit of a byte first, as in `every_token`.
        """

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Set the logits of banned tokens to minus infinity."""
        allowed = _all_allowed(*logits.shape)
        failed = cls.ban(allowed, rows)
        mask_logits(logits, allowed)
        return failed


class AllowedTokens(TokenMask):
    """A ban of all tokens except `token_ids`."""

    rank = 0

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = np.array(sorted(set(token_ids)), dtype=np.int64)
        self._mask = np.empty(0, dtype=np.uint8)

    @classmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        for row, processor in rows:
            if len(processor._mask) != allowed.shape[1]:  # built in the first step
                bits = np.zeros(allowed.shape[1] * 8, dtype=np.uint8)
                bits[processor.token_ids] = 1
                processor._mask = np.packbits(bits, bitorder="little")
            allowed[row] &= processor._mask
        return {}


class LogitBias(LogitsProcessor):
    """A bias for the logits of some tokens. One scatter operation changes all rows of a step."""

    rank = 1

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.token_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.values = np.fromiter(bias.values(), np.float32, len(bias))

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        row_ids = np.repeat([row for row, _ in rows], [len(bias.token_ids) for _, bias in rows])
        columns = np.concatenate([bias.token_ids for _, bias in rows])
        values = np.concatenate([bias.values for _, bias in rows])
        indices = [torch.from_numpy(i).to(logits.device) for i in (row_ids, columns)]
        bias_values = torch.from_numpy(values).to(logits.device)
        logits.index_put_(tuple(indices), bias_values, accumulate=True)
        return {}


class BadWords(TokenMask):
    """A ban of words, given as token ids.

    When the answer ends with all tokens of a word but the last, the last token is banned. As in
    vLLM, a word is tokenized at the beginning of a string and after a space. Other tokens may still
    spell the word. Words are looked up by their second to last token, so a step checks only a few.
    """

    rank = 2

    def __init__(self, words: Sequence[Word]) -> None:
        self._past: list[int] = []
        self._longest = max(map(len, words)) - 1
        self._always = [word[-1] for word in words if len(word) == 1]
        self._after: dict[int, list[Word]] = {}
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)

    @property
    def token_ids(self) -> list[int]:
        candidates = self._after.get(self._past[-1], ()) if self._past else ()
        completed = [w[-1] for w in candidates if tuple(self._past[1 - len(w) :]) == w[:-1]]
        return self._always + completed

    @classmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        for row, processor in rows:
            for token_id in processor.token_ids:
                allowed[row, token_id // 8] &= ~np.uint8(1 << token_id % 8)
        return {}

    def accept(self, token_id: int) -> None:
        self._past.append(token_id)
        del self._past[: -self._longest or len(self._past)]


class CustomProcessors(LogitsProcessor):
    """The caller's functions, called one after another, each with the previous result.

    A function gets the answer's token ids so far and its logits `[vocab]`; a function with three
    parameters gets the prompt's token ids first. It returns logits, possibly the same tensor. An
    exception ends only its request. A function must not wait for a thread that calls the engine:
    both would wait forever, since the engine is in a step.
    """

    rank = 3

    def __init__(self, functions: Sequence[Callable[..., Any]], prompt: Sequence[int]) -> None:
        self._calls: list[tuple[Callable[..., Any], bool]] = []  # True: it takes the prompt
        for function in functions:
            takes_prompt = False
            with suppress(ValueError):  # a builtin without a signature
                takes_prompt = len(inspect.signature(function).parameters) == 3
            self._calls.append((function, takes_prompt))
        self._prompt = prompt
        self._past: list[int] = []

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        failed: Failures = {}
        for row, processor in rows:
            try:
                processor._call(logits[row])
            except Exception as error:
                failed[row] = engine_error("a logits processor failed", error)
        return failed

    def _call(self, row: Tensor) -> None:
        for function, takes_prompt in self._calls:
            prompt = (list(self._prompt),) if takes_prompt else ()
            result = function(*prompt, list(self._past), row)
            if not isinstance(result, Tensor) or result.shape != row.shape:
                kind = type(result).__name__
                if isinstance(result, Tensor):
                    kind = f"tensor {[*result.shape]}"
                raise TypeError(f"its result is a {kind}; allowed: a tensor {[*row.shape]}")
            if result is not row:
                row.copy_(result)

    def accept(self, token_id: int) -> None:
        self._past.append(token_id)


Processor = TypeVar("Processor", bound=LogitsProcessor)


def allowed_tokens(
    processors: Sequence[Sequence[TokenMask]], size: int
) -> tuple[np.ndarray | None, Failures]:
    """Return the rows' masks, uint8 `[rows, bytes]` over `size` tokens, and the failures.

    The masks are None if no row has a processor.
    """
    if not any(processors):
        return None, {}
    allowed = _all_allowed(len(processors), size)
    failed: Failures = {}
    for kind, rows in _by_kind(processors):
        failed |= kind.ban(allowed, rows)
    empty = {row: NoTokenError(ALL_BANNED) for row in np.flatnonzero(~allowed.any(axis=1)).tolist()}
    return allowed, empty | failed


def _all_allowed(rows: int, size: int) -> np.ndarray:
    return np.tile(every_token(size), (rows, 1))


@torch.inference_mode()  # the mode in which the logits were computed
def apply_processors(logits: Tensor, processors: Sequence[Sequence[LogitsProcessor]]) -> Failures:
    """Apply the processors of each row of `logits` float32 `[rows, vocab]`, in place."""
    failed: Failures = {}
    for kind, rows in _by_kind(processors):
        failed |= kind.change(logits, rows)
    return failed


def _by_kind(
    processors: Sequence[Sequence[Processor]],
) -> Iterator[tuple[type[Processor], list[tuple[int, Processor]]]]:
    """Yield each class and its rows, in the order of rank."""
    kinds: dict[type[Processor], list[tuple[int, Processor]]] = {}
    for row, chain in enumerate(processors):
        for processor in chain:
            kinds.setdefault(type(processor), []).append((row, processor))
    for kind in sorted(kinds, key=lambda kind: kind.rank):
        yield kind, kinds[kind]
