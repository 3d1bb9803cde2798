"""Recurrent layers of transformers' models, with their states in slots.

transformers calls a recurrent module with a cache. The module reads the state of earlier tokens
from the cache, and writes the state after its rows. Here, recurrent modules run over the rows of
each sequence, and all other modules over the flat batch. Before a call, the states in the step's
source slots are copied to the cache. After it, the states in the cache are copied to the target
slots. Sequences with equal numbers of rows run as one batch.

`find_mixers` finds the recurrent modules, and the shapes of their states, by one pass with
transformers' cache. It needs no table of architectures.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature, unwrap
from itertools import accumulate, pairwise
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from headstart.attention.backend import StateLayout
from headstart.attention.memory import StateMemory
from headstart.attention.recurrent import Recurrence
from headstart.errors import UnsupportedModelError

RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Values of `layer_types` for layers with a state of fixed size. Hybrid layers have K/V too."""
WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""Values of `layer_types` for layers without K and V."""

_CONV, _RECURRENT = "conv_states", "recurrent_states"
_PREFILL = 3  # tokens of the pass that finds the mixers
_ROWS = 2


class CachedState(NamedTuple):
    """A state in the cache of a layer.

    kind: the cache's attribute, `conv_states` or `recurrent_states`. number: the key in this
    attribute. shape: of one sequence. dtype: of the state in the cache; slots have float32.
    """

    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class RecurrentMixer(NamedTuple):
    """A recurrent module.

    name: its dotted name. layer: the number of its layer in the cache. argument: the name of its
    argument for the cache. resumes_many: False if a call with several rows ignores the state in the
    cache (Mamba-1).
    """

    name: str
    layer: int
    argument: str
    states: tuple[CachedState, ...]
    resumes_many: bool = True

    @property
    def layout(self) -> StateLayout:
        """The shapes of the states."""
        return StateLayout(tuple(state.shape for state in self.states))


class _Tracer(DynamicCache):
    """A cache that records which modules write which states."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.written: dict[str, list[tuple[int, str, int]]] = {}
        self.arguments: dict[str, dict[str, Any]] = {}
        """Keyword arguments of the modules in `written`."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, _CONV, state_idx)
        states: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._note(layer_idx, _RECURRENT, state_idx)
        states: Tensor = super().update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **kwargs
        )
        return states

    def _note(self, layer: int, kind: str, number: int) -> None:
        name, self.arguments[name] = self.calls[-1]
        self.written.setdefault(name, []).append((layer, kind, number))

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Within the context, record in `calls` which modules are running."""

        def enter(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.calls.append((name, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.calls.pop()

        with ExitStack() as hooks:
            for name, module in model.named_modules():
                handle = module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
                hooks.callback(handle.remove)
                hooks.callback(module.register_forward_hook(leave).remove)
            yield


def has_recurrent_layers(config: PreTrainedConfig) -> bool:
    """Return True if the configuration of a text model names layers with a state."""
    return not RECURRENT_KINDS.isdisjoint(getattr(config, "layer_types", None) or ())


def find_mixers(model: PreTrainedModel, takes_positions: bool) -> tuple[RecurrentMixer, ...]:
    """Return the modules with states, in the order of their calls.

    takes_positions: the result of `takes_positions`. Raises `UnsupportedModelError` if a recurrent
    layer does not store its state in the cache.
    """
    config = model.config.get_text_config()
    if not has_recurrent_layers(config):
        return ()
    cache, device = _Tracer(config), model.device
    tokens = torch.arange(_PREFILL, device=device).unsqueeze(0)
    arguments: dict[str, Any] = {"past_key_values" if takes_positions else "cache_params": cache}
    if takes_positions:
        arguments["position_ids"] = tokens
    try:
        with cache.following(model), torch.inference_mode():
            model(input_ids=tokens % config.vocab_size, use_cache=True, **arguments)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails over {_PREFILL} tokens with transformers' cache of "
            f"states: {type(error).__name__}: {error}"
        ) from error
    mixers = tuple(_describe(model, cache, name) for name in cache.written)
    layers = {mixer.layer for mixer in mixers}
    for layer, kind in enumerate(config.layer_types):
        if kind in RECURRENT_KINDS and layer not in layers:
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} is of type {kind!r} and does not use "
                "transformers' cache of states, so its state cannot be saved and restored"
            )
    states = MixerStates(model, mixers)
    return tuple(
        mixer._replace(resumes_many=states.reads_all_states(number))
        for number, mixer in enumerate(mixers)
    )


