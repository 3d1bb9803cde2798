"""The machine: instruction sets of the CPU, free memory, the user's data folder. Needs no torch."""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

X86 = ("x86_64", "AMD64")
"""The values of `platform.machine` on 64-bit x86."""

_CPUINFO = Path("/proc/cpuinfo")


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


@cache
def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the instruction sets that all cores have, in Linux's names; empty on other systems."""
    fields = [line.partition(":") for line in _read_lines(cpuinfo)]
    flags = [set(value.split()) for name, _, value in fields if name.strip() in _FLAG_FIELDS]
    return frozenset(set.intersection(*flags)) if flags else frozenset()


_FLAG_FIELDS = ("flags", "Features")  # on x86, on ARM
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})  # on x86


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the CPU, or its architecture if the name is unknown."""
    lines = _read_lines(cpuinfo)
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def multiplies_bfloat16() -> bool | None:
    """Return True if this CPU multiplies bfloat16 fast; None if that is unknown.

    Without instructions for bfloat16, torch's products take 6 to 25 times as long as in float32.
    `HEADSTART_CPU=avx2` disables such instructions.
    """
    flags = cpu_flags()
    if not flags:
        return None
    if platform.machine() in X86:
        return not _is_capped() and not flags.isdisjoint(_BFLOAT16)
    return "bf16" in flags


def no_bfloat16_reason() -> str:
    """Return the reason why `multiplies_bfloat16` is False, in a few words."""
    if _is_capped() and not cpu_flags().isdisjoint(_BFLOAT16):
        return "HEADSTART_CPU=avx2 disables its bfloat16 instructions"
    is_x86 = platform.machine() in X86
    return "no AVX512-BF16, no AMX-BF16" if is_x86 else "no bfloat16 instructions"


def _is_capped() -> bool:
    return os.environ.get("HEADSTART_CPU") == "avx2"


def available_memory() -> int:
    """Return the bytes of host memory that can still be allocated."""
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def data_folder() -> Path:
    """Return the user's data folder (XDG base directories). It may not exist yet.

    Raises RuntimeError if the user has no home.
    """
    folder = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(folder).expanduser() / "headstart"


def return_freed_memory() -> bool:
    """Return freed memory of this process to the system; True if there was any.

    GNU's C library retains freed memory at lower addresses than memory in use. After the conversion
    of Qwen2.5-0.5B's weights to 8 bits, this memory is about 125 MB. Other C libraries have no such
    call and need none.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: on Windows
        return False
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return bool(trim(0))
