"""From what a user hands over to token ids that the model can take, or a clear error."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headstart.cache import MultiModalItem
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import RequestError
from headstart.frontend.images.prompt import NOBODY, ImagePrompts, Tenant
from headstart.frontend.text import TextLimit, encode_text, too_many_tokens
from headstart.frontend.vllm_types import PromptType
from headstart.validation import Number, check_absent, check_name, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = PromptType | Mapping[str, Any] | PreparedPrompt
"""A text, token ids, vLLM's `{"prompt": ...}` / `{"prompt_token_ids": ...}`, to which may come
`"multi_modal_data": {"image": ...}` and a `"cache_salt"`, or one that is ready but for the checks.

Token ids are a sequence of integers, or a numpy array or torch tensor of one dimension."""

# Keys of vLLM's prompts that must ask for nothing.
_KEYS_WITHOUT_VALUE = ("media_io_kwargs", "mm_processor_kwargs", "token_type_ids", "prompt_embeds")
_KEYS = {
    *("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "cache_salt"),
    "prompt_token_offsets",  # which has no effect
    *_KEYS_WITHOUT_VALUE,
}

_PRIORITIES = Number(int, -(2**63), 2**63 - 1)
_PIECE = 1 << 16  # token ids that are looked at while no other thread runs
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RequestOptions(NamedTuple):
    """Options of a request apart from its prompt and sampling: see `Engine.prepare`."""

    request_id: str | None = None
    salt: str | None = None
    adapter: str | None = None
    priority: int = 0


def choose_salt(prompt: object, salt: str | None) -> str | None:
    """The salt of a call, or that of a prompt's `cache_salt`. Raises RequestError for two."""
    own = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    check_name("cache_salt", own)
    if own is None or own == salt:
        return salt
    if salt is not None:
        raise RequestError(
            f"the prompt's cache_salt is {describe(own)}, and the call's {describe(salt)}; "
            "allowed: one of them"
        )
    assert isinstance(own, str)
    return own


def check_request(params: object, options: RequestOptions) -> None:
    """Check what comes beside a prompt. Raises RequestError."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"the sampling parameters are {describe(params)}; allowed: a SamplingParams"
        )
    check_name("request_id", options.request_id)
    check_name("cache_salt", options.salt)
    check_name("adapter", options.adapter)
    if options.priority not in _PRIORITIES:
        raise RequestError(f"priority is {describe(options.priority)}; allowed: {_PRIORITIES}")


class _Given(NamedTuple):
    """A prompt's fields, their types checked; `text` or `token_ids` is there."""

    text: str | None
    token_ids: list[int] | None
    images: Any
    image_ids: Any


