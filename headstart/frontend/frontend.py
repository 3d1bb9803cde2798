"""The frontend of an engine: it makes requests of prompts, and allocates nothing.

The engine may be in this process, or in replicas: the frontend needs facts of the model alone.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headstart.cache import BlockHasher, Shares, TokenSequence
from headstart.engine.adapter_names import AdapterNames
from headstart.engine.config import EngineConfig
from headstart.engine.logits import (
    AllowedTokens,
    BadWords,
    Callbacks,
    LogitBias,
    LogitsProcessor,
    TokenMask,
    Vocabulary,
    Word,
    allowed_tokens,
)
from headstart.engine.params import SamplingParams, check_vocabulary
from headstart.engine.request import Request, RequestGroup
from headstart.engine.sampling import SamplingState
from headstart.errors import RequestError
from headstart.frontend.grammar import GrammarCompiler
from headstart.frontend.images.prompt import ImagePrompts, Tenant
from headstart.frontend.inputs import InputProcessor, Prompt, check_request, choose_salt
from headstart.frontend.text import Detokenizer, OutputText, TextLimit, TokenTexts, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.engine import EngineCore

_BANNING = ("allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")
"""Sampling parameters that ban tokens."""


class ProcessorFactory:
    """Makes the logits processors of a model's requests. May be used from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = GrammarCompiler(vocabulary)

    def make(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> list[tuple[LogitsProcessor, ...]]:
        """Return the processors of each of the request's answers. Raises RequestError."""
        if not params.changes_logits:
            return [()] * params.n
        tokenizer, size, _ = self._vocabulary
        shared: list[LogitsProcessor] = []
        if params.allowed_token_ids is not None:
            check_vocabulary("allowed_token_ids", params.allowed_token_ids, size)
            shared.append(AllowedTokens(params.allowed_token_ids))
        if params.logit_bias:
            check_vocabulary("logit_bias", list(params.logit_bias), size)
            shared.append(LogitBias(params.logit_bias))
        words = _spell_words(params.bad_words, tokenizer) if params.bad_words else []
        check_vocabulary("bad_words", [max(word) for word in words], size)
        answers = []
        for _ in range(params.n):
            own = list(shared)
            if words:
                own.append(BadWords(words))
            if params.logits_processors:
                own.append(Callbacks(params.logits_processors, prompt_token_ids))
            if params.structured_outputs is not None:
                form, stops = params.structured_outputs.form, params.stop_token_ids or ()
                own.append(self._grammars.mask(form, stops, ignore_eos=params.ignore_eos))
            answers.append(tuple(own))
        self._check_beginning(params, answers[0])
        return answers

    def _check_beginning(
        self, params: SamplingParams, processors: Sequence[LogitsProcessor]
    ) -> None:
        """Raise RequestError if no token is left for the beginning of an answer."""
        masks = [processor for processor in processors if isinstance(processor, TokenMask)]
        names = [name for name in _BANNING if getattr(params, name)]
        if not masks or len(names) < 2:
            return
        allowed, _ = allowed_tokens([masks], self._vocabulary.size)
        assert allowed is not None
        bits = np.unpackbits(allowed[0], bitorder="little")[: self._vocabulary.size]
        if params.min_tokens and not any(mask.complete for mask in masks):
            ends = set() if params.ignore_eos else set(self._vocabulary.eos_token_ids)
            ends.update(params.stop_token_ids or ())
            bits[[token_id for token_id in ends if token_id < len(bits)]] = 0
        if not bits.any():
            first, *others = names
            raise RequestError(
                f"{first} cannot hold together with {' and '.join(others)}: no token is left for "
                "the beginning of an answer"
            )


def _spell_words(words: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Word]:
    """Return the token ids of each word, and of it after a space if that begins with another token.

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


class ModelFacts(NamedTuple):
    """The facts of a loaded model that requests depend on, and the size of its pool.

    vocab_size: the width of the logits. names: the names of its blocks. shares: owners of blocks.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_blocks: int
    kv_cache_bytes: int
    names: BlockHasher
    shares: Shares


class Frontend:
    """Makes requests for one model. May be used from several threads.

    `tokenizer` may be None, then prompts are token ids; `images` is None for a model without
    vision. `config.seed` is the seed of the first answer drawn without a seed; each further such
    answer has the next.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        facts: ModelFacts,
        config: EngineConfig,
        adapters: AdapterNames,
        images: ImagePrompts | None,
        require_open: Callable[[], None],
    ) -> None:
        """`require_open` raises EngineError once the engine is closed."""
        self.tokenizer, self.facts, self.config = tokenizer, facts, config
        self.adapters, self.images = adapters, images
        self.require_open = require_open
        self.text_limit = TextLimit(tokenizer, facts.max_model_len)
        self._inputs = InputProcessor(tokenizer, facts.vocab_size, self.text_limit, images)
        self._processors = ProcessorFactory(
            Vocabulary(tokenizer, facts.vocab_size, facts.eos_token_ids)
        )
        # Ids for requests without one, which no user can guess.
        self._names = map(f"request-{secrets.token_hex(8)}-{{}}".format, itertools.count())
        self._seeds = itertools.count(config.seed)
        self._token_text = TokenTexts(tokenizer) if tokenizer is not None else None

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> RequestGroup:
        """Check and tokenize a request, for the adapter with this name if any.

        Raises RequestError, and EngineError once the engine is closed.
        """
        self.require_open()
        check_request(params, request_id, salt, adapter, priority)
        salt = choose_salt(prompt, salt)
        params = params.clone()  # the caller may change the original
        params.check()
        tenant = Tenant(salt, params.similar_images and params.is_stored)
        ready = self._inputs.process(prompt, tenant)
        group = RequestGroup(
            request_id if request_id is not None else next(self._names),
            ready.text,
            list(ready.token_ids),
            params,
            time.perf_counter(),
            ready.extras,
            ready.images,
            priority,
            self._token_text if params.detokenize else None,
        )
        if adapter is not None:
            group.adapter = self.adapters.find(adapter)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        processors = self._processors.make(params, group.prompt_token_ids)
        group.requests = [
            self._answer(group, index, salt, own) for index, own in enumerate(processors)
        ]
        return group

    def _answer(
        self,
        group: RequestGroup,
        index: int,
        salt: str | None,
        processors: tuple[LogitsProcessor, ...],
    ) -> Request:
        params, facts = group.params, self.facts
        sequence = TokenSequence(
            f"{group.request_id}/{index}",
            group.prompt_token_ids,
            adapter=group.adapter.digest if group.adapter is not None else None,
            salt=salt,
            items=group.extras.items if group.extras is not None else (),
            public=facts.names.public,
        )
        sequence.is_stored = params.is_stored
        generator = None
        if params.temperature != 0:  # answer i of a request has the seed plus i
            seed = next(self._seeds) % 2**64 if params.seed is None else params.seed + index
            generator = torch.Generator().manual_seed(seed)
        sampling = SamplingState(
            params, group.prompt_token_ids, [], generator, facts.eos_token_ids, processors
        )
        tokenizer = self.tokenizer if params.detokenize else None
        detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, group.prompt_token_ids)
        text = OutputText(detokenizer, params, facts.eos_token_ids, facts.max_model_len)
        request = Request(group, index, sequence, sampling, text)
        if params.logprobs is not None:
            request.logprobs = []
        return request


def make_frontend(core: EngineCore, tokenizer: PreTrainedTokenizerBase | None) -> Frontend:
    """Make the frontend of an engine in this process."""
    model, manager = core.model, core.manager
    facts = ModelFacts(
        model.vocab_size,
        frozenset(model.eos_token_ids),
        core.max_model_len,
        manager.config.num_blocks,
        core.kv_cache_bytes,
        manager.hasher,
        manager.shares,
    )
    images = None
    if core.vision is not None and core.images is not None:
        images = ImagePrompts(core.vision, tokenizer, core.config, core.images)
    return Frontend(tokenizer, facts, core.config, core.adapters, images, core.require_open)
