"""The compiled library is loaded where possible, and optional elsewhere."""

import ctypes
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import native
from headstart.attention import LayerLayout, PagedKVMemory, make_backend
from headstart.errors import ConfigError
from headstart.machine import cpu_flags
from headstart.weights.bf16 import PackedWeight

FOLDER = Path(native.__file__).parent
ROOT = Path(__file__).parents[2]
EMULATE = ROOT / "tools" / "emulate.py"
BUILT = any((FOLDER / f"_kernels{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


OPENMP = native._openmp()


class StandIn:
    """A stand-in for the compiled library that records its setup."""

    def __init__(self, level: int, vnni: int = 0) -> None:
        self.amx: list[bool] = []
        self.vnni: list[int] = []
        self.threads: list[int] = []
        self.headstart_native_level = lambda: level
        self.headstart_native_vnni = lambda: vnni
        self.headstart_native_use_amx = self.amx.append
        self.headstart_native_use_vnni = self.vnni.append

    def headstart_native_threads(self, *addresses: int) -> None:
        self.threads += addresses


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load this object as the compiled library, on these functions of OpenMP."""
    set_up = native._threaded.__wrapped__

    def load(library: StandIn | None, openmp: list[int] | None = None) -> StandIn | None:
        for name, value in (("_load", library), ("_openmp", openmp)):
            monkeypatch.setattr(native, name, lambda *_, value=value: value)
        monkeypatch.setattr(native, "_threaded", set_up)
        return library

    return load


@pytest.fixture
def library() -> ctypes.CDLL:
    library = native.library()
    if library is None:
        pytest.skip("no compiled kernels here")
    return library


def test_it_is_built_if_compiler_and_cpu_allow(use_kernels: Callable[..., None]) -> None:
    """Otherwise every test of a kernel would be skipped silently."""
    use_kernels("1", "")
    if shutil.which("g++") is None:
        pytest.skip("no compiler here")
    assert not cpu_flags() >= native.NEEDED_FOR_AVX2 or native.avx2_library() is not None
    assert not cpu_flags() >= native.NEEDED or native.library() is not None


def test_required_cpu_flags_are_those_of_the_sources() -> None:
    """Regression: int4's products crashed without F16C, which was not checked."""
    flags_by_width: dict[bool, set[str]] = {False: set(), True: set()}
    for file in (*FOLDER.rglob("*.cpp"), *FOLDER.rglob("*.h")):
        for flags in re.findall(r'#pragma GCC target\("([^"]+)"\)', file.read_text()):
            if not flags.startswith("amx"):
                flags_by_width["avx512" in flags] |= set(flags.split(","))
    # VNNI is checked separately, with AVX-512 or without: headstart_native_vnni().
    assert flags_by_width[False] - {"avxvnni"} == native.NEEDED_FOR_AVX2
    assert flags_by_width[True] - {"fma", "f16c"} == {
        flag.replace("_", "") for flag in native.NEEDED
    }


@pytest.fixture
def noted(library: ctypes.CDLL) -> Iterator[list[int]]:
    """Yield the numbers of torch's OpenMP threads that take part in a kernel's work."""
    if OPENMP is None:
        pytest.skip("torch has another pool of threads here")
    parallel, number, count = OPENMP
    number_of_this = ctypes.CFUNCTYPE(ctypes.c_int)(number)
    numbers: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def note() -> int:
        numbers.append(number_of_this())
        return numbers[-1]

    library.headstart_native_threads(parallel, ctypes.cast(note, ctypes.c_void_p), count)
    yield numbers
    library.headstart_native_threads(parallel, number, count)


@pytest.fixture
def multiply(library: ctypes.CDLL) -> Callable[[int], torch.Tensor]:
    """Return a function that computes a product on any number of threads."""
    weight = PackedWeight(torch.randn(100, 70).bfloat16())
    x = torch.randn(5, 70).bfloat16()

    def run(threads: int) -> torch.Tensor:
        out = torch.empty(5, 100, dtype=torch.bfloat16)
        address = ctypes.addressof(weight.product.struct)
        library.headstart_linear(address, x.data_ptr(), len(x), out.data_ptr(), threads)
        return out

    return run


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_work_is_shared_among_threads(
    multiply: Callable[[int], torch.Tensor], noted: list[int], threads: int
) -> None:
    shared = multiply(threads)
    assert sorted(noted) == (list(range(threads)) if threads > 1 else [])
    assert torch.equal(shared, multiply(1))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not moved here")
def test_threads_are_moved_but_not_bound(multiply: Callable[[int], torch.Tensor]) -> None:
    allowed = os.sched_getaffinity(0)
    for _ in range(20):
        multiply(3)
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    assert all(os.sched_getaffinity(thread) == allowed for thread in threads)


def test_the_environment_switches_it_off(use_kernels: Callable[..., None]) -> None:
    use_kernels("0")
    assert native.library() is None


def test_an_unknown_switch_is_refused(use_kernels: Callable[..., None]) -> None:
    """Regression: `false` switched nothing off, without a message."""
    use_kernels("false")
    with pytest.raises(ConfigError, match="HEADSTART_NATIVE is 'false'; allowed: 0, 1, or unset"):
        native.avx2_library()


@pytest.mark.parametrize(
    ("flags", "environment", "dtype", "expected"),
    [
        (native.NEEDED | {"avx2"}, "1", torch.bfloat16, 1),
        (native.NEEDED | {"avx2"}, "1", torch.float32, 1),
        (native.NEEDED, "1", torch.float16, 0),  # which the kernels do not serve
        (native.NEEDED_FOR_AVX2, "1", torch.bfloat16, 1),
        (native.NEEDED_FOR_AVX2 - {"f16c"}, "1", torch.bfloat16, 0),
        (native.NEEDED - {"avx512_bf16"}, "1", torch.bfloat16, 0),  # a compiler would not help
        (native.NEEDED, "0", torch.bfloat16, 0),
    ],
)
def test_a_missing_library_is_reported_once_with_advice(
    flags: frozenset[str],
    environment: str,
    dtype: torch.dtype,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[logging.LogRecord],
    use_kernels: Callable[..., None],
    load: Callable[..., Any],
) -> None:
    use_kernels(environment)
    monkeypatch.setattr(native, "cpu_flags", lambda: flags)
    load(None)
    native.advise.cache_clear()
    for _ in range(2):
        make_backend(PagedKVMemory([LayerLayout(2, 64, 64)], 4, 16, dtype, "cpu"))
    native.advise.cache_clear()
    messages = [record.getMessage() for record in logged]
    assert len(messages) == expected
    assert all("C++ compiler" in text and "apt install g++" in text for text in messages)
    assert not any("\n" in text for text in messages)


@pytest.mark.parametrize(
    ("level", "cap", "usable", "avx2"),
    [
        (3, "", True, True),
        (3, "avx512", True, True),
        (3, "avx2", False, True),
        (2, "", True, True),
        (2, "avx2", False, True),
        (1, "", False, True),
        (1, "avx2", False, True),
        (0, "", False, False),
    ],
)
def test_the_cpu_and_the_cap_choose_the_kernels(
    level: int,
    cap: str,
    usable: bool,
    avx2: bool,
    use_kernels: Callable[..., None],
    load: Callable[..., Any],
) -> None:
    use_kernels("1", cap)
    load(StandIn(level))
    assert native.is_usable() == (native.library() is not None) == usable
    assert (native.avx2_library() is not None) == avx2


def test_an_unknown_cap_is_refused(use_kernels: Callable[..., None]) -> None:
    """Regression: it had no effect, so comparisons of CPU classes used one class twice."""
    use_kernels(cpu="AVX-2")
    with pytest.raises(ConfigError, match="HEADSTART_CPU is 'AVX-2'; allowed: avx2, avx512"):
        native.level()


@pytest.mark.parametrize(
    ("level", "cap", "expected"), [(3, "", True), (3, "avx512", False), (2, "", False)]
)
@pytest.mark.parametrize("openmp", [None, [1, 2, 3]])
def test_amx_multiplies_where_the_cpu_has_it(
    level: int,
    cap: str,
    expected: bool,
    openmp: list[int] | None,
    logged: list[logging.LogRecord],
    use_kernels: Callable[..., None],
    load: Callable[..., Any],
) -> None:
    """The level selects kernels, with any number of torch threads. A single thread is reported."""
    use_kernels("1", cap)
    library = load(StandIn(level), openmp)
    assert native.library() is library
    assert (library.amx, library.vnni) == ([expected], [0])
    assert library.threads == (openmp or [])
    messages = [record.getMessage() for record in logged]
    assert len(messages) == (openmp is None) and all(
        "run on one thread" in text for text in messages
    )


@pytest.mark.parametrize(
    ("kinds", "cap", "expected"),
    [
        *((0, "", 0), (1, "", 1), (2, "", 2), (3, "", 2)),
        *((1, "avx512", 1), (3, "avx512", 2), (1, "avx2", 0), (3, "avx2", 0)),
    ],
)
def test_bytes_are_multiplied_by_the_best_vnni_under_the_cap(
    kinds: int, cap: str, expected: int, use_kernels: Callable[..., None], load: Callable[..., Any]
) -> None:
    use_kernels("1", cap)
    library = load(StandIn(1, kinds), [1, 2, 3])
    assert native.avx2_library() is library
    assert library.amx == [False]
    assert library.vnni == [expected] == [native.vnni()]


def test_the_library_detects_the_same_vnni_as_linux() -> None:
    """Unsupported instructions would end the process; in emulation the library has all of them."""
    library, flags = native.avx2_library(), cpu_flags()
    if library is None or not flags:
        pytest.skip("no compiled kernels here, or no list of the CPU's instructions")
    wide = flags >= {"avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert library.headstart_native_vnni() in {2 * wide + ("avx_vnni" in flags), 3}


def test_the_baseline_has_no_instruction_that_a_cpu_may_lack() -> None:
    """The functions that detect CPU features are compiled without any -mavx flag."""
    settings = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text())
    [module] = settings["tool"]["setuptools"]["ext-modules"]
    assert not [flag for flag in module["extra-compile-args"] if flag.startswith("-m")]


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_a_missing_or_invalid_library_is_not_loaded(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / f"_kernels{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    assert native._load(tmp_path) is None


def test_a_library_of_other_sources_is_not_used(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    assert native._load.__wrapped__(Path(library._name).parent) is None


@pytest.mark.skipif(not EMULATE.exists(), reason="no tools next to these tests")
def test_files_of_the_emulation_exist() -> None:
    emulation = runpy.run_path(str(EMULATE))
    for name in (*emulation["TESTS"], *emulation["NOT_EMULATED"]):
        assert (ROOT / name).exists(), name


RELEASED = """
import os, sys, torch
from headstart import LLM
from headstart.native import release_threads

def count_released():
    before = len(os.listdir("/proc/self/task"))
    release_threads()
    return before - len(os.listdir("/proc/self/task"))

if sys.argv[1:]:
    LLM("headstart-tiny", num_blocks=16, num_threads=2, cache_dir="off")
else:
    torch.set_num_threads(2)
    torch.rand(1 << 22).add_(1)
print(count_released(), bool((torch.ones(1 << 22) + 1 == 2).all()))
"""


@pytest.mark.skipif(OPENMP is None, reason="torch has no OpenMP of GNU's here")
@pytest.mark.parametrize(("loads", "left"), [((), "1"), (("model",), "0")])
def test_threads_that_wait_for_the_loading_one_are_released(
    loads: tuple[str, ...], left: str
) -> None:
    """Otherwise the thread that runs the steps would wake its own threads 200 times per token."""
    command = [sys.executable, "-c", RELEASED, *loads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [left, "True"], done.stderr
