"""Conversion of texts to token ids, and the text of an answer as it grows.

Texts that are too long are refused before tokenization. If every byte ends up in a token, text of
n UTF-8 bytes has at least n / (bytes of the longest token) tokens. But a tokenizer may lose bytes:
NFKC turns up to four bytes into one, white space may be stripped or collapsed, and an unknown word
may become one token. To detect this, text with characters that tokenizers often change is encoded
and decoded. If it changes, the limit in bytes is four times as large. A longer text is refused even
if it has few tokens.

The text of a token depends on the tokens around it: a character may extend over several tokens, and
many decoders drop a leading space. So each step decodes a short window twice, with and without the
new tokens, and emits the difference once it ends in a whole character. The first window begins in
the prompt. Each later window begins with the tokens that were emitted last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.engine.params import SamplingParams
from headstart.errors import PromptTooLongError, RequestError
from headstart.imports import load_module
from headstart.models.tokenizer import load_tokenizer
from headstart.validation import check_utf8, describe, shorten

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # decoders return it for invalid bytes and incomplete characters

# Numbers of prompt tokens to decode as context of the answer. A larger number is tried if the
# tokens have no text, or if their text begins within a character.
_CONTEXT_SIZES = (5, 20, 80)
_LONG = 1 << 16  # characters
# The longest token is assumed to have at least this many bytes. So text of up to `max_model_len`
# times this many bytes is accepted without reading the vocabulary.
_MIN_LONGEST = 16
_SHRINK = 4  # text may be this many times longer if the tokenizer loses bytes

# Runs of white space, a digit in a circle, a decomposed letter, a ligature, an emoji.
_DIFFICULT = "  a \n\n\t b \u2460 e\u0301 \ufb01 \u2126 \U0001f642 end"


def too_many_tokens(count: int, max_model_len: int) -> PromptTooLongError:
    """Return the error for a prompt that is too long."""
    return PromptTooLongError(
        f"the prompt has {count} tokens; allowed: {max_model_len - 1} at most, so that one "
        f"token of an answer fits (max_model_len {max_model_len})",
        max_model_len,
    )


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    add_special_tokens: bool = True,
    max_model_len: int | None = None,
) -> list[int]:
    """Return the token ids of a string. Raises RequestError if the tokenizer refuses it.

    max_model_len: a long text with this many tokens or more is refused before its ids become Python
    integers. A long text is encoded without transformers' mask and offsets, which would block all
    threads for 0.1 s for a million tokens.
    """
    try:
        backend: Tokenizer | None = None
        if len(text) > _LONG:
            backend = load_module("headstart.models.transformers_tools").plain_backend(tokenizer)
        if backend is not None:
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            if max_model_len is not None and len(encoding) >= max_model_len:
                raise too_many_tokens(len(encoding), max_model_len)
            token_ids: list[int] = encoding.ids
        else:
            token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return token_ids
    except RequestError:
        raise
    except Exception as error:  # for example an unknown word, in a tokenizer without a token for it
        raise RequestError(
            f"the tokenizer refuses {describe(text)}: {type(error).__name__}: {shorten(str(error))}"
        ) from error


def _decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], *, skip_special_tokens: bool = False
) -> str:
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


class PromptCodec:
    """Conversion of pieces of prompts to token ids and back.

    tokenizer: None for a model without one. max_model_len: see `encode_text`. A subclass adds texts
    and ids that stand for images.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises RequestError for a model without one."""
        if self._tokenizer is None:
            raise RequestError("a chat needs a tokenizer; the model has no tokenizer")
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, which already contains its special tokens."""
        return encode_text(
            self.tokenizer, text, add_special_tokens=False, max_model_len=self._max_model_len
        )

    def encode_anchored(self, text: str) -> list[list[int]]:
        """Return `[ids]` for text in the middle of a prompt, or `[]`.

        The text is tokenized after a special token, because some tokenizers add a space at the
        beginning of text. No text merges with a special token. The list is empty if the tokenizer
        has no special token that can precede text.
        """
        for token_id in self.tokenizer.all_special_ids[:1]:
            anchored = self.encode(self.decode([token_id]) + text)
            if anchored[:1] == [token_id]:
                return [anchored[1:]]
        return []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return _decode(self.tokenizer, list(token_ids))

    def normalize(self, text: str) -> str:
        """Return the text with each mark of an image replaced by the text of the image's tokens."""
        return text

    def escape(self, text: str) -> str:
        """Return the text in which placeholders of images are marked as ordinary text."""
        return text


