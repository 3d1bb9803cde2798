"""Checks of a loaded model over paged K/V, before it serves requests.

1. The configuration. Some types of layers have more state than K and V per token.
2. One pass with attention replaced by zeros. It records the widths of each layer's K and V. It also
   records each layer's mask, which must equal the mask computed from positions.
3. A prompt with transformers' own attention, and the same prompt over paged K/V in three steps. The
   batches of these steps also have shorter prompts with the same beginning. The logits differ if a
   model has any other state between tokens (convolutions, recurrences, relative biases, shared
   layers).
4. The same prompt without explicit positions. The logits must equal those with positions 0, 1, ...
5. A few rows at the last positions of the context. A result may depend on a row's position, but not
   on its index in the batch, which holds rows of many sequences. For example, Llama 4 scales the
   queries of layers without rotary positions. It computes the scale from the row's index plus the
   length of transformers' cache. The scale differs from 1 only from about position 8,192 on. The
   reference is transformers' own decoding, with a cache whose length includes all earlier tokens.
   Each row attends only to itself, so the earlier tokens need not exist.

The tolerance depends on depth, width and dtype, so it is measured: one step runs again, with the
results of attention changed by two units in the last place.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel

from headstart.attention.backend import LayerLayout, Span, StepPlan
from headstart.attention.memory import PagedKVMemory
from headstart.attention.register import (
    AttentionFunction,
    CallOrder,
    LayerCall,
    attend_with,
    number_in_model,
    read_options,
    register,
    unregister,
)
from headstart.attention.torch_ops import TorchAttention
from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.config_values import context_length
from headstart.models.files import FileStamp
from headstart.models.transformers_backend.decoder import (
    forward_rows,
    relative_errors,
    takes_positions,
    text_part,
)
from headstart.models.transformers_backend.recurrent import (
    RECURRENT_KINDS,
    WITHOUT_ATTENTION,
    MixerStates,
    RecurrentMixer,
    SequenceRows,
    find_mixers,
    has_recurrent_layers,
)
from headstart.weights.checkpoint import DAMAGED_FILE_HINT
from headstart.weights.format import Linear

_Calls = Counter[int | None]
"""The number of calls of attention by `layer_idx`."""


@contextmanager
def _replaced_attention(
    model: PreTrainedModel, function: AttentionFunction
) -> Iterator[tuple[str, _Calls]]:
    """Use `function` as the model's attention; yield its registered name and counts of calls."""
    part, calls = text_part(model), _Calls()

    def count(call: LayerCall) -> Tensor:
        calls[call.layer_idx] += 1
        return function(call)

    name = register(count)
    try:
        part.set_attn_implementation(name)
        if part.config._attn_implementation != name:
            raise UnsupportedModelError(
                f"{type(part).__name__} does not take its attention from transformers' "
                "AttentionInterface"
            )
        yield name, calls
    finally:
        part.set_attn_implementation("eager")
        unregister(name)


_ROWS = 3
_PARTS = 4  # queries, keys, values, scaling

_Recorded = list[tuple[str, Tensor]]
"""Titles and tensors `[rows, ...]`: `_PARTS` inputs per call of attention, then the logits."""


class _OffsetCache(DynamicCache):
    """A cache that reports `length` tokens more than it holds."""

    def __init__(self, length: int, config: PreTrainedConfig) -> None:
        super().__init__(config=config if has_recurrent_layers(config) else None)
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length + int(super().get_seq_length(layer_idx))


