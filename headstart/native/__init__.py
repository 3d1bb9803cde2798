"""Compiled kernels: C++ built when headstart is installed, if there is a compiler.

One library serves every x86 CPU. Most kernels need AVX-512 with its bf16 and VNNI instructions
(`library`). Kernels for float32 rows and for recurrent layers need only AVX2 (`avx2_library`). If
the library was not built or the CPU lacks the instructions, these functions return None, and
callers use torch operations. If the CPU has AMX, bf16 products use it. Products of bytes use VNNI
if the CPU has it.

The environment variable `HEADSTART_NATIVE=0` disables all kernels. `HEADSTART_CPU=avx512` disables
AMX. `HEADSTART_CPU=avx2` disables all instructions beyond AVX2; `dtype="auto"` is then float32, as
on a CPU without them. Other values raise `ConfigError`.

Kernels take numbers, addresses and structs (ctypes), as `bindings` declares them. They run on the
threads of torch's OpenMP library, since a second thread pool would compete for the cores.
"""

import ctypes
import logging
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from headstart.errors import ConfigError, ModelError
from headstart.machine import cpu_flags
from headstart.native import bindings

# The interface version in native.h; a library with another version is not used.
INTERFACE = 25

NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"})
"""The CPU flags that most kernels need, in Linux's names."""

NEEDED_FOR_AVX2 = frozenset({"avx2", "fma", "f16c"})
"""The CPU flags that AVX2 kernels need."""
# The results of headstart_native_level().
_AVX2, _AVX512, AMX = 1, 2, 3
_CAPS = {"": AMX, "avx2": _AVX2, "avx512": _AVX512}  # by HEADSTART_CPU

_FOLDER = Path(__file__).parent
_log = logging.getLogger(__name__)


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if they are missing, disabled or unsupported by the CPU."""
    return _threaded() if is_usable() else None


def avx2_library() -> ctypes.CDLL | None:
    """Return the library for kernels that need only AVX2; None if these cannot be used."""
    return _threaded() if level() >= _AVX2 else None


def required(kernels: ctypes.CDLL | None) -> ctypes.CDLL:
    """Return the result of `library` or `avx2_library`; raise `ModelError` for None.

    A model that is loaded on this machine uses only kernels that are available here. So kernels can
    be missing only for a model that was pickled on another machine.
    """
    if kernels is None:
        raise ModelError(
            "a pickled model has weights packed for the compiled kernels, which are not available "
            "on this machine; load the model here instead of unpickling it"
        )
    return kernels


def is_usable() -> bool:
    """Return True if the kernels that need AVX-512 can be used. Does not import torch."""
    return level() >= _AVX512


def is_built() -> bool:
    """Return True if the library was built from these sources; the CPU may be unable to run it."""
    return _load(_FOLDER) is not None


def level() -> int:
    """Return the usable kernels: 0 none, 1 those for AVX2, 2 also AVX-512, 3 (`AMX`) all."""
    cap = os.environ.get("HEADSTART_CPU", "")
    if cap not in _CAPS:
        raise ConfigError(f"HEADSTART_CPU is {cap!r}; allowed: avx2, avx512, or unset")
    kernels = _load(_FOLDER) if _is_wanted() else None
    return 0 if kernels is None else min(_CAPS[cap], _read_cpu(kernels)[0])


def vnni() -> int:
    """Return the instructions for products of bytes: 0 AVX2, 1 AVX-VNNI, 2 AVX-512 VNNI."""
    kernels = _load(_FOLDER) if level() else None
    if kernels is None or os.environ.get("HEADSTART_CPU") == "avx2":
        return 0
    return _read_cpu(kernels)[1].bit_length()  # 2 if the CPU has both


@cache
def _read_cpu(kernels: ctypes.CDLL) -> tuple[int, int]:
    """Return the CPU's levels of kernels and of VNNI; reading them is slow in a VM."""
    return int(kernels.headstart_native_level()), int(kernels.headstart_native_vnni())


def _is_wanted() -> bool:
    switch = os.environ.get("HEADSTART_NATIVE", "")
    if switch not in ("", "0", "1"):
        raise ConfigError(f"HEADSTART_NATIVE is {switch!r}; allowed: 0, 1, or unset")
    return switch != "0"


@cache
def advise() -> None:
    """Log how to install missing kernels, once per process, if this CPU could run them."""
    is_missing = _is_wanted() and not is_built()
    if is_missing and (cpu_flags() >= NEEDED or cpu_flags() >= NEEDED_FOR_AVX2):
        _log.warning(
            "headstart runs without its compiled kernels, up to several times slower: install "
            "GCC's C++ compiler (Debian, Ubuntu: apt install g++), then headstart again, in the "
            "folder of the clone (make demo, or pip install --force-reinstall --no-deps "
            "--no-cache-dir .)"
        )


@cache
def _threaded() -> ctypes.CDLL | None:
    kernels, functions = _load(_FOLDER), _openmp()
    if kernels is not None:
        kernels.headstart_native_use_amx(level() >= AMX)
        kernels.headstart_native_use_vnni(vnni())
        if functions is not None:
            kernels.headstart_native_threads(*functions)
        else:
            _log.warning(
                "compiled kernels run on one thread: torch is not linked to an OpenMP library "
                "with GNU's interface"
            )
    return kernels


@cache
def _load(folder: Path) -> ctypes.CDLL | None:
    """Return the library in a folder if it was built from these sources for this machine."""
    paths = (folder / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    path = next((path for path in paths if path.exists()), None)
    try:
        kernels = None if path is None else ctypes.CDLL(str(path))
    except OSError:  # built for another machine
        return None
    if kernels is None or kernels.headstart_native_interface() != INTERFACE:
        return None
    expected, actual = bindings.expected_layout(), bindings.library_layout(kernels)
    for name in expected | actual:
        if expected.get(name) != actual.get(name):
            sizes = f"{actual.get(name)} in C++ and {expected.get(name)} in Python (bytes)"
            _log.warning("compiled kernels are not used: %s is %s", name, sizes)
            return None
    bindings.declare_signatures(kernels)
    return kernels


def _openmp() -> list[int | None] | None:
    """Return addresses in torch's OpenMP library; None if torch has another thread pool.

    The process may have several OpenMP libraries. A symbol lookup through torch's library finds the
    OpenMP library that torch is linked to.
    """
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    torch = _torch_library()
    if torch is None or not all(hasattr(torch, name) for name in names):
        return None
    return [ctypes.cast(getattr(torch, name), ctypes.c_void_p).value for name in names]


def _torch_library() -> ctypes.CDLL | None:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        return ctypes.CDLL(str(Path(torch.origin).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


def release_threads() -> None:
    """End the OpenMP threads of the calling thread; its next parallel work starts them again.

    GNU's OpenMP retains worker threads for each thread that ever computed in parallel. Workers spin
    before they sleep. If there are more workers than cores, they spin for a shorter time, and
    waking them delays tokens.
    """
    soft = 1  # omp_pause_soft
    pause = getattr(_torch_library(), "omp_pause_resource_all", None)
    if pause is not None:
        pause(soft)
