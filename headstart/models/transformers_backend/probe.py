"""Checks of a loaded model over paged K/V, before it serves requests.

1. Its configuration: some kinds of layer have more state than K and V per token.
2. One recorded pass with attention replaced by zeros: gives the widths of each layer's K and V, and
   each layer's mask, which must equal the mask that we compute from positions.
3. A prompt through transformers' own attention, and through ours cut into chunks, next to copies
   of its beginning with other cuts. The results differ if a model keeps any state between tokens
   outside K and V (convolutions, recurrences, relative biases, shared layers).
4. The same prompt with positions from 0 on, and without any: the logits must not differ.
5. A few rows at the last positions of a model, which must not depend on the index of a row in the
   batch. A batch holds rows of many sequences, so this index is not a position. Some layers use it
   nevertheless, plus the length of transformers' cache: in Llama 4, layers without rotary angles
   scale their queries by it, with a visible effect from position 8,192 on. The oracle is
   transformers' own decoding behind a cache that reports all earlier tokens. In both passes each
   row attends only to itself, so the earlier tokens need not exist.

The tolerance depends on depth, width and dtype, so it is measured: the same step again, with each
layer's attention changed by two units in the last place.
"""

from collections import Counter
from collections.abc import Callable, Hashable
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
    rows_apart,
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
from headstart.weights.checkpoint import SAVED_SO
from headstart.weights.format import Linear


class Attending:
    """A context in which `function` is the model's attention; counts its calls per layer."""

    def __init__(self, model: PreTrainedModel, function: AttentionFunction) -> None:
        self._model = text_part(model)
        self._function = function
        self.calls: Counter[int | None] = Counter()

    def __enter__(self) -> "Attending":
        self.name = register(self._count)
        self._model.set_attn_implementation(self.name)
        if self._model.config._attn_implementation != self.name:
            self.__exit__()
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not take its attention from transformers' "
                "AttentionInterface"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("eager")
        unregister(self.name)

    def _count(self, call: LayerCall) -> Tensor:
        self.calls[call.layer_idx] += 1
        return self._function(call)


_ROWS = 3
_PARTS = 4  # queries, keys, values, scaling

_Recorded = list[tuple[str, Tensor]]
"""The layers' inputs to attention, `_PARTS` per call, then the logits; the first axis is rows."""


class _CacheBehind(DynamicCache):
    """A cache that reports `length` tokens more than it holds."""

    def __init__(self, length: int, config: PreTrainedConfig) -> None:
        super().__init__(config=config if has_recurrent_layers(config) else None)
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length + int(super().get_seq_length(layer_idx))


def check_far_positions(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if the last rows differ from the same rows after a cache."""
    last = context_length(model.config)
    first = max(0, last - _ROWS)
    without_cache = _run_at(model, first, last)
    with_cache = _run_at(model, first, last, _CacheBehind(first, _text_config(model)))
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
        if not difference <= 4 * torch.finfo(model.dtype).eps:  # so that NaN is wrong
            raise UnsupportedModelError(
                f"{name} computes {title} from the index of a row in the batch and not from its "
                f"position: from position {first} to {last - 1} they differ by {difference:.1e} of "
                "their size from the values that transformers computes with a cache"
            )


def _run_at(
    model: PreTrainedModel, first: int, last: int, cache: DynamicCache | None = None
) -> _Recorded:
    """Record a pass over the rows at positions `first` to `last - 1`; each row sees only itself."""
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
        with Attending(model, attend_to_self), torch.inference_mode():
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
            f"{type(model).__name__} fails over positions {first} to {last - 1}, the last that "
            f"it supports, {setting}: {type(error).__name__}: {error}"
        ) from error
    return [*recorded, ("the logits", output.logits[0])]


_GOOD_LAYERS = (
    RECURRENT_KINDS | WITHOUT_ATTENTION | frozenset({"full_attention", "sliding_attention"})
)
_WHY_NOT = {
    "chunked_attention": "its context restarts at every chunk",
    "indexed_attention": "it chooses the tokens that it sees by keys in addition to K and V",
}

# Cuts of the self-check's prompt and of the copies of its beginning: first the beginnings, then
# one row each (which reads all earlier tokens from memory), then the rest.
_CUTS = ((0, 7, 8, 24), (0, 5, 6, 13), (0, 2, 3, 9), (0, 9, 10, 12), (0, 12, 13, 17))
_BLOCK = 4
# An error before the LM head shows in any part of a row's logits.
_LOGITS = 8192
# Rounding may be this many times the effect of two units in the last place of attention ...
_NOISE_FACTOR = 4.0
# ... in all but this share of a step's rows: a near tie of two experts may be decided either way.
_LENIENT_ROWS = 0.25


def check_config(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` if the configuration alone rules out paged K/V."""
    name = type(config).__name__.removesuffix("Config")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoders, where all tokens share one causal "
            "sequence, have a prefix to cache"
        )
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _GOOD_LAYERS:
            reason = _WHY_NOT.get(
                kind, "it is neither full nor sliding-window attention, nor a recurrent layer"
            )
            raise UnsupportedModelError(f"{name} has layers of type {kind!r}: {reason}")


