"""The Python binding of the compiled kernels: every shared struct and function signature.

Each struct has the same name and fields as in C++, where comments describe the fields:

    attention/attention.h   Segment, Merger, AttentionStep, AttentionCall
    weight.h      Weight
    layer.h       Norm, Layer, LayerRun
    screen.h      Screen

A field on only one side would shift all fields after it. So the library exports the layout of its
structs (`headstart_layout` in native.cpp); a library that differs from this file is not used.
"""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import NamedTuple

__all__ = [
    "BF16",
    "INT8",
    "INT8_IN_GROUPS",
    "AttentionCall",
    "AttentionStep",
    "Layer",
    "LayerRun",
    "Merger",
    "Norm",
    "Screen",
    "Segment",
    "Weight",
    "declare",
    "expected_layout",
    "library_layout",
]


class Segment(NamedTuple):
    """Fields of int32: a row of an array `[segments, 7]`."""

    first_row: int
    num_rows: int
    first_position: int
    table: int
    first_key: int
    last_key: int
    partial: int


class Merger(NamedTuple):
    """Fields of int32: a row of an array `[mergers, 3]`."""

    token: int
    first_part: int
    last_part: int


class AttentionStep(ctypes.Structure):
    """The arguments that all layers of a step with the same plan share."""

    _fields_ = (
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("rows", c_void_p),
        ("segments", c_void_p),
        ("mergers", c_void_p),
        ("parts", c_void_p),
        ("partials", c_void_p),
        ("nonfinite", c_void_p),
        ("num_tokens", c_int32),
        ("num_segments", c_int32),
        ("num_mergers", c_int32),
        ("block_shift", c_int32),
        ("threads", c_int32),
    )


_Strides = c_int64 * 2


class AttentionCall(ctypes.Structure):
    """One layer's attention."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("out", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("sinks", c_void_p),
        ("query_strides", _Strides),
        ("key_strides", _Strides),
        ("value_strides", _Strides),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("window", c_int32),
        ("scaling", c_float),
        ("softcap", c_float),
    )


INT8, INT8_IN_GROUPS, BF16 = 4, 5, 6
"""How a `Weight` lies: its kind; below these it is the form of one of 4 or 5 bits."""


class Weight(ctypes.Structure):
    """A weight and its bias; with scales if it is of 8 bits or fewer."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("columns", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("kind", c_int64),
    )


class Norm(ctypes.Structure):
    """A norm's weight and epsilon; all zeros if there is no norm."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class Layer(ctypes.Structure):
    """A decoder layer's weights."""

    _fields_ = (
        *((name, Weight) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, Norm) for name in ("before", "after", "q_heads", "k_heads")),
        ("head_dim", c_int64),
    )


class LayerRun(ctypes.Structure):
    """A layer's arguments in one step."""

    _fields_ = (("layer", c_void_p), ("step", c_void_p), ("call", c_void_p))


class Screen(ctypes.Structure):
    """The 8-bit copy of an LM head's weight."""

    _fields_ = (("panels", c_void_p), ("inputs", c_int64), ("outputs", c_int64))


_ROWS: tuple[type[NamedTuple], ...] = (Segment, Merger)
_STRUCTS = (AttentionStep, AttentionCall, Weight, Norm, Layer, LayerRun, Screen)

_PRODUCT = (c_void_p, c_int64, c_void_p, c_int)  # rows, their number, where to, threads
_LAYERS = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int)
# The arguments of functions, which return nothing. Addresses are c_void_p, which takes integers and
# `ctypes.byref`.
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
    "screen": (c_void_p, c_void_p, c_int),
    "greedy_tokens": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every kernel its signature, so that ctypes converts its arguments for C++."""
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"headstart_{name}")
        function.argtypes, function.restype = arguments, None


def expected_layout() -> dict[str, int]:
    """Size in bytes of each struct and offset of each of its fields, by name.

    >>> expected_layout()["Merger"], expected_layout()["Merger.first_part"]
    (12, 4)
    """
    found: dict[str, int] = {}
    for row in _ROWS:
        found[row.__name__] = len(row._fields) * ctypes.sizeof(c_int32)
        for number, field in enumerate(row._fields):
            found[f"{row.__name__}.{field}"] = number * ctypes.sizeof(c_int32)
    for struct in _STRUCTS:
        found[struct.__name__] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            found[f"{struct.__name__}.{field}"] = getattr(struct, field).offset
    return found


class _LayoutEntry(ctypes.Structure):
    """`LayoutEntry` of native.cpp."""

    _fields_ = (("name", ctypes.c_char_p), ("bytes", c_int64))


def library_layout(library: ctypes.CDLL) -> dict[str, int]:
    """The layout that the library exports. It is data, so any CPU can read it."""
    first = _LayoutEntry.in_dll(library, "headstart_layout")
    entries = ctypes.cast(ctypes.byref(first), ctypes.POINTER(_LayoutEntry))
    found: dict[str, int] = {}
    number = 0
    while (name := entries[number].name) is not None:
        found[name.decode()] = entries[number].bytes
        number += 1
    return found
