"""A caller's own functions over logits, in the form that vLLM gave them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from headstart.engine.logits.protocol import Failures, LogitsProcessor, Rows
from headstart.errors import EngineError

__all__ = ["Callbacks"]


class Callbacks(LogitsProcessor):
    """Calls functions one after the other, each with what the one before returned.

    A function takes the answer's token ids so far and its logits `[vocab]`; one with three
    parameters takes the prompt's token ids before these. It returns logits, which may be the same
    tensor, changed. What it raises ends its request alone. It must not wait for a thread that asks
    the engine: the engine is in its step, and both would wait for ever.
    """

    rank = 3

    def __init__(self, functions: Sequence[Callable[..., Any]], prompt: Sequence[int]) -> None:
        self._calls = [(one, _takes_prompt(one)) for one in functions]
        self._prompt = prompt
        self._past: list[int] = []

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Call each row's functions."""
        failed: Failures = {}
        for row, one in rows:
            try:
                one._call(logits[row])
            except Exception as error:
                reason = EngineError(f"a logits processor failed: {type(error).__name__}: {error}")
                reason.__cause__ = error
                failed[row] = reason
        return failed

    def _call(self, row: Tensor) -> None:
        for function, takes_prompt in self._calls:
            prompt = (list(self._prompt),) if takes_prompt else ()
            found = function(*prompt, list(self._past), row)
            if not isinstance(found, Tensor) or found.shape != row.shape:
                raise TypeError(f"it returned {_describe(found)}, not logits {list(row.shape)}")
            if found is not row:
                row.copy_(found)

    def accept(self, token_id: int) -> None:
        """Remember the token for the functions."""
        self._past.append(token_id)


def _takes_prompt(function: Callable[..., Any]) -> bool:
    try:
        return len(inspect.signature(function).parameters) == 3
    except ValueError:  # of a builtin that does not tell
        return False


def _describe(found: object) -> str:
    return f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