class ProbedLayers(NamedTuple):
    """The result of the checks: K and V of the layers with attention, and recurrent modules."""

    layouts: tuple[LayerLayout, ...]
    mixers: tuple[RecurrentMixer, ...]


def probe_model(model: PreTrainedModel) -> ProbedLayers:
    """Run all checks.

    Leaves the model with transformers' eager attention. Raises `UnsupportedModelError`.
    """
    accepted = signature(model.forward).parameters
    for name, reason in (
        ("position_ids", "its positions (ALiBi, or a recurrence) are not arguments"),
        ("logits_to_keep", "it cannot compute the logits of chosen rows only"),
    ):
        if name not in accepted and (name != "position_ids" or takes_positions(model)):
            raise UnsupportedModelError(f"{type(model).__name__} takes no {name}: {reason}")
    mixers = find_mixers(model, takes_positions(model))
    calls = _record(model, mixers)
    layouts = tuple(call.layout for call in calls)
    for call in calls:
        _check_mask(model, call)
    _check_pieces(model, calls, mixers)
    if calls:
        check_far_positions(model)
    return ProbedLayers(layouts, mixers)


class _Call(NamedTuple):
    """One layer's call of attention in the recorded pass."""

    layer_idx: int | None
    layout: LayerLayout
    sliding_window: int | None
    is_causal: bool
    mask: Tensor | None


def _record(model: PreTrainedModel, mixers: tuple[RecurrentMixer, ...]) -> list[_Call]:
    """Return the layers' calls of one pass over three tokens, in layer order.

    A model with mixers may have layers without attention. Its calls are in the order of the pass.
    """
    calls: list[_Call] = []

    def return_zeros(call: LayerCall) -> Tensor:
        (_, kv_heads, tokens, key_dim), value_dim = call.key.shape, call.value.shape[3]
        window, layer = read_options(call).sliding_window, call.layer
        causal = getattr(layer, "is_causal", True) and call.keywords.get("is_causal") is not False
        layout = LayerLayout(kv_heads, key_dim, value_dim, window)
        if call.layer_idx is None and not mixers:
            raise UnsupportedModelError(f"{type(layer).__name__} has no layer_idx")
        calls.append(_Call(call.layer_idx, layout, window, causal, call.mask))
        return call.query.new_zeros((1, tokens, call.query.shape[1], value_dim))

    tokens = torch.arange(3, device=model.device)
    with Attending(model, return_zeros) as attending:
        AttentionMaskInterface.register(attending.name, _mask_marker)
        try:
            positions = tokens if takes_positions(model) else None
            _run(model, tokens % _text_config(model).vocab_size, positions)
        finally:
            AttentionMaskInterface._global_mapping.pop(attending.name)
    if mixers:
        return calls
    calls.sort(key=lambda call: call.layer_idx or 0)
    if [call.layer_idx for call in calls] != list(range(_text_config(model).num_hidden_layers)):
        _refuse_calls(model, attending.calls)
    return calls


def _refuse_calls(model: PreTrainedModel, calls: Counter[int | None]) -> None:
    layers = _text_config(model).num_hidden_layers
    raise UnsupportedModelError(
        f"{type(model).__name__} has {layers} layers, of which {len(calls)} called attention "
        f"({sum(calls.values())} calls in one pass): every layer must store its state of "
        "earlier tokens as separate K and V"
    )


def _mask_marker(
    *, mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **_: Any
) -> Tensor:
    """Return an empty mask that carries the rule from which transformers makes the real one."""
    marker = torch.zeros((1, 1, q_length, kv_length))
    marker.headstart_rule = mask_function  # type: ignore[attr-defined]
    return marker


def _check_mask(model: PreTrainedModel, call: _Call) -> None:
    """Compare the layer's own mask with a causal sliding window, also at far positions."""
    layer = f"layer {call.layer_idx} of {type(model).__name__}"
    if not call.is_causal:
        raise UnsupportedModelError(f"{layer} is not causal, as a token sees later tokens")
    if call.mask is None:
        return
    rule = getattr(call.mask, "headstart_rule", None)
    if rule is None:
        raise UnsupportedModelError(f"{layer} uses a custom attention mask or bias")
    window = call.sliding_window
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
        differs = (actual.cpu() != expected).nonzero()[0].tolist()
        raise UnsupportedModelError(
            f"the mask of {layer} is not the one of its call of attention (window: {window}): "
            f"position {rows[differs[0]]} and position {columns[differs[1]]} differ"
        )


_Step = tuple[StepPlan, Tensor]
"""One step of the self-check: its plan, and each row's position in the prompt."""


