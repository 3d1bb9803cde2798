"""From what a user hands over to token ids that the model can take, or a clear error."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from headstart.cache import MultiModalItem
from headstart.engine.image_prompt import ImagePrompts, Tenant
from headstart.engine.prompt import PreparedPrompt
from headstart.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any] | PreparedPrompt
"""A text, token ids, vLLM's `{"prompt": ...}` / `{"prompt_token_ids": ...}`, to which may come
`"multi_modal_data": {"image": ...}`, or one that is ready but for the checks."""

_KEYS = frozenset({"prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids"})


class InputProcessor:
    """Checks and tokenises prompts.

    `tokenizer` may be None: then prompts are token ids. `images` is None for a model that sees
    none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        max_model_len: int,
        images: ImagePrompts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._images = images

    def process(self, prompt: Prompt, similar: Tenant | None = None) -> PreparedPrompt:
        """The prompt, checked, and tokenised if it came as a text. Raises RequestError.

        similar: whose images may take the place of its own, if they look alike.
        """
        ready = self._read(prompt, similar)
        self._check(ready.token_ids)
        if ready.extras is not None:
            _check_items(ready.extras.items, len(ready.token_ids))
        return ready

    def _read(self, prompt: Prompt, similar: Tenant | None) -> PreparedPrompt:
        if isinstance(prompt, PreparedPrompt):
            return prompt
        if isinstance(prompt, str):
            return PreparedPrompt(self._tokenize(prompt), prompt)
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt, similar)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return PreparedPrompt(self._check_plain(cast("Sequence[int]", prompt)))
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        )

    def _read_mapping(self, prompt: Mapping[str, Any], similar: Tenant | None) -> PreparedPrompt:
        if set(prompt) - _KEYS or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                "a prompt has the key 'prompt' or 'prompt_token_ids', and 'multi_modal_data' for "
                f"images, not {sorted(prompt)}"
            )
        text = prompt.get("prompt")
        if not prompt.get("multi_modal_data"):
            if "prompt_token_ids" in prompt:
                return PreparedPrompt(self._check_plain(prompt["prompt_token_ids"]), text)
            return self._read(str(text), None)
        sources, own_ids = _image_data(prompt)
        if self._images is None:
            raise RequestError("the prompt has images, and the model takes text alone")
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is None:
            token_ids = self._require_tokenizer().encode(str(text), verbose=False)
        loaded = self._images.read(sources, own_ids, similar)
        return self._images.prepare(text, token_ids, loaded)

    def _check_plain(self, token_ids: Sequence[int]) -> list[int]:
        """Token ids without images; a model that sees takes no placeholder among them."""
        if self._images is not None:
            self._images.check_plain(token_ids)
        return list(token_ids)

    def _tokenize(self, text: str) -> list[int]:
        tokenizer = self._require_tokenizer()
        if self._images is not None:
            return self._images.tokenize(text)
        token_ids: list[int] = tokenizer.encode(text, verbose=False)
        return token_ids

    def _require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise RequestError("the model came without a tokenizer: give token ids, not a text")
        return self._tokenizer

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"token id {token_id!r} is not an integer from 0 to {self._vocab_size - 1}"
                )
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with room for one more it may have "
                f"{self._max_model_len - 1} at the most (max_model_len {self._max_model_len})"
            )


def _image_data(prompt: Mapping[str, Any]) -> tuple[Any, Any]:
    """The images and the user's ids for them."""
    found = []
    for key in ("multi_modal_data", "multi_modal_uuids"):
        given = prompt.get(key) or {}
        if not isinstance(given, Mapping) or set(given) - {"image"}:
            raise RequestError(f"{key} is {{'image': one or a list}}; there are only images")
        found.append(given.get("image"))
    return found[0], found[1]


def _check_items(items: Sequence[MultiModalItem], num_tokens: int) -> None:
    end = 0
    for item in sorted(items, key=lambda item: item.offset):
        if item.offset < end or item.offset + item.length > num_tokens:
            raise RequestError(
                f"an item of {item.length} tokens at {item.offset} overlaps another or stands "
                f"outside the {num_tokens} tokens of the prompt"
            )
        end = item.offset + item.length
