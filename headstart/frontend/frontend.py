"""The frontend of an engine, which checks prompts and makes requests from them.

The frontend needs only facts about the model and allocates no K/V memory, so the engine may be in
this process or in replicas.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from headstart.cache import BlockHasher, Shares, TokenSequence
from headstart.engine.adapter_names import AdapterNames
from headstart.engine.config import EngineConfig
from headstart.engine.logits import (
    AllowedTokens,
    BadWords,
    CustomProcessors,
    LogitBias,
    LogitsProcessor,
    TokenMask,
    Vocabulary,
    Word,
    allowed_tokens,
)
from headstart.engine.params import SamplingParams, check_vocabulary
from headstart.engine.request import PreparedPrompt, Request, RequestGroup
from headstart.engine.sampling import SamplingState
from headstart.errors import RequestError
from headstart.frontend.grammar import GrammarCompiler
from headstart.frontend.images.prompt import ImagePrompts
from headstart.frontend.text import (
    Detokenizer,
    OutputText,
    TextLimit,
    encode_text,
    make_token_text,
    too_many_tokens,
)
from headstart.frontend.vllm_compat import PromptType
from headstart.validation import Number, check_absent, check_name, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.engine import EngineCore


Prompt = PromptType | Mapping[str, Any] | PreparedPrompt
"""A string, token ids, one of vLLM's dicts, or a `PreparedPrompt`.

Token ids are a sequence of integers, or a numpy array or torch tensor of one dimension. A dict is
`{"prompt": ...}` or `{"prompt_token_ids": ...}`, optionally with `"multi_modal_data": {"image":
...}` and a `"cache_salt"`."""

_ABSENT_KEYS = ("media_io_kwargs", "mm_processor_kwargs", "token_type_ids", "prompt_embeds")
"""Keys of vLLM's prompts that must be None or empty."""
_KEYS = {
    *("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "cache_salt"),
    "prompt_token_offsets",  # without effect
    *_ABSENT_KEYS,
}

_PRIORITIES = Number(int, -(2**63), 2**63 - 1)
_CHUNK = 1 << 16  # token ids to check at once; a check blocks the other threads
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_request(
    params: object, request_id: object, salt: object, adapter: object, priority: object
) -> None:
    """Raise RequestError if an option of a request, apart from its prompt, is invalid."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"the sampling parameters are {describe(params)}; allowed: a SamplingParams"
        )
    check_name("request_id", request_id)
    check_name("cache_salt", salt)
    check_name("adapter", adapter)
    if priority not in _PRIORITIES:
        raise RequestError(f"priority is {describe(priority)}; allowed: {_PRIORITIES}")


class InputProcessor:
    """Reader of prompts: checks and tokenizes them.

    tokenizer: None if prompts can only be token ids. images: None for a model without vision.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        limit: TextLimit,
        images: ImagePrompts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limit = limit
        self._images = images

    def process(
        self, prompt: Prompt, salt: str | None = None, *, similar: bool = False
    ) -> PreparedPrompt:
        """Check a prompt, and tokenize its text. Raises RequestError.

        similar: an image of the prompt may be replaced by an earlier image, if one is a copy of the
        other. The earlier image must be from the tenant with this salt.
        """
        if isinstance(prompt, PreparedPrompt):
            ready = prompt
        elif isinstance(prompt, Mapping):
            ready = self._read(prompt, salt, similar)
        elif isinstance(prompt, str):
            ready = self._read({"prompt": prompt}, salt, similar)
        elif _may_be_ids(prompt):
            ready = self._read({"prompt_token_ids": prompt}, salt, similar)
        else:
            raise RequestError(
                f"a prompt is a {type(prompt).__name__}; allowed: a string or a list of token ids"
            )
        if not ready.token_ids:
            raise RequestError("the prompt is empty; allowed: at least one token")
        self._check_length(len(ready.token_ids))
        for token_id in (min(ready.token_ids), max(ready.token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise self._invalid_token(token_id)
        return ready

    def _read(self, prompt: Mapping[Any, Any], salt: str | None, similar: bool) -> PreparedPrompt:
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not set(prompt) <= _KEYS or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                f"a prompt has the keys {describe(list(prompt))}; allowed: 'prompt' or "
                "'prompt_token_ids', and 'multi_modal_data' for images"
            )
        check_absent({key: prompt.get(key) for key in _ABSENT_KEYS})
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f"the prompt is {describe(text)}, a {type(text).__name__}; allowed: a string, or "
                "token ids under 'prompt_token_ids'"
            )
        images = _image_field(prompt, "multi_modal_data")
        if images is None and prompt.get("multi_modal_data"):
            raise RequestError(
                "multi_modal_data has None as its image; allowed: an image or a list"
            )
        image_ids = _image_field(prompt, "multi_modal_uuids")
        if image_ids is not None and images is None:
            raise RequestError(
                "the prompt has multi_modal_uuids without images in multi_modal_data"
            )
        if images is not None and self._images is None:
            raise RequestError("the prompt has images, and the model takes only text")
        if text is not None:
            self._limit.check("the prompt", text)
        if ids is not None:
            token_ids = self._read_ids(ids)
        elif text is None:
            raise RequestError(
                "the prompt is None; allowed: a string under 'prompt' or token ids under "
                "'prompt_token_ids'"
            )
        elif self._tokenizer is None:
            raise RequestError("the model has no tokenizer; allowed: token ids instead of text")
        elif self._images is not None and images is None:
            token_ids = self._images.tokenize(text)
        else:
            max_model_len = self._limit.max_model_len
            token_ids = encode_text(self._tokenizer, text, max_model_len=max_model_len)
        if self._images is None:
            return PreparedPrompt(token_ids, text)
        self._images.check_placeholders(token_ids, [] if images is None else images)
        if images is None:
            return PreparedPrompt(token_ids, text)
        loaded = self._images.read(images, image_ids, salt, similar=similar)
        return self._images.prepare(text, token_ids, loaded)

    def _read_ids(self, ids: Any) -> list[int]:
        """Return token ids as a list of Python integers. Raises RequestError."""
        if not _may_be_ids(ids):
            raise RequestError(
                f"prompt_token_ids is {describe(ids)}, a {type(ids).__name__}; allowed: a "
                "list of integers"
            )
        try:
            self._check_length(len(ids))
        except OverflowError:  # a range longer than sys.maxsize
            self._check_length(sys.maxsize)
        if isinstance(ids, (np.ndarray, torch.Tensor)):
            ids = ids.tolist()
        rest = iter(ids)
        token_ids: list[int] = []
        while chunk := list(islice(rest, _CHUNK)):
            if not set(map(type, chunk)) <= {int}:
                for token_id in chunk:
                    if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
                        raise self._invalid_token(token_id)
                chunk = list(map(int, chunk))
            token_ids += chunk
        return token_ids

    def _invalid_token(self, token_id: object) -> RequestError:
        return RequestError(
            f"token id {describe(token_id)} is not an integer from 0 to {self._vocab_size - 1}"
        )

    def _check_length(self, count: int) -> None:
        if count >= self._limit.max_model_len:
            raise too_many_tokens(count, self._limit.max_model_len)


def _may_be_ids(ids: object) -> bool:
    """Return True for a sequence, or an array of integers with one dimension."""
    if isinstance(ids, np.ndarray):
        return ids.ndim == 1 and ids.dtype.kind in "iu"
    if isinstance(ids, torch.Tensor):
        return ids.ndim == 1 and ids.dtype in _INTEGERS
    return isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray, memoryview))