def _describe(model: PreTrainedModel, cache: _Tracer, name: str) -> RecurrentMixer:
    """Return the mixer of this name, from the records of a pass."""
    title = f"{name} of {type(model).__name__}"
    layers = {layer for layer, _, _ in cache.written[name]}
    if len(layers) > 1:
        raise UnsupportedModelError(f"{title} has the states of {len(layers)} layers; allowed: one")
    arguments = cache.arguments[name]
    options = _named_options(model.get_submodule(name), arguments)
    tensors = [key for key, value in options.items() if _has_tensors(value)]
    if tensors not in ([], ["hidden_states"]):
        raise UnsupportedModelError(
            f"{title} takes tensors in addition to its rows and the cache: {', '.join(tensors)}"
        )
    argument = next((key for key, value in arguments.items() if value is cache), None)
    if argument is None:
        raise UnsupportedModelError(f"{title} has no keyword argument for the cache")
    (layer,) = layers
    states = []
    for _, kind, number in dict.fromkeys(cache.written[name]):
        tensor: Tensor = getattr(cache.layers[layer], kind)[number]
        states.append(CachedState(kind, number, tuple(tensor.shape[1:]), tensor.dtype))
    return RecurrentMixer(name, layer, argument, tuple(states))


def _named_options(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the module's signature names.

    The other arguments are for attention, or for kernels over padded batches.
    """
    named = signature(type(module).forward).parameters
    return {key: value for key, value in arguments.items() if key in named}


def _has_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


class _Group(NamedTuple):
    """Rows of several sequences that a mixer computes as one batch.

    rows: row numbers in the flat batch, `[sequences, rows]`. sources: the slot of each sequence's
    state before these rows; None for zeros. Entry i of `writers` and `targets` means: the state
    after sequence `writers[i]` of the group is written to slot `targets[i]`.
    """

    rows: Tensor
    sources: Tensor | None
    writers: Tensor
    targets: Tensor


def _group_rows(recurrence: Recurrence, device: torch.device) -> list[_Group]:
    """Return groups of rows, in an order in which states are written before they are read.

    A sequence is divided after each row whose state is saved. It resumes from the saved state.
    """
    starts, saves = recurrence.starts.tolist(), dict(recurrence.saves.tolist())
    sources, targets = recurrence.sources.tolist(), recurrence.targets.tolist()
    groups: dict[tuple[int, int, bool], list[tuple[int, int, list[int]]]] = {}
    for number, (first, end) in enumerate(pairwise(starts)):
        source = sources[number]
        stops = [*(row + 1 for row in saves if first <= row < end - 1), end]
        for part, stop in enumerate(stops):
            slots = [saves[stop - 1]] if stop - 1 in saves else []
            if stop == end:
                slots.append(targets[number])
            piece = (first, source, slots)
            groups.setdefault((part, stop - first, source < 0), []).append(piece)
            first, source = stop, slots[0]
    return [
        _make_group(length, is_new, groups[part, length, is_new], device)
        for part, length, is_new in sorted(groups)
    ]


def _make_group(
    length: int, is_new: bool, pieces: list[tuple[int, int, list[int]]], device: torch.device
) -> _Group:
    first = torch.tensor([row for row, _, _ in pieces]).unsqueeze(1)
    sources = None if is_new else torch.tensor([source for _, source, _ in pieces], device=device)
    written = [(number, slot) for number, (_, _, slots) in enumerate(pieces) for slot in slots]
    writers, targets = torch.tensor(written, device=device).unbind(1)
    return _Group((first + torch.arange(length)).to(device), sources, writers, targets)


_UPDATE = "mamba2_selective_state_update"
_STEP_OPTIONS = {"dt_bias", "dt_softplus"}
_UNLIMITED = (0.0, math.inf)


def _limit_steps(module: Any) -> Callable[..., Tensor]:
    """Return the module's `forward`, changed to apply Mamba-2's `time_step_limit` to single rows.

    transformers applies it only in calls with several rows, so the state would depend on how a
    prompt is divided. Raises `UnsupportedModelError` for a module that does not compute single rows
    by transformers' function `_UPDATE`.
    """
    limits = getattr(module, "time_step_limit", None)
    if limits in (None, _UNLIMITED):
        compute: Callable[..., Tensor] = module.forward
        return compute
    forward = unwrap(type(module).forward)
    update = forward.__globals__.get(_UPDATE)
    if update is None or not signature(update).parameters.keys() >= _STEP_OPTIONS:
        raise UnsupportedModelError(
            f"{type(module).__name__} has the time_step_limit {limits}, which cannot be applied to "
            f"single rows, since it does not call {_UPDATE} with "
            f"{' and '.join(sorted(_STEP_OPTIONS))}"
        )

    def update_limited(
        state: Tensor, x: Tensor, dt: Tensor, *weights: Tensor, dt_bias: Tensor, **options: Any
    ) -> Any:
        steps = functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*limits)
        return update(state, x, steps, *weights, **options | {"dt_softplus": False})

    changed = forward.__globals__ | {_UPDATE: update_limited}
    return MethodType(
        FunctionType(
            forward.__code__, changed, closure=forward.__closure__, argdefs=forward.__defaults__
        ),
        module,
    )


class SequenceRows(NamedTuple):
    """The number of a sequence's rows in a pass, and the slots of the states before and after."""

    num_rows: int
    source: int
    target: int


class MixerStates:
    """The mixers of a model. They run over states in slots between `attach` and `detach`."""

    def __init__(self, model: PreTrainedModel, mixers: tuple[RecurrentMixer, ...]) -> None:
        self.mixers = mixers
        self._model = model
        self._cache = DynamicCache(config=model.config.get_text_config())
        self._memory: StateMemory | None = None
        self._recurrence: Recurrence | None = None
        self._groups: list[_Group] = []
        self._change: Callable[[Tensor], Tensor] | None = None

    def attach(self, memory: StateMemory) -> None:
        """Run the mixers over the slots of `memory` from now on.

        `memory.recurrence` gives the rows and slots of each sequence.
        """
        self.detach()
        self._memory = memory
        for number, mixer in enumerate(self.mixers):
            module: Any = self._model.get_submodule(mixer.name)
            module.forward = partial(self._forward, number, _limit_steps(module))

    def detach(self) -> None:
        """Restore the mixers' own `forward`; safe to call twice."""
        if self._memory is None:
            return
        self._memory = self._recurrence = None
        self._groups = []
        for mixer in self.mixers:
            del self._model.get_submodule(mixer.name).forward

    def make_memory(self, num_slots: int) -> StateMemory:
        """Return slots for the states of the mixers."""
        layouts = [mixer.layout for mixer in self.mixers]
        return StateMemory(layouts, num_slots, self._model.device)

    @contextmanager
    def running(
        self,
        memory: StateMemory,
        sequences: Sequence[SequenceRows],
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[None]:
        """Run the mixers over slots of `memory` in one pass. change: applied to their results."""
        counts, sources, targets = zip(*sequences, strict=True)
        columns = ([0, *accumulate(counts)], sources, targets, [0] * len(counts))
        memory.recurrence = Recurrence(*(torch.tensor(c, dtype=torch.int32) for c in columns))
        self.attach(memory)
        self._change = change
        try:
            yield
        finally:
            self._change = None
            self.detach()

    def reads_all_states(self, number: int) -> bool:
        """Return True if a call with several rows reads all states of the mixer."""
        mixer = self.mixers[number]
        module = self._model.get_submodule(mixer.name)
        device, generator = self._model.device, torch.Generator().manual_seed(0)
        width = self._model.config.get_text_config().hidden_size
        rows = torch.randn(1, _ROWS, width, generator=generator).to(device, self._model.dtype)
        zeros = [torch.zeros(1, *state.shape, device=device) for state in mixer.states]
        with torch.inference_mode():
            states = [state.clone() for state in zeros]
            expected = self._call(mixer, module.forward, rows, {}, states, is_new=False)
            for index in range(len(mixer.states)):
                states = [state + (place == index) for place, state in enumerate(zeros)]
                actual = self._call(mixer, module.forward, rows, {}, states, is_new=False)
                if torch.equal(actual, expected):
                    return False
        return True

    def _forward(
        self,
        number: int,
        compute: Callable[..., Tensor],
        hidden_states: Tensor,
        **options: Any,
    ) -> Tensor:
        """Compute a mixer over the flat batch `[1, rows, width]`."""
        assert self._memory is not None and self._memory.recurrence is not None
        recurrence, slots = self._memory.recurrence, self._memory.layers[number]
        if recurrence is not self._recurrence:
            self._groups = _group_rows(recurrence, hidden_states.device)
            self._recurrence = recurrence
        mixer, out = self.mixers[number], torch.empty_like(hidden_states)
        options = _named_options(self._model.get_submodule(mixer.name), options)
        for group in self._groups:
            rows = hidden_states[0][group.rows]
            if group.sources is None:
                states = [slot.new_zeros(len(rows), *slot.shape[1:]) for slot in slots]
            else:
                states = [slot[group.sources] for slot in slots]
            is_new = group.sources is None
            out[0, group.rows] = self._call(mixer, compute, rows, options, states, is_new)
            for slot, state in zip(slots, self._take_states(mixer), strict=True):
                slot[group.targets] = state[group.writers].float()
        return out if self._change is None else self._change(out)

    def _call(
        self,
        mixer: RecurrentMixer,
        compute: Callable[..., Tensor],
        rows: Tensor,
        options: dict[str, Any],
        states: list[Tensor],
        is_new: bool,
    ) -> Tensor:
        """Compute rows `[sequences, rows, width]`, and leave the states after them in the cache."""
        layer: Any = self._cache.layers[mixer.layer]
        for state, tensor in zip(mixer.states, states, strict=True):
            getattr(layer, state.kind)[state.number] = tensor.to(state.dtype)
            getattr(layer, f"is_{state.kind}_initialized")[state.number] = True
            layer.has_previous_state[state.number] = not is_new
            if state.kind == _CONV:
                layer.conv_kernel_size[state.number] = state.shape[-1]
        options = options | {mixer.argument: self._cache}
        parts = [rows] if is_new or mixer.resumes_many else torch.split(rows, 1, dim=1)
        return torch.cat([compute(part, **options) for part in parts], dim=1)

    def _take_states(self, mixer: RecurrentMixer) -> list[Tensor]:
        """Remove the states after the last rows from the cache, and return them."""
        layer, states = self._cache.layers[mixer.layer], []
        for state in mixer.states:
            tensors = getattr(layer, state.kind)
            states.append(tensors[state.number])
            tensors[state.number] = None
        return states
