"""The logits processors of a request's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headstart.engine.logits.bad_words import BadWords, Word
from headstart.engine.logits.bias import AllowedTokens, LogitBias
from headstart.engine.logits.callback import Callbacks
from headstart.engine.logits.checks import check_vocabulary
from headstart.engine.logits.protocol import LogitsProcessor, TokenMask, allowed_tokens
from headstart.engine.logits.vocabulary import Vocabulary
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError
from headstart.frontend.structured.grammar import NAMES_SPECIAL, GrammarCompiler, GrammarMask
from headstart.frontend.text.codec import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ProcessorFactory"]

_BANNING = ("allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")
"""Sampling parameters that ban tokens."""


class ProcessorFactory:
    """Processors for one model. May be used from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = GrammarCompiler(vocabulary)

    def make(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> list[tuple[LogitsProcessor, ...]]:
        """Those of each of the request's answers: one of a kind at most. Raises RequestError."""
        if not params.changes_logits:
            return [()] * params.n
        size = self._vocabulary.size
        shared: list[LogitsProcessor] = []
        if params.allowed_token_ids is not None:
            check_vocabulary("allowed_token_ids", params.allowed_token_ids, size)
            shared.append(AllowedTokens(params.allowed_token_ids))
        if params.logit_bias:
            check_vocabulary("logit_bias", list(params.logit_bias), size)
            shared.append(LogitBias(params.logit_bias))
        tokenizer = self._vocabulary.tokenizer
        words = spell_words(params.bad_words, tokenizer) if params.bad_words else []
        check_vocabulary("bad_words", [max(word) for word in words], size)
        answers = []
        for _ in range(params.n):
            own = list(shared)
            if words:
                own.append(BadWords(words))
            if params.logits_processors:
                own.append(Callbacks(params.logits_processors, prompt_token_ids))
            if params.structured_outputs is not None:
                own.append(self._grammar(params))
            answers.append(tuple(own))
        self._check_beginning(params, answers[0])
        return answers

    def _check_beginning(
        self, params: SamplingParams, processors: Sequence[LogitsProcessor]
    ) -> None:
        """Raise RequestError if no token is left for the beginning of an answer."""
        masks = [one for one in processors if isinstance(one, TokenMask)]
        names = [name for name in _BANNING if getattr(params, name)]
        if not masks or len(names) < 2:
            return
        allowed, _ = allowed_tokens([masks], self._vocabulary.size)
        assert allowed is not None
        bits = np.unpackbits(allowed[0], bitorder="little")[: self._vocabulary.size]
        if params.min_tokens and not any(one.complete for one in masks):
            ends = set() if params.ignore_eos else set(self._vocabulary.eos_token_ids)
            ends.update(params.stop_token_ids or ())
            bits[[token_id for token_id in ends if token_id < len(bits)]] = 0
        if not bits.any():
            first, *others = names
            raise RequestError(
                f"{first} cannot hold together with {' and '.join(others)}: no token is left for "
                "the beginning of an answer"
            )

    def _grammar(self, params: SamplingParams) -> GrammarMask:
        assert params.structured_outputs is not None
        form = params.structured_outputs.form
        masks = self._grammars.masks
        ends = [*(() if params.ignore_eos else masks.end_ids), *(params.stop_token_ids or ())]
        matcher = self._grammars.matcher(form)
        return GrammarMask(matcher, masks, ends, special=form.kind in NAMES_SPECIAL)


def spell_words(words: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Word]:
    """The token ids of each word, and of it after a space where that begins with another token.

    Raises RequestError.
    """
    if tokenizer is None:
        raise RequestError("the model came without a tokenizer: bad_words cannot be spelled")
    spelled: dict[Word, None] = {}
    for word in words:
        plain, spaced = (
            tuple(encode_text(tokenizer, text, add_special_tokens=False))
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not plain:
            raise RequestError(f"bad_words has {word!r}, which has no tokens")
        spelled[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spelled[spaced] = None
    return list(spelled)
