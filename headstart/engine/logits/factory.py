"""Makes the processors of a request's answers."""

from collections.abc import Sequence

from headstart.engine.logits.bad_words import BadWords, spell_words
from headstart.engine.logits.bias import AllowedTokens, LogitBias
from headstart.engine.logits.callback import Callbacks
from headstart.engine.logits.checks import check_vocabulary
from headstart.engine.logits.protocol import LogitsProcessor
from headstart.engine.logits.vocabulary import Vocabulary
from headstart.engine.params import SamplingParams
from headstart.engine.structured.grammar import NAMES_SPECIAL, GrammarCompiler
from headstart.engine.structured.processor import GrammarMask

__all__ = ["ProcessorFactory"]


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
        return answers

    def _grammar(self, params: SamplingParams) -> GrammarMask:
        assert params.structured_outputs is not None
        form = params.structured_outputs.form
        masks = self._grammars.masks
        ends = [*(() if params.ignore_eos else masks.end_ids), *(params.stop_token_ids or ())]
        matcher = self._grammars.matcher(form)
        return GrammarMask(matcher, masks, ends, special=form.kind in NAMES_SPECIAL)