def _image_field(prompt: Mapping[Any, Any], key: str) -> Any:
    """Return the entry "image" of a prompt's field; None if the prompt has none."""
    field = prompt.get(key)
    if field is None:
        return None
    if not isinstance(field, Mapping) or set(field) - {"image"}:
        raise RequestError(
            f"{key} is {describe(field)}; allowed: {{'image': ...}} with one image or a list; "
            "other media are not supported"
        )
    return field.get("image")


_BANNING = ("allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")
"""Sampling parameters that ban tokens."""


class ProcessorFactory:
    """Maker of the logits processors of a model's requests. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars = GrammarCompiler(vocabulary)

    def make(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> list[tuple[LogitsProcessor, ...]]:
        """Return the processors of each answer of a request. Raises RequestError."""
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
        words = _encode_words(params.bad_words, tokenizer) if params.bad_words else []
        check_vocabulary("bad_words", [max(word) for word in words], size)
        answers = []
        for _ in range(params.n):
            processors = list(shared)
            if words:
                processors.append(BadWords(words))
            if params.logits_processors:
                processors.append(CustomProcessors(params.logits_processors, prompt_token_ids))
            if params.structured_outputs is not None:
                constraint = params.structured_outputs.constraint
                stops = params.stop_token_ids or ()
                mask = self._grammars.mask(constraint, stops, ignore_eos=params.ignore_eos)
                processors.append(mask)
            answers.append(tuple(processors))
        self._check_first_token(params, answers[0])
        return answers

    def _check_first_token(
        self, params: SamplingParams, processors: Sequence[LogitsProcessor]
    ) -> None:
        """Raise RequestError if the processors together ban every first token."""
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
            raise RequestError(f"{' and '.join(names)} together ban every first token of an answer")


def _encode_words(words: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> list[Word]:
    """Return the token ids of each word, with and without a space before it, as in vLLM.

    Raises RequestError.
    """
    if tokenizer is None:
        raise RequestError("bad_words needs a tokenizer; the model has no tokenizer")
    encoded: dict[Word, None] = {}
    for word in words:
        plain, spaced = (
            tuple(encode_text(tokenizer, text, add_special_tokens=False))
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not plain:
            raise RequestError(f"bad_words has {word!r}, which has no tokens")
        encoded[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            encoded[spaced] = None
    return list(encoded)


class ModelFacts(NamedTuple):
    """Properties of a loaded model and its cache, which requests and log messages need.

    vocab_size: the width of the logits. shares: the weight of each owner in the division of the
    cache. num_states, state_bytes: number and total bytes of the slots for states of recurrent
    layers; 0 without recurrent layers. num_window_blocks, window: number of window blocks, and
    tokens of the sliding window; 0 without a window.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_blocks: int
    kv_cache_bytes: int
    hasher: BlockHasher
    shares: Shares
    num_states: int = 0
    state_bytes: int = 0
    num_window_blocks: int = 0
    window: int = 0


