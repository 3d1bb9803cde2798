"""Checks of the sampling parameters that change logits. Needs no torch."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from headstart.errors import RequestError
from headstart.validation import check_utf8, describe

__all__ = [
    "check_bias",
    "check_callbacks",
    "check_ids",
    "check_vocabulary",
    "check_words",
    "read_bias",
]

MAX_BIAS = 100
MAX_BAD_WORDS = 1024


def check_bias(bias: object) -> None:
    """A mapping of token ids to numbers from -100 to 100, or None."""
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {describe(bias)}; allowed: a dict of token ids")
    _check_entries("logit_bias", bias)
    for value in bias.values():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
            raise RequestError(
                f"logit_bias has {describe(value)}; allowed: a number from -{MAX_BIAS} to "
                f"{MAX_BIAS}"
            )


def read_bias(bias: object) -> object:
    """A bias whose keys may be texts, as JSON has them, brought within its range.

    What is no such thing is left to `check_bias`.
    """
    if not isinstance(bias, Mapping):
        return bias
    return {
        int(token_id) if _is_digits(token_id) else token_id: _within_range(value)
        for token_id, value in bias.items()
    }


def _is_digits(text: object) -> bool:
    return isinstance(text, str) and text.isdecimal() and len(text) < 20


def _within_range(value: Any) -> Any:
    is_number = type(value) in (int, float) and value == value  # which NaN is not
    return min(MAX_BIAS, max(-MAX_BIAS, value)) if is_number else value


def check_ids(token_ids: object) -> None:
    """A list of at least one token id, or None."""
    if token_ids is None:
        return
    if not _is_list(token_ids) or not token_ids:
        raise RequestError(
            f"allowed_token_ids is {describe(token_ids)}; allowed: a list of at least one token id"
        )
    _check_entries("allowed_token_ids", token_ids)


def check_words(words: object) -> None:
    """A list of texts that are not blank, or None."""
    if words is None:
        return
    if not _is_list(words) or len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words is {describe(words)}; allowed: a list of at most {MAX_BAD_WORDS} texts"
        )
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad_words has {describe(word)}; allowed: texts that are not blank")
        check_utf8("bad_words", word)


def check_callbacks(functions: object) -> None:
    """A list of functions, or None."""
    if functions is None:
        return
    if not _is_list(functions) or not all(map(callable, functions)):
        raise RequestError(
            f"logits_processors is {describe(functions)}; allowed: a list of functions of token "
            "ids and logits"
        )


def check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have. Raises RequestError."""
    if token_ids and max(token_ids) >= vocab_size:
        raise RequestError(
            f"{name} has the token id {describe(max(token_ids))}; allowed: from 0 to "
            f"{vocab_size - 1}"
        )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _check_entries(name: str, token_ids: Any) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"{name} has {describe(token_id)}; allowed: a whole number of at least 0"
            )
