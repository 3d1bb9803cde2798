"""`headstart doctor`, which shows the hardware and packages, and which of them are used."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import click

from headstart import native
from headstart.cli.options import GroupedCommand
from headstart.cli.terminal import show_bytes, show_field
from headstart.imports import install, load_module
from headstart.machine import (
    X86,
    available_memory,
    cpu_flags,
    cpu_name,
    multiplies_bfloat16,
    no_bfloat16_reason,
)
from headstart.version import __version__

# Instruction sets that the kernels and torch use: the flag in /proc/cpuinfo, and the usual name.
_SETS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
}


# The purpose of each extra, and the packages that it installs.
_SERVER = ("fastapi", "granian", "msgspec", "prometheus-client")
EXTRAS = {
    "serve": ("the server", _SERVER),
    "vision": ("images in prompts", ("pillow",)),
    "gguf": ("GGUF files", ("gguf",)),
    "structured": ("JSON schemas, regular expressions, grammars", ("llguidance",)),
    "audio": ("sound over HTTP", ("soundfile", "soxr")),
    "cluster": ("replicas", (*_SERVER, "ray")),
    "remote": ("a cache in Redis or Valkey", ("redis",)),
    "otel": ("traces of requests", ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")),
}


@click.command(cls=GroupedCommand, short_help="Show the hardware, and what headstart uses of it.")
def doctor() -> None:
    """Show this machine's hardware, which parts of it are used, and how to make headstart faster.

    The list has the CPU, its kernels, free memory, GPUs and optional packages.
    """
    for name, text in _lines():
        show_field(name, text, 10)


def _lines() -> Iterator[tuple[str, str]]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    yield "headstart", f"{__version__}, Python {platform.python_version()}, {packages}"
    sets = [text for flag, text in _SETS.items() if flag in cpu_flags()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield (
        "CPU",
        f"{cpu_name()}, {cores} cores: {', '.join(sets) or 'no vector instructions'}",
    )
    yield "kernels", _kernels()
    yield "memory", f"{show_bytes(available_memory())} free"
    torch = load_module("torch")  # takes seconds, so it is imported after the first lines
    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(gpus) or "none that torch can use"
    # The lines about dtype assume a checkpoint in bfloat16.
    if multiplies_bfloat16() is not False:
        yield "dtype", "auto selects the checkpoint's dtype"
    elif native.avx2_library() is not None:
        yield "dtype", f"auto selects float32; weights stay in bfloat16 ({no_bfloat16_reason()})"
    else:
        reason = no_bfloat16_reason()
        yield "dtype", f"auto selects float32 if memory allows, since bfloat16 is slow ({reason})"
    yield from _extras()
    has_avx2 = platform.machine() in X86 and cpu_flags() >= native.NEEDED_FOR_AVX2
    if has_avx2 and not native.is_built():
        yield "faster", "compiled kernels: install g++, then reinstall headstart"
    if has_avx2 and os.environ.get("HEADSTART_NATIVE") != "0":
        yield "faster", "--weights int8: each token reads half as many bytes as in bfloat16"
    if gpus:
        yield "faster", "--device cuda"


def _kernels() -> str:
    if os.environ.get("HEADSTART_NATIVE") == "0":
        return "switched off by HEADSTART_NATIVE=0"
    if not native.is_built():
        text = "not built: torch operations are used"
    elif native.library() is not None:
        amx = ", with AMX" if native.level() >= native.AMX else ""
        text = f"all: whole layers, attention and greedy sampling in bfloat16{amx}"
    elif native.avx2_library() is not None:
        vnni = " (4 to 8 bits with VNNI)" if native.vnni() else ""
        text = (
            f"attention, matrix products with weights of 4 to 16 bits{vnni}, and whole layers in "
            "steps of few tokens, all in float32; otherwise torch operations"
        )
    else:
        text = "built, but none is for this CPU: torch operations are used"
    cap = os.environ.get("HEADSTART_CPU")
    return f"{text}; limited by HEADSTART_CPU={cap}" if cap else text


def _extras() -> Iterator[tuple[str, str]]:
    installed, missing = {}, {}
    for name, (purpose, packages) in EXTRAS.items():
        try:
            _ = [version(package) for package in packages]
        except PackageNotFoundError:
            missing[name] = f"{name} ({purpose})"
        else:
            installed[name] = f"{name} ({purpose})"
    yield "extras", ", ".join(installed.values()) or "none"
    if missing:
        yield "missing", f"{', '.join(missing.values())}: {install(','.join(missing))}"
