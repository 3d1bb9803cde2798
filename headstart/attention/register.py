"""The hook into transformers: one attention function per engine, under a separate name.

transformers' models look up their attention function in `AttentionInterface` by the name in their
configuration, so two engines in one process need two names. No mask function is registered, so
transformers builds no mask: the step's plan determines which tokens a row may see.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AttentionInterface

from headstart.attention.backend import AttentionBackend, AttentionOptions
from headstart.errors import EngineError, UnsupportedModelError

# If a name contains "sdpa", "flash" or "flex", transformers uses its own attention.
_names = map("headstart_paged_{}".format, itertools.count())


class LayerCall(NamedTuple):
    """The arguments of a transformers layer's call to attention.

    `layer` is the calling module. `query` is `[1, query_heads, tokens, key_dim]`, `key` `[1,
    kv_heads, tokens, key_dim]`, `value` `[1, kv_heads, tokens, value_dim]`. `mask` is the model's
    mask or None, `keywords` are the call's other arguments.
    """

    layer: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    keywords: dict[str, Any]

    @property
    def layer_idx(self) -> int | None:
        """The layer's number in the model; None if its module does not have it."""
        number = getattr(self.layer, "layer_idx", None)
        return number if isinstance(number, int) else None


AttentionFunction = Callable[[LayerCall], Tensor]
"""Returns `[1, tokens, query_heads, value_dim]`."""


class CallOrder:
    """A counter that numbers layers in the order in which they call attention in a pass.

    A layer's `layer_idx` also counts layers without attention, and is missing in a module that is
    part of several layers (Zamba2).
    """

    def __init__(self) -> None:
        self._calls = itertools.count()

    def begin_pass(self, *_: object) -> None:
        """Count from 0 again. The method may serve as a forward pre-hook."""
        self._calls = itertools.count()

    def __call__(self, call: LayerCall) -> int:
        return next(self._calls)


def number_in_model(call: LayerCall) -> int:
    """Return the number of a layer in a model whose layers all have attention."""
    number: int = call.layer.layer_idx
    return number


def attend_with(
    backend: AttentionBackend, number: Callable[[LayerCall], int] = number_in_model
) -> AttentionFunction:
    """Return a function that passes a layer's call to a backend, whose step must have begun.

    number: returns the index of a layer in the backend's memory.

    transformers holds the function until `unregister`. The function has only a weak reference to
    the backend, so that the backend's memory can be freed earlier.
    """
    reference = weakref.ref(backend)

    def attend(call: LayerCall) -> Tensor:
        backend = reference()
        if backend is None:
            raise EngineError("the model's engine no longer exists; load the model again")
        if call.mask is not None:
            raise UnsupportedModelError(
                f"{type(call.layer).__name__} passes an attention mask or bias "
                f"({type(call.mask).__name__}), which paged attention does not support"
            )
        query, key, value = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))
        out = backend.attend(number(call), query, key, value, read_options(call))
        return out.unsqueeze(0)

    return attend


def read_options(call: LayerCall) -> AttentionOptions:
    """Return a layer's options from the keyword arguments of transformers' models."""
    scaling = call.keywords.get("scaling")
    return AttentionOptions(
        scaling=call.query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=call.keywords.get("sliding_window"),
        softcap=call.keywords.get("softcap"),
        sinks=call.keywords.get("s_aux"),
    )


def register(function: AttentionFunction) -> str:
    """Register `function` with transformers; return the name of the attention implementation."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        call = LayerCall(module, query, key, value, attention_mask, kwargs)
        return function(call), None  # no attention weights

    name = next(_names)
    AttentionInterface.register(name, attention)
    return name


def unregister(name: str) -> None:
    """Remove the function from transformers, so that the function can be freed."""
    AttentionInterface._global_mapping.pop(name, None)
