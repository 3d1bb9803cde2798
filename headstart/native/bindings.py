"""The Python bindings of the compiled kernels: all shared structs and function signatures.

Each struct has the same name and fields as in C++, where comments describe the fields:

    attention/attention.h   Segment, Merger, AttentionStep, AttentionCall
    weight.h                Weight
    layer.h                 Norm, Layer, LayerRun
    screen.h                Screen
    recurrent.h             Sequences, States, Strided, ConvCall, DeltaCall, ScanCall

If a struct differs between Python and C++, kernels would read wrong fields. So the library exports
its layout (`headstart_layout` in native.cpp), and is not used if the layout differs from this file.
"""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import NamedTuple


class Segment(NamedTuple):
    """A row of an int32 array `[segments, 7]`."""

    first_row: int
    num_rows: int
    first_position: int
    table: int
    first_key: int
    last_key: int
    partial: int


class Merger(NamedTuple):
    """A row of an int32 array `[mergers, 3]`."""

    token: int
    first_part: int
    last_part: int


def _of(kind: type, *names: str) -> list[tuple[str, type]]:
    """Return the fields `names` of one type."""
    return [(name, kind) for name in names]


class AttentionStep(ctypes.Structure):
    """The arguments of a step that are the same in all layers with the same plan."""

    _fields_ = (
        *_of(c_void_p, "slots", "tables", "rows", "segments", "mergers", "parts"),
        *_of(c_void_p, "partials", "nonfinite"),
        *_of(c_int32, "num_tokens", "num_segments", "num_mergers", "block_shift", "threads"),
    )


class AttentionCall(ctypes.Structure):
    """One layer's attention."""

    _fields_ = (
        *_of(c_void_p, "query", "key", "value", "out"),
        *_of(c_void_p, "keys", "values", "key_scales", "value_scales", "sinks"),
        *_of(c_int64 * 2, "query_strides", "key_strides", "value_strides"),
        *_of(c_int32, "heads", "kv_heads", "key_dim", "value_dim", "window"),
        *_of(c_float, "scaling", "softcap"),
    )


INT8, INT8_IN_GROUPS, BF16 = 4, 5, 6
"""Values of `Weight.kind`, which is a memory layout. Smaller values are layouts of 4 or 5 bits."""


class Weight(ctypes.Structure):
    """A weight and its bias, with scales if the weight is quantized."""

    _fields_ = (
        *_of(c_void_p, "panels", "bias", "scales", "columns"),
        *_of(c_int64, "inputs", "outputs", "kind"),
    )


class Norm(ctypes.Structure):
    """A norm's weight and epsilon; all zeros if there is no norm."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float), ("gemma", c_int32))


SILU, GELU_TANH = 0, 1
"""Values of `Layer.activation`."""


class Layer(ctypes.Structure):
    """A decoder layer's weights."""

    _fields_ = (
        *_of(Weight, "q", "k", "v", "o", "gate", "up", "down"),
        *_of(Norm, "before", "after", "attention_update", "mlp_update", "q_heads", "k_heads"),
        *_of(c_int64, "head_dim", "activation"),
    )


class LayerRun(ctypes.Structure):
    """A layer's arguments in one step."""

    _fields_ = _of(c_void_p, "layer", "step", "call", "cos", "sin")


class Screen(ctypes.Structure):
    """The 8-bit copy of an LM head's weight."""

    _fields_ = (("panels", c_void_p), ("inputs", c_int64), ("outputs", c_int64))


class Sequences(ctypes.Structure):
    """The sequences of a step, for recurrent layers."""

    _fields_ = (
        *_of(c_void_p, "starts", "sources", "targets", "saves"),
        *_of(c_int64, "count", "num_saves"),
    )


class States(ctypes.Structure):
    """One layer's recurrent states. stride: floats from slot to slot."""

    _fields_ = (("first", c_void_p), ("stride", c_int64))


class Strided(ctypes.Structure):
    """Rows of numbers. stride: numbers from row to row."""

    _fields_ = (("first", c_void_p), ("stride", c_int64))


