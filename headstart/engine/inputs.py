"""From what a user hands over to token ids that the model can take, or a clear error."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from headstart.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": ...}` / `{"prompt_token_ids": ...}`."""


class InputProcessor:
    """Checks and tokenises prompts. `tokenizer` may be None: then prompts are token ids."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def process(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it came as one, and its token ids. Raises RequestError."""
        text, token_ids = self._read(prompt)
        self._check(token_ids)
        return text, token_ids

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenize(prompt)
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(
                    f"a prompt has the key 'prompt' or 'prompt_token_ids', not {sorted(prompt)}"
                )
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return text, list(prompt["prompt_token_ids"])
            return self._read(str(text))
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return None, list(cast("Sequence[int]", prompt))
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        )

    def _tokenize(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("the model came without a tokenizer: give token ids, not a text")
        token_ids: list[int] = self._tokenizer.encode(text, verbose=False)
        return token_ids

    def _check(self, token_ids: list[int]) -> None:
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