def _check_pieces(
    model: PreTrainedModel, calls: list[_Call], mixers: tuple[RecurrentMixer, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    length = max(cuts[-1] for cuts in _CUTS)
    prompt = torch.randint(0, _text_config(model).vocab_size, (length,), generator=generator)
    prompt = prompt.to(model.device)
    places = torch.arange(length, device=model.device)
    expected = _run(model, prompt, places if takes_positions(model) else None)
    if not torch.isfinite(expected).all():
        for name, weight in model.named_parameters():
            if torch.isnan(weight.float()).any():
                raise DamagedModelError(f"{name} has weights that are NaN {SAVED_SO}")
        raise UnsupportedModelError(
            f"{type(model).__name__} computes logits that are not finite in {model.dtype}, with "
            "transformers' own attention; another dtype may help"
        )
    paged = _Paged(model, calls, mixers)
    logits = [paged.run(step, prompt) for step in paged.steps]
    # The unit in the last place of the layers' arithmetic; coarser in quantized layers.
    linears = (module for module in model.modules() if isinstance(module, Linear))
    rounding = max(torch.finfo(model.dtype).eps, *(part.matrix.rounding for part in linears), 0.0)
    noise = rows_apart(paged.run(paged.steps[0], prompt, 2 * rounding), logits[0])
    floor = max(2 * rounding, 1e-5)
    limit = _NOISE_FACTOR * float(noise.median()) + floor
    is_wrong = ~(rows_apart(_run(model, prompt, None), expected) <= limit)
    if float(is_wrong.float().mean()) > _LENIENT_ROWS:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not count positions from 0: with the positions 0, 1, "
            "2, ... its logits differ from its logits without positions (RoBERTa's positions "
            "begin at pad_token_id + 1)"
        )
    for (_, places), rows in zip(paged.steps, logits, strict=True):
        differences = rows_apart(rows, expected[places])
        is_wrong = ~(differences <= limit)  # not `apart > limit`, which is false for NaN
        if float(is_wrong.float().mean()) > _LENIENT_ROWS:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not compute the same over paged K/V, in several "
                "steps, "
                f"as with transformers' own attention: {int(is_wrong.sum())} of {len(is_wrong)} "
                "rows "
                f"of logits differ by up to {float(differences.max()):.1e} of their size, where "
                f"rounding explains {limit:.1e}; its layers use more than their "
                + ("K, V and states" if mixers else "K and V")
            )


def _steps(device: torch.device) -> tuple[list[_Step], int]:
    """Return the steps and the number of blocks; sequences have separate, shuffled blocks."""
    counts = [-(-cuts[-1] // _BLOCK) for cuts in _CUTS]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    ends = list(accumulate(counts))
    tables = [blocks[end - count : end] for count, end in zip(counts, ends, strict=True)]
    steps = []
    for ranges in zip(*(pairwise(cuts) for cuts in _CUTS), strict=True):
        spans: list[Span] = []
        slots: list[int] = []
        places: list[int] = []
        for (start, end), table in zip(ranges, tables, strict=True):
            spans.append(Span(len(slots), end - start, end, table))
            places += range(start, end)
            slots += [table[p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(start, end)]
        plan = StepPlan(torch.tensor(slots, device=device), tuple(spans))
        steps.append((plan, torch.tensor(places, device=device)))
    return steps, len(blocks)


class _Paged:
    """A model over paged K/V and slots for states, with the steps of the self-check."""

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
        """Return the logits of one step, with results of attention and mixers changed by `noise`.

        noise: part of their size, up or down at random.
        """
        plan, places = step
        number = CallOrder() if self._mixers.mixers else number_in_model
        attend, signs = attend_with(self._backend, number), torch.Generator().manual_seed(1)

        def shake(out: Tensor) -> Tensor:
            up_or_down = torch.randint(0, 2, out.shape, generator=signs) * 2 - 1
            return out * (1 + noise * up_or_down.to(out))

        spans = enumerate(plan.spans)
        sequences = [
            SequenceRows(s.num_rows, slot if s.context > s.num_rows else -1, slot)
            for slot, s in spans
        ]
        function = (lambda call: shake(attend(call))) if noise else attend
        with (
            Attending(self._model, function) as attending,
            self._mixers.running(self._states, sequences, shake if noise else None),
        ):
            self._backend.begin_step(plan)
            try:
                positions = places if takes_positions(self._model) else None
                logits = _run(self._model, prompt[places], positions)
            finally:
                self._backend.end_step()
        if attending.calls != self._calls:
            _refuse_calls(self._model, attending.calls)
        return logits


def _run(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Return the first logits of all rows in float32. Raise if the model fails over such a batch.

    positions: None for the model's own counting.
    """
    try:
        rows = torch.arange(len(tokens), device=tokens.device)
        return forward_rows(model, tokens, positions, rows)[:, :_LOGITS].float()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over one row of tokens with explicit positions: {error}"
        ) from error


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config()


# The models that passed, by files, dtype, device and the classes of their modules.
_passed: dict[Hashable, ProbedLayers] = {}


def probe_once(model: PreTrainedModel, files: tuple[FileStamp, ...]) -> ProbedLayers:
    """Return the result of `probe_model` for a model from these files, computed once."""
    key = (files, model.dtype, model.device, tuple(map(type, model.modules())))
    if key not in _passed:
        _passed[key] = probe_model(model)
    return _passed[key]
