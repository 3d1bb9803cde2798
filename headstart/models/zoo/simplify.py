"""Checks if a loaded decoder is a `PlainDecoder`: by its structure, then by its results.

- One recorded step shows how the model calls its decoder, and the decoder its rotary embedding.
- With rows of many magnitudes in place of the decoder's own, the model's logits must be the LM
  head's products and nothing else: no capping, no scaling, no tokens removed.
- A step of a few tokens over paged K/V must give bitwise equal hidden rows, part by part and
  through transformers.

The model's modules are called here only as the model itself calls them. So they are not expected to
raise, and no exception is caught: one would be a bug of headstart.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstart.attention import PagedKVMemory, Span, StepPlan, make_backend
from headstart.models.greedy_head import GreedyHead
from headstart.models.packed import PackedLinear
from headstart.models.zoo.decoder import TransformersDecoder, forward_rows
from headstart.models.zoo.plain import Call, OtherKind, PlainDecoder, Stack, find_stack

__all__ = ["simplify"]

_TOKENS = 5
_BLOCK = 4
_KEPT = (1, 4)  # rows of the step whose logits are computed
_FIRST_POSITION = 7
# Logits up to some thousands, where a cap shows that leaves small logits unchanged.
_SIZES = (1e-3, 1.0, 30.0, 1000.0, 1.0)

_log = logging.getLogger(__name__)


def simplify(model: TransformersDecoder) -> None:
    """Set `model.plain` for a plain decoder, and `model.fallback_reason` if parts are not plain.

    Call it before a backend is attached.
    """
    try:
        head = _find_head(model)
        with _paged_step(model):
            _find_plain(model, head)
    except OtherKind as kind:
        model.fallback_reason = str(kind)
    if model.fallback_reason is not None:
        _log.debug(
            "%s runs through transformers: %s", type(model.module).__name__, model.fallback_reason
        )


def _find_head(model: TransformersDecoder) -> PackedLinear:
    module = model.module
    head = module.get_output_embeddings()
    if not isinstance(head, PackedLinear):
        raise OtherKind("its LM head is not packed")
    if head.packed.bias is not None:
        raise OtherKind("its LM head has a bias")
    if module.config.get_text_config() is not module.config or module.get_decoder() is module:
        raise OtherKind("it is not a decoder and an LM head")
    return head


@contextmanager
def _paged_step(model: TransformersDecoder) -> Iterator[None]:
    """A step of `_TOKENS` tokens over memory of its own."""
    backend = make_backend(PagedKVMemory(model.layouts, 2, _BLOCK, model.dtype, model.device))
    model.attach(backend)
    backend.begin_step(StepPlan(torch.arange(_TOKENS), (Span(0, _TOKENS, _TOKENS, [0, 1]),)))
    try:
        yield
    finally:
        backend.end_step()
        model.detach()


def _find_plain(model: TransformersDecoder, head: PackedLinear) -> None:
    decoder = model.module.get_decoder()
    tokens = torch.arange(_TOKENS) % model.vocab_size
    positions = torch.arange(_TOKENS) + _FIRST_POSITION
    angles: list[Call] = []
    with _watch(dict(decoder.named_children()).get("rotary_emb"), angles):
        own = _own_rows(model, decoder, head, (tokens, positions))
    screened = GreedyHead(head.packed)

    def find(stack: Stack | None) -> PlainDecoder:
        plain = PlainDecoder(decoder, stack, screened)
        for rows in (torch.tensor(_KEPT), torch.arange(_TOKENS)):
            if not torch.equal(plain.hidden(tokens, positions, rows), own[rows]):
                raise OtherKind("it does more than its parts")
        return plain

    try:
        model.plain = find(find_stack(decoder, model.max_model_len, angles))
    except OtherKind as kind:
        model.fallback_reason = str(kind)
        model.plain = find(None)


@contextmanager
def _watch(module: nn.Module | None, calls: list[Call]) -> Iterator[None]:
    """Record a module's calls, with positional and keyword inputs by name."""
    if module is None:
        yield
        return
    names = list(inspect.signature(module.forward).parameters)

    def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(Call(dict(zip(names, args, strict=False)) | kwargs, output))

    hook = module.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _own_rows(
    model: TransformersDecoder, decoder: nn.Module, head: PackedLinear, step: tuple[Tensor, Tensor]
) -> Tensor:
    """The decoder's rows in a step.

    Raises `OtherKind` if the model does more than call its decoder and multiply by the head.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(_SIZES).unsqueeze(1)
    given = torch.randn(_TOKENS, head.in_features, generator=generator) * sizes
    given = given.to(model.dtype)
    calls: list[Call] = []
    seen: list[Tensor] = []

    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        rows = getattr(output, "last_hidden_state", None)
        if isinstance(rows, Tensor) and rows.shape == (1, *given.shape):
            seen.append(rows[0])
            output.last_hidden_state = given.unsqueeze(0)
        return output

    with _watch(decoder, calls):
        hook = decoder.register_forward_hook(replace)
        try:
            logits = forward_rows(model.module, *step, torch.arange(_TOKENS))
        finally:
            hook.remove()
    if len(calls) != 1:
        raise OtherKind(f"its decoder is called {len(calls)} times in a step")
    if not seen:
        raise OtherKind("its decoder's rows are not its last_hidden_state")
    _check_inputs(calls[0].inputs)
    if not torch.equal(logits, head.packed.multiply(given)):
        raise OtherKind("its logits are more than products with the LM head")
    return seen[0]


def _check_inputs(inputs: dict[str, Any]) -> None:
    """Raise `OtherKind` unless a `PlainDecoder` would call the decoder like this."""
    given = {name for name, value in inputs.items() if value is not None and value is not False}
    if given != {"input_ids", "position_ids"}:
        raise OtherKind(f"its decoder is called with {', '.join(sorted(given))}")
