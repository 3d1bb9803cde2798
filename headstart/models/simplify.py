"""Finds out whether a loaded decoder is a `PlainDecoder`: by names, then by numbers.

- Rows of many sizes in the place of the decoder's own must leave the model as the LM head's
  products and nothing else: no capping, no scaling, no tokens taken out.
- A step of a few tokens over paged K/V must give the same hidden rows, bit for bit, part by part
  as through transformers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headstart.attention import PagedKVMemory, Span, StepPlan, make_backend
from headstart.models.decoder import DecoderModel, forward_rows
from headstart.models.likeliest import LikeliestHead
from headstart.models.packed import PackedLinear
from headstart.models.plain import PlainDecoder, find_stack

__all__ = ["simplify"]

_TOKENS = 5
_BLOCK = 4
_KEPT = (1, 4)  # rows of the step whose logits are asked for
_FIRST_POSITION = 7
# Logits up to some thousands, where a cap that lets small ones through would show.
_SIZES = (1e-3, 1.0, 30.0, 1000.0, 1.0)


def simplify(model: DecoderModel) -> None:
    """Set `model.plain` if the model is one. Before a backend is attached."""
    module = model.module
    head = module.get_output_embeddings()
    if not isinstance(head, PackedLinear) or head.packed.bias is not None:
        return
    if module.config.get_text_config() is not module.config:
        return
    memory = PagedKVMemory(model.layouts, 2, _BLOCK, model.dtype, model.device)
    backend = make_backend(memory)
    plan = StepPlan(torch.arange(_TOKENS), (Span(0, _TOKENS, _TOKENS, [0, 1]),))
    model.attach(backend)
    backend.begin_step(plan)
    try:
        model.plain = _find_plain(model, head)
    # What a model raises whose decoder wants to be called in another way.
    except Exception:
        return
    finally:
        backend.end_step()
        model.detach()


def _find_plain(model: DecoderModel, head: PackedLinear) -> PlainDecoder | None:
    decoder = model.module.get_decoder()
    tokens = torch.arange(_TOKENS) % model.vocab_size
    positions = torch.arange(_TOKENS) + _FIRST_POSITION
    rows = torch.tensor(_KEPT)
    own = _hidden_rows(model, decoder, head, (tokens, positions))
    if own is None:
        return None
    screened = LikeliestHead(head.packed)
    for stack in (find_stack(decoder, model.max_model_len), None):
        plain = PlainDecoder(decoder, stack, screened)
        same = torch.equal(plain.hidden(tokens, positions, rows), own[rows])
        if same and torch.equal(plain.hidden(tokens, positions, torch.arange(_TOKENS)), own):
            return plain
    return None


def _hidden_rows(
    model: DecoderModel, decoder: nn.Module, head: PackedLinear, step: tuple[Tensor, Tensor]
) -> Tensor | None:
    """The decoder's rows in a step, None if its model does more than multiply them by the head."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(_SIZES).unsqueeze(1)
    given = torch.randn(_TOKENS, head.in_features, generator=generator) * sizes
    given = given.to(model.dtype)
    seen: list[Tensor] = []

    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        seen.append(output.last_hidden_state[0])
        output.last_hidden_state = given.unsqueeze(0)
        return output

    hook = decoder.register_forward_hook(replace)
    try:
        logits = forward_rows(model.module, *step, torch.arange(_TOKENS))
    finally:
        hook.remove()
    alike = len(seen) == 1 and torch.equal(logits, head.packed.multiply(given))
    return seen[0] if alike else None