def check_far_positions(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if a cache changes the results at the last positions."""
    last = context_length(model.config)
    first = max(0, last - _ROWS)
    without_cache = _run_at(model, first, last)
    with_cache = _run_at(model, first, last, _OffsetCache(first, _text_config(model)))
    name = type(model).__name__
    if [title for title, _ in without_cache] != [title for title, _ in with_cache]:
        raise UnsupportedModelError(
            f"{name} calls attention {len(with_cache) // _PARTS} times with a cache of {first} "
            f"tokens and {len(without_cache) // _PARTS} times without one"
        )
    for (title, actual), (_, expected) in zip(without_cache, with_cache, strict=True):
        difference = 0.0
        if not torch.equal(actual, expected):
            size = expected.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
            difference = float(((actual.double() - expected.double()).norm(dim=-1) / size).max())
        if not difference <= 4 * torch.finfo(model.dtype).eps:  # also true for NaN
            raise UnsupportedModelError(
                f"{name} computes {title} from the index of a row in the batch and not from its "
                f"position: at positions {first} to {last - 1} the relative difference between "
                f"passes without and with a cache is {difference:.1e}"
            )


def _run_at(
    model: PreTrainedModel, first: int, last: int, cache: DynamicCache | None = None
) -> _Recorded:
    """Record a pass over positions `first` to `last - 1`, where each row attends only to itself."""
    recorded: _Recorded = []

    def attend_to_self(call: LayerCall) -> Tensor:
        suffix = f"of layer {call.layer_idx}"
        for name, part in (("queries", call.query), ("keys", call.key), ("values", call.value)):
            recorded.append((f"the {name} {suffix}", part[0].transpose(0, 1).flatten(1)))
        scaling = torch.tensor([[read_options(call).scaling]], dtype=torch.float64)
        recorded.append((f"the scaling {suffix}", scaling))
        shared = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(shared, dim=1).transpose(1, 2).contiguous()

    positions = torch.arange(first, last, device=model.device)
    tokens = torch.arange(len(positions), device=model.device) % _text_config(model).vocab_size
    arguments: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
    try:
        with _replaced_attention(model, attend_to_self), torch.inference_mode():
            output: Any = model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=cache is not None,
                **arguments,
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        setting = "without a cache" if cache is None else f"with a cache of {first} tokens"
        raise UnsupportedModelError(
            f"{type(model).__name__} fails at positions {first} to {last - 1}, the last that "
            f"it supports, {setting}: {type(error).__name__}: {error}"
        ) from error
    return [*recorded, ("the logits", output.logits[0])]


_SUPPORTED_LAYERS = (
    RECURRENT_KINDS | WITHOUT_ATTENTION | frozenset({"full_attention", "sliding_attention"})
)
_REASONS = {
    "chunked_attention": "its context restarts at every chunk",
    "indexed_attention": "it selects tokens by additional keys, which are not stored",
}

# The positions at which the prompt, and each copy of its beginning, is cut into three steps. The
# second step has one row, which reads all earlier tokens from memory.
_CUTS = ((0, 7, 8, 24), (0, 5, 6, 13), (0, 2, 3, 9), (0, 9, 10, 12), (0, 12, 13, 17))
_BLOCK = 4
# The number of logits of a row to compare. An error before the LM head changes all logits.
_LOGITS = 8192
# The tolerance, as a multiple of the effect of two units in the last place of attention.
_NOISE_FACTOR = 4.0
# Share of rows that may exceed the tolerance, since rounding may decide a near tie of experts.
_LENIENT_ROWS = 0.25


def check_config(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` if the configuration excludes paged K/V."""
    name = type(config).__name__.removesuffix("Config")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; allowed: decoders, where all tokens are one causal "
            "sequence"
        )
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _SUPPORTED_LAYERS:
            reason = _REASONS.get(
                kind, "it is neither full nor sliding-window attention, nor a recurrent layer"
            )
            raise UnsupportedModelError(f"{name} has layers of type {kind!r}: {reason}")


class ProbedLayers(NamedTuple):
    """The K and V of each layer with attention, and the recurrent modules."""

    layouts: tuple[LayerLayout, ...]
    mixers: tuple[RecurrentMixer, ...]


def probe_model(model: PreTrainedModel) -> ProbedLayers:
    """Run all checks; raise `UnsupportedModelError` if one fails.

    Leaves the model with transformers' eager attention.
    """
    accepted = signature(model.forward).parameters
    for name, reason in (
        ("position_ids", "it computes its positions itself (ALiBi, or a recurrence)"),
        ("logits_to_keep", "it cannot compute the logits of chosen rows only"),
    ):
        if name not in accepted and (name != "position_ids" or takes_positions(model)):
            raise UnsupportedModelError(f"{type(model).__name__} takes no {name}: {reason}")
    mixers = find_mixers(model, takes_positions(model))
    calls = _record(model, mixers)
    for call in calls:
        _check_mask(model, call)
    _check_steps(model, calls, mixers)
    if calls:
        check_far_positions(model)
    return ProbedLayers(tuple(call.layout for call in calls), mixers)


class _Call(NamedTuple):
    """One layer's call of attention in the recorded pass."""

    layer_idx: int | None
    layout: LayerLayout
    is_causal: bool
    mask: Tensor | None


