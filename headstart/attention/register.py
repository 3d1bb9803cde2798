"""The hook into transformers: one attention function per engine, under a name of its own.

transformers' models ask `AttentionInterface` for the function that their configuration names, so
two engines with two memories in one process need two names. No mask function is registered:
for a name without one transformers builds no mask at all, and the backend knows from the step's
plan what each row may see.
"""

import itertools
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from headstart.attention.backend import AttentionBackend, AttentionOptions
from headstart.errors import UnsupportedModelError

__all__ = ["AttentionFunction", "AttentionLayer", "BackendFunction", "register", "unregister"]

_numbers = itertools.count()

# A name with "sdpa", "flash" or "flex" in it would be taken for one of transformers' own.
_PREFIX = "headstart_paged_"


class AttentionLayer(Protocol):
    """What we need of the module that calls: which layer it is."""

    layer_idx: int


class AttentionFunction(Protocol):
    """The signature by which transformers' models call attention.

    `query` is `[1, query_heads, tokens, key_dim]`; the result `[1, tokens, query_heads,
    value_dim]`, and no weights.
    """

    def __call__(
        self,
        module: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]: ...


class BackendFunction:
    """Passes a layer's call on to a backend, whose step must have begun."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def __call__(
        self,
        module: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} brings a mask or a bias of its own "
                f"({type(attention_mask).__name__}), which paged attention would ignore"
            )
        out = self._backend.attend(
            module.layer_idx,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            read_options(query, kwargs),
        )
        return out.unsqueeze(0), None


def read_options(query: Tensor, kwargs: dict[str, Any]) -> AttentionOptions:
    """A layer's options out of the keywords that transformers' models pass."""
    scaling = kwargs.get("scaling")
    return AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )


def register(function: AttentionFunction) -> str:
    """Make `function` known to transformers; the name to set as attention implementation."""
    name = f"{_PREFIX}{next(_numbers)}"
    AttentionInterface.register(name, function)
    return name


def unregister(name: str) -> None:
    """Take the function back out, so that it and its memory can be freed."""
    AttentionInterface._global_mapping.pop(name, None)