class ConvCall(ctypes.Structure):
    """One layer's causal convolution."""

    _fields_ = (
        ("rows", Strided),
        *_of(c_void_p, "out", "weight", "bias"),
        ("states", States),
        *_of(c_int64, "channels", "width"),
        *_of(c_int32, "silu", "bf16"),
    )


class DeltaCall(ctypes.Structure):
    """One layer's gated delta rule."""

    _fields_ = (
        *_of(Strided, "query", "key", "value", "a", "b"),
        *_of(c_void_p, "out", "a_log", "dt_bias"),
        ("states", States),
        *_of(c_int64, "key_heads", "heads", "key_dim", "value_dim", "bf16"),
    )


class ScanCall(ctypes.Structure):
    """One layer's Mamba-2 scan."""

    _fields_ = (
        *_of(Strided, "x", "b", "c", "dt"),
        *_of(c_void_p, "out", "a_log", "d", "dt_bias"),
        ("states", States),
        *_of(c_int64, "groups", "heads", "head_dim", "state", "bf16"),
        *_of(c_float, "shortest", "longest"),
    )


_ROWS: tuple[type[NamedTuple], ...] = (Segment, Merger)
_STRUCTS = (
    *(AttentionStep, AttentionCall, Weight, Norm, Layer, LayerRun, Screen),
    *(Sequences, States, Strided, ConvCall, DeltaCall, ScanCall),
)

_PRODUCT = (c_void_p, c_int64, c_void_p, c_int)  # rows, number of rows, output, threads
_LAYERS = (c_void_p, c_int64, c_void_p, c_int64, c_int)  # runs, their number, hidden, rows, threads
# The argument types of functions, which return nothing. Addresses are c_void_p, which accepts
# integers and `ctypes.byref`.
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "native_threads": (c_void_p, c_void_p, c_void_p),
    "native_use_amx": (c_int,),
    "native_use_vnni": (c_int,),
    "attend": (c_void_p, c_void_p),
    "attend_float32": (c_void_p, c_void_p),
    "attend_int8": (c_void_p, c_void_p),
    "pack": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "pack_int8": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "linear": (c_void_p, *_PRODUCT),
    "float_linear": (c_void_p, *_PRODUCT),
    "before_attention": (c_void_p, c_void_p, c_int64, *(c_void_p,) * 5, c_int),
    "after_attention": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int),
    "layers": _LAYERS,
    "float_layers": _LAYERS,
    "half_layers": _LAYERS,
    "screen": (c_void_p, c_void_p, c_int),
    "greedy_tokens": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int),
    "causal_conv": (c_void_p, c_void_p, c_int),
    "gated_delta_rule": (c_void_p, c_void_p, c_int),
    "mamba2_scan": (c_void_p, c_void_p, c_int),
}


def declare_signatures(library: ctypes.CDLL) -> None:
    """Set the signature of every kernel, for ctypes' conversion of arguments."""
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"headstart_{name}")
        function.argtypes, function.restype = arguments, None


def expected_layout() -> dict[str, int]:
    """Return the size in bytes of each struct and the offset of each of its fields, by name.

    >>> expected_layout()["Merger"], expected_layout()["Merger.first_part"]
    (12, 4)
    """
    layout: dict[str, int] = {}
    for row in _ROWS:
        layout[row.__name__] = len(row._fields) * ctypes.sizeof(c_int32)
        for number, field in enumerate(row._fields):
            layout[f"{row.__name__}.{field}"] = number * ctypes.sizeof(c_int32)
    for struct in _STRUCTS:
        layout[struct.__name__] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            layout[f"{struct.__name__}.{field}"] = getattr(struct, field).offset
    return layout


class _LayoutEntry(ctypes.Structure):
    """`LayoutEntry` of native.cpp."""

    _fields_ = (("name", ctypes.c_char_p), ("bytes", c_int64))


def library_layout(library: ctypes.CDLL) -> dict[str, int]:
    """Return the layout that the library exports as data, which is readable on any CPU."""
    first = _LayoutEntry.in_dll(library, "headstart_layout")
    entries = ctypes.cast(ctypes.byref(first), ctypes.POINTER(_LayoutEntry))
    layout: dict[str, int] = {}
    while (entry := entries[len(layout)]).name is not None:
        layout[entry.name.decode()] = entry.bytes
    return layout
