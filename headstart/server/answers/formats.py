"""Which format a model's answers have: what its chat template shows decides, here alone."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Container
from dataclasses import dataclass

from headstart.server.answers import hermes, llama, mistral, reasoning
from headstart.server.answers.source import Reading, Source

__all__ = ["HERMES", "LLAMA", "MISTRAL", "CallFormat", "choose_format", "shows_reasoning"]


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls of tools.

    read: reads them out of an answer, given the names of the tools. markers: what the text must
    keep though a tokenizer may call it special. Forced calls are written as `head`, then each
    call, parted by `between`, then `tail`; a call is `opening`, with the name in JSON for {name},
    then the arguments, then `closing`. between: None if a model makes one call at a time.
    id_length: of a call's id, where templates ask for it.
    """

    read: Callable[[Source, Container[str]], Reading[None]]
    markers: tuple[str, ...]
    opening: str
    closing: str
    head: str = ""
    tail: str = ""
    between: str | None = None
    id_length: int | None = None

    def new_id(self, kind: str) -> str:
        """A call's id; `kind` is what the API begins it with, where the format leaves room."""
        if self.id_length is None:
            return f"{kind}{secrets.token_hex(12)}"
        return "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))


_LETTERS = string.ascii_letters + string.digits

HERMES = CallFormat(
    read=hermes.read_hermes,
    markers=(hermes.OPEN, hermes.CLOSE),
    opening=hermes.OPEN + '\n{"name": {name}, "arguments": ',
    closing="}\n" + hermes.CLOSE,
    between="\n",
)
LLAMA = CallFormat(
    read=llama.read_llama,
    markers=(llama.TAG,),
    opening='{"name": {name}, "parameters": ',
    closing="}",
)
MISTRAL = CallFormat(
    read=mistral.read_mistral,
    markers=(mistral.TAG, mistral.ARGUMENTS, mistral.CALL_ID),
    opening='{"name": {name}, "arguments": ',
    closing="}",
    head=mistral.TAG + "[",
    tail="]",
    between=", ",
    id_length=9,
)

_SHOWN = (("<function=", None), (mistral.TAG, MISTRAL), (hermes.OPEN, HERMES))


def choose_format(template: str) -> CallFormat | None:
    """The format of the calls that a chat template shows; None if it shows none that is known.

    A template that takes tools without any mark of calls is taken for one of Llama's kind, whose
    calls are plain JSON.
    """
    for shown, found in _SHOWN:
        if shown in template:
            return found
    return LLAMA if "tools" in template else None


def shows_reasoning(template: str) -> bool:
    """Whether a chat template knows reasoning."""
    return reasoning.OPEN in template or reasoning.CLOSE in template
