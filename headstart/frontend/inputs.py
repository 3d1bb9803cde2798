"""Prompts of users, checked and converted to token ids that the model can take."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headstart.cache import MultiModalItem
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import RequestError
from headstart.frontend.images.prompt import NOBODY, ImagePrompts, Tenant
from headstart.frontend.text import TextLimit, encode_text, too_many_tokens
from headstart.frontend.vllm_compat import PromptType
from headstart.validation import Number, check_absent, check_name, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = PromptType | Mapping[str, Any] | PreparedPrompt
"""A text, token ids, vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`, optionally with
`"multi_modal_data": {"image": ...}` and a `"cache_salt"`, or a prompt that only lacks the checks.

Token ids are a sequence of integers, or a numpy array or torch tensor of one dimension."""

_ABSENT_KEYS = ("media_io_kwargs", "mm_processor_kwargs", "token_type_ids", "prompt_embeds")
"""Keys of vLLM's prompts that must be empty."""
_KEYS = {
    *("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "cache_salt"),
    "prompt_token_offsets",  # which has no effect
    *_ABSENT_KEYS,
}

_PRIORITIES = Number(int, -(2**63), 2**63 - 1)
_PIECE = 1 << 16  # token ids that are checked while no other thread runs
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def choose_salt(prompt: object, salt: str | None) -> str | None:
    """Return the salt of a call or of its prompt. Raises RequestError for two that differ."""
    own: Any = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    check_name("cache_salt", own)
    if own is not None and salt not in (None, own):
        raise RequestError(
            f"the prompt's cache_salt is {describe(own)}, and the call's {describe(salt)}; "
            "allowed: one of them"
        )
    return salt if own is None else str(own)


def check_request(
    params: object, request_id: object, salt: object, adapter: object, priority: object
) -> None:
    """Check the options of a request apart from its prompt. Raises RequestError."""
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
    """Checks and tokenizes prompts.

    `tokenizer` may be None: then prompts are token ids. `images` is None for a model without
    vision.
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
        """Return the prompt, checked, and tokenized if it is a text. Raises RequestError.

        tenant: the owner of its images.
        """
        if isinstance(prompt, PreparedPrompt):
            ready = replace(prompt, token_ids=self._read_ids(prompt.token_ids))
        elif isinstance(prompt, str):
            ready = self._prepare({"prompt": prompt}, tenant)
        elif isinstance(prompt, Mapping):
            ready = self._prepare(prompt, tenant)
        elif _may_be_ids(prompt):
            ready = self._prepare({"prompt_token_ids": prompt}, tenant)
        else:
            raise RequestError(
                f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
            )
        if not ready.token_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        self._check_length(len(ready.token_ids))
        for token_id in (min(ready.token_ids), max(ready.token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise self._no_token(token_id)
        if ready.extras is not None:
            _check_items(ready.extras.items, len(ready.token_ids))
        return ready

    def _prepare(self, prompt: Mapping[Any, Any], tenant: Tenant) -> PreparedPrompt:
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not set(prompt) <= _KEYS or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                "a prompt has the key 'prompt' or 'prompt_token_ids', and 'multi_modal_data' for "
                f"images, not {describe(list(prompt))}"
            )
        check_absent({key: prompt.get(key) for key in _ABSENT_KEYS})
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f"the prompt is {describe(text)}, a {type(text).__name__}; allowed: a text, or "
                "token ids under 'prompt_token_ids'"
            )
        images = _image_field(prompt, "multi_modal_data")
        if images is None and prompt.get("multi_modal_data"):
            raise RequestError("multi_modal_data has None for an image; allowed: one or a list")
        image_ids = _image_field(prompt, "multi_modal_uuids")
        if image_ids is not None and images is None:
            raise RequestError("the prompt has multi_modal_uuids and no images in multi_modal_data")
        if images is not None and self._images is None:
            raise RequestError("the prompt has images, and the model takes text alone")
        if text is not None:
            self._limit.check("the prompt", text)
        if ids is not None:
            token_ids = self._read_ids(ids)
        elif text is None:
            raise RequestError(
                "the prompt is None; allowed: a text under 'prompt' or token ids under "
                "'prompt_token_ids'"
            )
        elif self._tokenizer is None:
            raise RequestError("the model came without a tokenizer: give token ids, not a text")
        elif self._images is not None and images is None:
            token_ids = self._images.tokenize(text)
        else:
            longest = self._limit.max_model_len
            token_ids = encode_text(self._tokenizer, text, max_model_len=longest)
        if self._images is None:
            return PreparedPrompt(token_ids, text)
        self._images.check_placeholders(token_ids, [] if images is None else images)
        if images is None:
            return PreparedPrompt(token_ids, text)
        loaded = self._images.read(images, image_ids, tenant)
        return self._images.prepare(text, token_ids, loaded)

    def _read_ids(self, ids: Any) -> list[int]:
        """Return token ids as a list of Python's integers, no longer than a prompt may be."""
        if not _may_be_ids(ids):
            raise RequestError(
                f"prompt_token_ids is {describe(ids)}, a {type(ids).__name__}; allowed: a "
                "list of integers"
            )
        try:
            self._check_length(len(ids))
        except OverflowError:  # a range that is longer than any memory
            self._check_length(sys.maxsize)
        if isinstance(ids, (np.ndarray, torch.Tensor)):
            ids = ids.tolist()
        rest = iter(ids)
        token_ids: list[int] = []
        while piece := list(islice(rest, _PIECE)):
            if not set(map(type, piece)) <= {int}:
                for token_id in piece:
                    if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
                        raise self._no_token(token_id)
                piece = list(map(int, piece))
            token_ids += piece
        return token_ids

    def _no_token(self, token_id: object) -> RequestError:
        return RequestError(
            f"token id {describe(token_id)} is not an integer from 0 to {self._vocab_size - 1}"
        )

    def _check_length(self, count: int) -> None:
        if count >= self._limit.max_model_len:
            raise too_many_tokens(count, self._limit.max_model_len)


def _may_be_ids(ids: object) -> bool:
    """Return True for a sequence of numbers by its type; arrays must have one dimension."""
    if isinstance(ids, np.ndarray):
        return ids.ndim == 1 and ids.dtype.kind in "iu"
    if isinstance(ids, torch.Tensor):
        return ids.ndim == 1 and ids.dtype in _INTEGERS
    return isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray, memoryview))


def _image_field(prompt: Mapping[Any, Any], key: str) -> Any:
    """Return a prompt's images under a key, None if there are none."""
    field = prompt.get(key)
    if field is None:
        return None
    if not isinstance(field, Mapping) or set(field) - {"image"}:
        raise RequestError(
            f"{key} is {describe(field)}; allowed: {{'image': one or a list}}; there are only "
            "images"
        )
    return field.get("image")


def _check_items(items: Sequence[MultiModalItem], num_tokens: int) -> None:
    end = 0
    for item in sorted(items, key=lambda item: item.offset):
        if item.offset < end or item.offset + item.length > num_tokens:
            raise RequestError(
                f"an item of {item.length} tokens at {item.offset} overlaps another or stands "
                f"outside the {num_tokens} tokens of the prompt"
            )
        end = item.offset + item.length
