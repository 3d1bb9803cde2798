"""Structs that Python and C++ share have one layout: a field on one side alone shifts the rest."""

import ctypes

import pytest

from headstart import native
from headstart.attention.native_step import CallStruct, StepStruct
from headstart.models import fused
from headstart.models.packed import WeightStruct

_INT32 = ctypes.sizeof(ctypes.c_int32)
MIRRORED = {
    "AttentionStep": ctypes.sizeof(StepStruct),
    "AttentionCall": ctypes.sizeof(CallStruct),
    "Segment": 7 * _INT32,
    "Merger": 3 * _INT32,
    "Weight": ctypes.sizeof(WeightStruct),
    "Norm": ctypes.sizeof(fused._NormStruct),
    "Layer": ctypes.sizeof(fused._LayerStruct),
    "LayerRun": ctypes.sizeof(fused._RunStruct),
}


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")
def test_both_sides_count_the_same_bytes() -> None:
    library = native.library()
    assert library is not None
    found = (ctypes.c_int64 * len(MIRRORED))()
    library.headstart_struct_bytes(ctypes.byref(found))
    assert dict(zip(MIRRORED, found, strict=True)) == MIRRORED