def _record(model: PreTrainedModel, mixers: tuple[RecurrentMixer, ...]) -> list[_Call]:
    """Return each layer's call of attention in a pass over three tokens, in layer order.

    A model with mixers may have layers without attention. Its calls are in the order of the pass.
    """
    calls: list[_Call] = []

    def return_zeros(call: LayerCall) -> Tensor:
        (_, kv_heads, tokens, key_dim), value_dim = call.key.shape, call.value.shape[3]
        layer = call.layer
        causal = getattr(layer, "is_causal", True) and call.keywords.get("is_causal") is not False
        layout = LayerLayout(kv_heads, key_dim, value_dim, read_options(call).sliding_window)
        if call.layer_idx is None and not mixers:
            raise UnsupportedModelError(f"{type(layer).__name__} has no layer_idx")
        calls.append(_Call(call.layer_idx, layout, causal, call.mask))
        return call.query.new_zeros((1, tokens, call.query.shape[1], value_dim))

    tokens = torch.arange(3, device=model.device)
    with _replaced_attention(model, return_zeros) as (name, counts):
        AttentionMaskInterface.register(name, _mask_marker)
        try:
            positions = tokens if takes_positions(model) else None
            _run(model, tokens % _text_config(model).vocab_size, positions)
        finally:
            AttentionMaskInterface._global_mapping.pop(name)
    if mixers:
        return calls
    calls.sort(key=lambda call: call.layer_idx or 0)
    if [call.layer_idx for call in calls] != list(range(_text_config(model).num_hidden_layers)):
        _refuse_calls(model, counts)
    return calls


def _refuse_calls(model: PreTrainedModel, calls: _Calls) -> None:
    layers = _text_config(model).num_hidden_layers
    raise UnsupportedModelError(
        f"{type(model).__name__} has {layers} layers, of which {len(calls)} called attention "
        f"({sum(calls.values())} calls in one pass): every layer must store its state of "
        "earlier tokens as separate K and V"
    )


def _mask_marker(
    *, mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **_: Any
) -> Tensor:
    """Return an empty mask that has transformers' mask function as an attribute."""
    marker = torch.zeros((1, 1, q_length, kv_length))
    marker.headstart_rule = mask_function  # type: ignore[attr-defined]
    return marker


def _check_mask(model: PreTrainedModel, call: _Call) -> None:
    """Raise an error unless the mask is causal with the call's window, also at far positions."""
    layer = f"layer {call.layer_idx} of {type(model).__name__}"
    if not call.is_causal:
        raise UnsupportedModelError(f"{layer} is not causal, as a token sees later tokens")
    if call.mask is None:
        return
    rule = getattr(call.mask, "headstart_rule", None)
    if rule is None:
        raise UnsupportedModelError(f"{layer} uses a custom attention mask or bias")
    window = call.layout.window
    distances = {1, 2, 3, 17, 1000} | ({window - 1, window, window + 1} if window else set())
    last = context_length(model.config) - 1
    rows = sorted({0, *distances, last, *(max(0, last - step) for step in distances)})
    columns = sorted(
        {max(0, row_position - step) for row_position in rows for step in (0, *distances)}
    )
    row, column = torch.tensor(rows).unsqueeze(1), torch.tensor(columns).unsqueeze(0)
    expected = column <= row
    if window is not None:
        expected &= column > row - window
    zero = torch.tensor(0)
    try:
        actual = rule(zero, zero, row, column).expand_as(expected)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the mask of {layer} depends on more than positions: {error}"
        ) from error
    if not torch.equal(actual.cpu(), expected):
        query, key = (actual.cpu() != expected).nonzero()[0].tolist()
        raise UnsupportedModelError(
            f"the mask of {layer} does not fit its call of attention (window: {window}): it is "
            f"wrong for query position {rows[query]} and key position {columns[key]}"
        )


_Step = tuple[StepPlan, Tensor]
"""A plan, and the position of each row in the prompt."""


def _check_steps(
    model: PreTrainedModel, calls: list[_Call], mixers: tuple[RecurrentMixer, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    length = max(cuts[-1] for cuts in _CUTS)
    prompt = torch.randint(0, _text_config(model).vocab_size, (length,), generator=generator)
    prompt = prompt.to(model.device)
    positions = torch.arange(length, device=model.device)
    expected = _run(model, prompt, positions if takes_positions(model) else None)
    if not torch.isfinite(expected).all():
        for name, weight in model.named_parameters():
            if torch.isnan(weight.float()).any():
                raise DamagedModelError(f"{name} has weights that are NaN {DAMAGED_FILE_HINT}")
        raise UnsupportedModelError(
            f"{type(model).__name__} computes logits that are not finite in {model.dtype}, with "
            "transformers' own attention; another dtype may help"
        )
    paged = _Paged(model, calls, mixers)
    logits = [paged.run(step, prompt) for step in paged.steps]
    # The unit in the last place of the layers' arithmetic; coarser in quantized layers.
    linears = (module for module in model.modules() if isinstance(module, Linear))
    rounding = max(torch.finfo(model.dtype).eps, *(part.matrix.rounding for part in linears), 0.0)
    noise = relative_errors(paged.run(paged.steps[0], prompt, 2 * rounding), logits[0])
    floor = max(2 * rounding, 1e-5)
    limit = _NOISE_FACTOR * float(noise.median()) + floor
    is_wrong = ~(relative_errors(_run(model, prompt, None), expected) <= limit)
    if float(is_wrong.float().mean()) > _LENIENT_ROWS:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not count positions from 0: with the positions 0, 1, "
            "2, ... its logits differ from its logits without positions (RoBERTa's positions "
            "begin at pad_token_id + 1)"
        )
    for (_, positions), rows in zip(paged.steps, logits, strict=True):
        differences = relative_errors(rows, expected[positions])
        is_wrong = ~(differences <= limit)  # not `differences > limit`, which is false for NaN
        if float(is_wrong.float().mean()) > _LENIENT_ROWS:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not compute the same over paged K/V, in several "
                f"steps, as with transformers' own attention: {int(is_wrong.sum())} of "
                f"{len(is_wrong)} rows of logits have a relative difference of up to "
                f"{float(differences.max()):.1e}, and rounding causes at most {limit:.1e}; its "
                "layers use more than their " + ("K, V and states" if mixers else "K and V")
            )