class InputProcessor:
    """Checks and tokenises prompts.

    `tokenizer` may be None: then prompts are token ids. `images` is None for a model that sees
    none.
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

    def process(self, prompt: Prompt, tenant: Tenant = NOBODY) -> PreparedPrompt:
        """The prompt, checked, and tokenised if it came as a text. Raises RequestError.

        tenant: whose stores its images are looked up in.
        """
        if isinstance(prompt, PreparedPrompt):
            ready = replace(prompt, token_ids=self._read_ids(prompt.token_ids))
        else:
            ready = self._prepare(self._read(prompt), tenant)
        self._check(ready.token_ids)
        if ready.extras is not None:
            _check_items(ready.extras.items, len(ready.token_ids))
        return ready

    def _read(self, prompt: object) -> _Given:
        if isinstance(prompt, str):
            return _Given(prompt, None, None, None)
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt)
        if _may_be_ids(prompt):
            return _Given(None, self._read_ids(prompt), None, None)
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        )

    def _read_mapping(self, prompt: Mapping[Any, Any]) -> _Given:
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not set(prompt) <= _KEYS or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                "a prompt has the key 'prompt' or 'prompt_token_ids', and 'multi_modal_data' for "
                f"images, not {describe(list(prompt))}"
            )
        check_absent({key: prompt.get(key) for key in _KEYS_WITHOUT_VALUE})
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f"the prompt is {describe(text)}, a {type(text).__name__}; allowed: a text, or "
                "token ids under 'prompt_token_ids'"
            )
        if text is None and token_ids is None:
            raise RequestError(
                "the prompt is None; allowed: a text under 'prompt' or token ids under "
                "'prompt_token_ids'"
            )
        images = _image_field(prompt, "multi_modal_data")
        if images is None and prompt.get("multi_modal_data"):
            raise RequestError("multi_modal_data has None for an image; allowed: one or a list")
        image_ids = _image_field(prompt, "multi_modal_uuids")
        if image_ids is not None and images is None:
            raise RequestError("the prompt has multi_modal_uuids and no images in multi_modal_data")
        return _Given(
            text, None if token_ids is None else self._read_ids(token_ids), images, image_ids
        )

    def _prepare(self, given: _Given, tenant: Tenant) -> PreparedPrompt:
        if given.text is not None:
            self._limit.check("the prompt", given.text)
        if given.images is not None:
            return self._prepare_images(given, tenant)
        token_ids = given.token_ids
        if token_ids is None:
            return PreparedPrompt(self._tokenize(cast("str", given.text)), given.text)
        if self._images is not None:  # none of them may be a placeholder
            self._images.check_plain(token_ids)
        return PreparedPrompt(token_ids, given.text)

    def _prepare_images(self, given: _Given, tenant: Tenant) -> PreparedPrompt:
        if self._images is None:
            raise RequestError("the prompt has images, and the model takes text alone")
        token_ids = given.token_ids
        if token_ids is None:
            token_ids = encode_text(self._require_tokenizer(), cast("str", given.text))
        self._images.check_placeholders(token_ids, given.images)
        loaded = self._images.read(given.images, given.image_ids, tenant)
        return self._images.prepare(given.text, token_ids, loaded)

    def _read_ids(self, given: Any) -> list[int]:
        """Token ids as a list of Python's integers, no longer than a prompt may be."""
        if not _may_be_ids(given):
            raise RequestError(
                f"prompt_token_ids is {describe(given)}, a {type(given).__name__}; allowed: a "
                "list of integers"
            )
        self._check_length(_length(given))
        if isinstance(given, (np.ndarray, Tensor)):
            given = given.tolist()
        given = iter(given)
        token_ids: list[int] = []
        while piece := list(islice(given, _PIECE)):
            if not set(map(type, piece)) <= {int}:
                piece = [self._read_id(token_id) for token_id in piece]
            token_ids += piece
        return token_ids

    def _read_id(self, token_id: object) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise self._no_token(token_id)
        return int(token_id)

    def _no_token(self, token_id: object) -> RequestError:
        return RequestError(
            f"token id {describe(token_id)} is not an integer from 0 to {self._vocab_size - 1}"
        )

    def _tokenize(self, text: str) -> list[int]:
        tokenizer = self._require_tokenizer()
        if self._images is not None:
            return self._images.tokenize(text)
        return encode_text(tokenizer, text, max_model_len=self._limit.max_model_len)

    def _require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise RequestError("the model came without a tokenizer: give token ids, not a text")
        return self._tokenizer

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        self._check_length(len(token_ids))
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise self._no_token(token_id)

    def _check_length(self, count: int) -> None:
        longest = self._limit.max_model_len
        if count >= longest:
            raise too_many_tokens(count, longest)


def _may_be_ids(given: object) -> bool:
    """True if a value is a sequence of numbers by its type; arrays must have one dimension."""
    if isinstance(given, np.ndarray):
        return given.ndim == 1 and given.dtype.kind in "iu"
    if isinstance(given, Tensor):
        return given.ndim == 1 and given.dtype in _INTEGERS
    return isinstance(given, Sequence) and not isinstance(
        given, (str, bytes, bytearray, memoryview)
    )


def _length(given: Any) -> int:
    try:
        return len(given)
    except OverflowError:  # a range that is longer than any memory
        return sys.maxsize


def _image_field(prompt: Mapping[Any, Any], key: str) -> Any:
    """A prompt's images under a key, None if there are none."""
    given = prompt.get(key)
    if given is None:
        return None
    if not isinstance(given, Mapping) or set(given) - {"image"}:
        raise RequestError(
            f"{key} is {describe(given)}; allowed: {{'image': one or a list}}; there are only "
            "images"
        )
    return given.get("image")


def _check_items(items: Sequence[MultiModalItem], num_tokens: int) -> None:
    end = 0
    for item in sorted(items, key=lambda item: item.offset):
        if item.offset < end or item.offset + item.length > num_tokens:
            raise RequestError(
                f"an item of {item.length} tokens at {item.offset} overlaps another or stands "
                f"outside the {num_tokens} tokens of the prompt"
            )
        end = item.offset + item.length