class TextLimit:
    """A limit on the bytes of text that must fit into `max_model_len` tokens. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len

    def check(self, name: str, text: str) -> None:
        """Raise RequestError for text that is too long or has a lone surrogate."""
        size = check_utf8(name, text)
        if size > self.max_model_len * _MIN_LONGEST and size > self.max_bytes:
            raise PromptTooLongError(
                f"{name} has {size:,} bytes of text; allowed: {self.max_bytes:,} at most "
                f"(max_model_len {self.max_model_len})",
                self.max_model_len,
            )

    @cached_property
    def max_bytes(self) -> int:
        """UTF-8 bytes of the longest text that may fit; the first use reads the vocabulary."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return self.max_model_len * _MIN_LONGEST
        longest = max(len(token.encode("utf-8", "replace")) for token in tokenizer.get_vocab())
        factor = 1 if _is_lossless(tokenizer) else _SHRINK
        return self.max_model_len * max(longest, _MIN_LONGEST) * factor


def _is_lossless(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer preserves a difficult text and no added token strips spaces."""
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return False
    try:
        token_ids = encode_text(tokenizer, _DIFFICULT, add_special_tokens=False)
    except RequestError:
        return False
    return _decode(tokenizer, token_ids) == _DIFFICULT


def check_text_fits(folder: Path, text: str, limit: int) -> None:
    """Raise RequestError if a prompt and one token of an answer exceed `limit` tokens.

    folder: the model, which need not be loaded. Raises ModelError.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        return
    TextLimit(tokenizer, limit).check("the prompt", text)
    count = len(encode_text(tokenizer, text, add_special_tokens=False))
    if count >= limit:
        raise RequestError(
            f"the prompt has {count:,} tokens with its files; the context holds {limit:,}, and an "
            "answer needs at least one"
        )


def make_token_text(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Return a function for the text of a single token within text. Thread-safe.

    The function returns U+FFFD for the bytes of an incomplete character.
    """
    # Each token is decoded after an ordinary token, as decoders may drop a space at the beginning.
    anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    length = len(_decode(tokenizer, anchor))
    return cache(lambda token_id: _decode(tokenizer, [*anchor, token_id])[length:])


class Detokenizer:
    """Incremental decoder of one answer. Without a tokenizer all texts are empty.

    Prompt and answer, decoded together, give the prompt's text followed by the joined results of
    `push` and `finish`. Invalid bytes from a tokenizer with byte fallback are an exception: an
    invalid byte changes the text of bytes that may already be emitted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []  # the last tokens of the prompt, then the answer
        for size in _CONTEXT_SIZES if tokenizer is not None else ():
            self._token_ids = list(prompt_token_ids[-size:])
            text = self._decode(self._token_ids)
            if (text and not text.startswith(REPLACEMENT)) or size >= len(prompt_token_ids):
                break
        self._window = 0  # index of the first token that is decoded again
        self._emitted = len(self._token_ids)  # number of tokens whose text is emitted
        # False while `_emitted` is within a character, where no window may begin. A prompt may end
        # within a character.
        self._is_at_boundary = not self._decode(self._token_ids).endswith(REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Add a token; return the new text, or "" within a character."""
        self._token_ids.append(token_id)
        text = self._pending()
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """Add the last tokens; return the remaining text, with U+FFFD for incomplete characters."""
        self._token_ids += token_ids
        return self._emit(self._pending())

    def _pending(self) -> str:
        """Return the text of the tokens that are not emitted yet."""
        emitted = self._decode(self._token_ids[self._window : self._emitted])
        text = self._decode(self._token_ids[self._window :])
        if not text.startswith(emitted):  # the new tokens complete the prompt's last character
            emitted = emitted.rstrip(REPLACEMENT)
        return text[len(emitted) :]

    def _emit(self, text: str) -> str:
        if text:
            self._window = self._emitted if self._is_at_boundary else self._window
            self._is_at_boundary = True
            self._emitted = len(self._token_ids)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None or not token_ids:
            return ""
        skip = self._skip_special_tokens
        return _decode(self._tokenizer, token_ids, skip_special_tokens=skip)


class OutputText:
    """The text of one answer and the conditions that end it.

    An answer ends at an end-of-text or stop token, at a stop string, or at its maximum length.
    `stop_reason` is the stop string or the id of the stop token. Text that may be the beginning of
    a stop string is held back. Tokens are decoded when the text is read, or on arrival if there are
    stop strings. max_total_tokens: maximum number of tokens of prompt and answer together.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        max_total_tokens: int,
    ) -> None:
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._stops = params.stop_strings
        self._longest_stop = max(map(len, self._stops), default=0)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._ends = self._stop_ids | (frozenset() if params.ignore_eos else eos_token_ids)
        self._shows_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._max_total_tokens = max_total_tokens
        self._unread: list[int] = []  # tokens that are not decoded yet
        self._all = ""  # decoded text, including text that is held back
        self._num_tokens = 0
        self._ended = False  # True if no more tokens will arrive
        self._is_final = False  # True if `_all` is the final text of an ended answer

    def push(self, token_id: int, total_tokens: int) -> str | None:
        """Add a token; return the finish reason "stop" or "length" if the token ends the answer.

        total_tokens: number of tokens of prompt and answer, with this token.
        """
        self._num_tokens += 1
        may_end = self._num_tokens >= self._min_tokens
        if may_end and token_id in self._ends:
            if token_id in self._stop_ids:
                self.stop_reason = token_id
                if self._shows_stop:
                    self._unread.append(token_id)
            self._ended = True
            return "stop"
        self._unread.append(token_id)
        if self._stops:
            seen = len(self._all)
            self._decode()
            if may_end and self._find_stop(seen):
                return "stop"
        if total_tokens >= self._max_total_tokens or self._num_tokens == self._max_tokens:
            self._ended = True
            return "length"
        return None

    def end(self) -> None:
        """End the answer with the tokens that it has."""
        self._ended = True

    @property
    def text(self) -> str:
        """The text without the part that is held back."""
        if self._ended:
            if not self._is_final:
                self._all += self._detokenizer.finish(self._unread)
                self._is_final = True
            return self._all
        self._decode()
        for count in range(min(self._longest_stop - 1, len(self._all)), 0, -1):
            if any(stop.startswith(self._all[-count:]) for stop in self._stops):
                return self._all[:-count]
        return self._all

    def _decode(self) -> None:
        """Decode token by token, so that an incomplete character delays only its own tokens."""
        for token_id in self._unread:
            self._all += self._detokenizer.push(token_id)
        self._unread.clear()

    def _find_stop(self, seen: int) -> bool:
        """End the text at the first stop string; return False if there is none.

        seen: length of the text that was searched before. A stop string must extend beyond it.
        """
        starts = [(self._all.find(s, max(0, seen - len(s) + 1)), s) for s in self._stops]
        hits = [(start, stop) for start, stop in starts if start >= 0]
        if not hits:
            return False
        start, self.stop_reason = min(hits, key=lambda hit: hit[0])
        self._all = self._all[: start + len(self.stop_reason) * self._shows_stop]
        self._ended = self._is_final = True
        return True