def _steps(device: torch.device) -> tuple[list[_Step], int]:
    """Return the steps and the number of blocks. Each sequence has separate, shuffled blocks."""
    counts = [-(-cuts[-1] // _BLOCK) for cuts in _CUTS]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    ends = list(accumulate(counts))
    tables = [blocks[end - count : end] for count, end in zip(counts, ends, strict=True)]
    steps = []
    for ranges in zip(*(pairwise(cuts) for cuts in _CUTS), strict=True):
        spans: list[Span] = []
        slots: list[int] = []
        positions: list[int] = []
        for (start, end), table in zip(ranges, tables, strict=True):
            spans.append(Span(len(slots), end - start, end, table))
            positions += range(start, end)
            slots += [table[p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(start, end)]
        plan = StepPlan(torch.tensor(slots, device=device), tuple(spans))
        steps.append((plan, torch.tensor(positions, device=device)))
    return steps, len(blocks)


class _Paged:
    """A model over paged K/V and slots for states, and the steps that `_CUTS` describes."""

    def __init__(
        self, model: PreTrainedModel, calls: list[_Call], mixers: tuple[RecurrentMixer, ...]
    ) -> None:
        self._model = model
        self._calls = Counter(call.layer_idx for call in calls)
        self.steps, num_blocks = _steps(model.device)
        layouts = [call.layout for call in calls]
        memory = PagedKVMemory(layouts, num_blocks, _BLOCK, model.dtype, model.device)
        self._backend = TorchAttention(memory)
        self._mixers = MixerStates(model, mixers)
        self._states = self._mixers.make_memory(len(_CUTS))

    def run(self, step: _Step, prompt: Tensor, noise: float = 0.0) -> Tensor:
        """Return the logits of one step.

        noise: the relative change of the results of attention and mixers, up or down at random.
        """
        plan, positions = step
        number = CallOrder() if self._mixers.mixers else number_in_model
        attend, signs = attend_with(self._backend, number), torch.Generator().manual_seed(1)

        def perturb(out: Tensor) -> Tensor:
            up_or_down = torch.randint(0, 2, out.shape, generator=signs) * 2 - 1
            return out * (1 + noise * up_or_down.to(out))

        sequences = [
            SequenceRows(s.num_rows, slot if s.context > s.num_rows else -1, slot)
            for slot, s in enumerate(plan.spans)
        ]
        function = (lambda call: perturb(attend(call))) if noise else attend
        with (
            _replaced_attention(self._model, function) as (_, calls),
            self._mixers.running(self._states, sequences, perturb if noise else None),
        ):
            self._backend.begin_step(plan)
            try:
                position_ids = positions if takes_positions(self._model) else None
                logits = _run(self._model, prompt[positions], position_ids)
            finally:
                self._backend.end_step()
        if calls != self._calls:
            _refuse_calls(self._model, calls)
        return logits


def _run(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Return the first `_LOGITS` logits of all rows in float32.

    positions: None for the model's default. Raises `UnsupportedModelError` if the model fails.
    """
    try:
        rows = torch.arange(len(tokens), device=tokens.device)
        return forward_rows(model, tokens, positions, rows)[:, :_LOGITS].float()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over a flat batch of tokens: {error}"
        ) from error


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config()


# Results of `probe_model`, by files, dtype, device and the classes of their modules.
_passed: dict[Hashable, ProbedLayers] = {}


def probe_once(model: PreTrainedModel, files: tuple[FileStamp, ...]) -> ProbedLayers:
    """Return the result of `probe_model` for a model from these files, computed once."""
    key = (files, model.dtype, model.device, tuple(map(type, model.modules())))
    if key not in _passed:
        _passed[key] = probe_model(model)
    return _passed[key]