class Frontend:
    """Maker of requests for one model. Thread-safe.

    tokenizer: None if prompts can only be token ids. images: None for a model without vision.
    require_open: raises EngineError once the engine is closed. Answers whose requests have no seed
    get the seeds `config.seed`, `config.seed` + 1 and so on.
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
        self.tokenizer, self.facts, self.config = tokenizer, facts, config
        self.adapters, self.images = adapters, images
        self.require_open = require_open
        self.text_limit = TextLimit(tokenizer, facts.max_model_len)
        self._inputs = InputProcessor(tokenizer, facts.vocab_size, self.text_limit, images)
        self._processors = ProcessorFactory(
            Vocabulary(tokenizer, facts.vocab_size, facts.eos_token_ids)
        )
        # Ids for requests without an id. Users cannot guess the id of another user's request.
        self._new_ids = map(f"request-{secrets.token_hex(8)}-{{}}".format, itertools.count())
        self._seeds = itertools.count(config.seed)
        self._token_text = make_token_text(tokenizer) if tokenizer is not None else None

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
        """Check and tokenize a request. adapter: name of an adapter.

        Raises RequestError, and EngineError once the engine is closed.
        """
        self.require_open()
        check_request(params, request_id, salt, adapter, priority)
        prompt_salt: Any = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        check_name("cache_salt", prompt_salt)
        if prompt_salt is not None and salt not in (None, prompt_salt):
            raise RequestError(
                f"cache_salt is {describe(prompt_salt)} in the prompt and {describe(salt)} in the "
                "call; allowed: one of them"
            )
        salt = salt if prompt_salt is None else str(prompt_salt)
        params = params.clone()  # the caller may change the original
        params.check()
        ready = self._inputs.process(
            prompt, salt, similar=params.similar_images and params.is_stored
        )
        group = RequestGroup(
            request_id if request_id is not None else next(self._new_ids),
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
        group.prediction = self._read_prediction(params)
        group.requests = [
            self._make_answer(group, index, salt, chain) for index, chain in enumerate(processors)
        ]
        return group

    def _read_prediction(self, params: SamplingParams) -> Sequence[int]:
        """Return up to `max_model_len` tokens of the predicted answer. Raises RequestError."""
        prediction = params.prediction or ()
        if isinstance(prediction, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prediction is a string, and the model has no tokenizer; allowed: token ids"
                )
            self.text_limit.check("prediction", prediction)
            prediction = encode_text(self.tokenizer, prediction, add_special_tokens=False)
        check_vocabulary("prediction", prediction, self.facts.vocab_size)
        return prediction[: self.facts.max_model_len]

    def _make_answer(
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
            public=facts.hasher.public,
        )
        sequence.is_stored = params.is_stored
        generator = None
        if params.temperature != 0:  # answer i uses the request's seed plus i
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
        manager.config.num_states,
        core.state_bytes,
        manager.config.num_window_blocks,
        manager.config.window,
    )
    images = None
    if core.vision is not None and core.images is not None:
        images = ImagePrompts(core.vision, tokenizer, core.config, core.images)
    return Frontend(tokenizer, facts, core.config, core.adapters, images, core.require_open)
