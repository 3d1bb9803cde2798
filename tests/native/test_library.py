"""The compiled library: loaded where it can be, done without where it cannot."""

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
    """A compiled library that notes how it is set up."""

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
    found = native.library()
    if found is None:
        pytest.skip("no compiled kernels here")
    return found


def test_it_is_there_where_compiler_and_cpu_are(use_kernels: Callable[..., None]) -> None:
    """Else every test of a kernel would be skipped in silence."""
    use_kernels("1", "")
    if shutil.which("g++") is None:
        pytest.skip("no compiler here")
    assert not cpu_flags() >= native.NEEDED_FOR_AVX2 or native.avx2_library() is not None
    assert not cpu_flags() >= native.NEEDED or native.library() is not None


def test_flags_are_asked_for_that_the_sources_are_compiled_for() -> None:
    """int4's products convert float16: without F16C, which nobody asked for, they would end the
    process."""
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for file in (*FOLDER.rglob("*.cpp"), *FOLDER.rglob("*.h")):
        for flags in re.findall(r'#pragma GCC target\("([^"]+)"\)', file.read_text()):
            if not flags.startswith("amx"):
                found["avx512" in flags] |= set(flags.split(","))
    # VNNI has a question of its own, with AVX-512 or without: headstart_native_vnni().
    assert found[False] - {"avxvnni"} == native.NEEDED_FOR_AVX2
    assert found[True] - {"fma", "f16c"} == {flag.replace("_", "") for flag in native.NEEDED}


@pytest.fixture
def noted(library: ctypes.CDLL) -> Iterator[list[int]]:
    """The number of each thread of torch's OpenMP library that takes part in a kernel's work."""
    if OPENMP is None:
        pytest.skip("torch has another pool of threads here")
    parallel, number, count = OPENMP
    number_of_this = ctypes.CFUNCTYPE(ctypes.c_int)(number)
    found: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def note() -> int:
        found.append(number_of_this())
        return found[-1]

    library.headstart_native_threads(parallel, ctypes.cast(note, ctypes.c_void_p), count)
    yield found
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
def test_threads_are_moved_and_not_bound(multiply: Callable[[int], torch.Tensor]) -> None:
    allowed = os.sched_getaffinity(0)
    for _ in range(20):
        multiply(3)
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    assert all(os.sched_getaffinity(thread) == allowed for thread in threads)


def test_the_environment_switches_it_off(use_kernels: Callable[..., None]) -> None:
    use_kernels("0")
    assert native.library() is None


def test_another_switch_than_there_is_is_refused(use_kernels: Callable[..., None]) -> None:
    """`false` switched nothing off, without a message."""
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
def test_a_missing_library_is_told_once_with_what_to_install(
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
    said = [record.getMessage() for record in logged]
    assert len(said) == expected
    assert all("C++ compiler" in text and "apt install g++" in text for text in said)
    assert not any("\n" in text for text in said)


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
def test_the_kernels_that_the_cpu_can_run_and_the_cap(
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


def test_a_cap_that_is_none_is_refused(use_kernels: Callable[..., None]) -> None:
    """It was no limit: comparisons of CPU classes compared one class with itself."""
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
    """The level decides on kernels, with any threads of torch. A single thread is reported."""
    use_kernels("1", cap)
    library = load(StandIn(level), openmp)
    assert native.library() is library
    assert (library.amx, library.vnni) == ([expected], [0])
    assert library.threads == (openmp or [])
    said = [record.getMessage() for record in logged]
    assert len(said) == (openmp is None) and all("run on one thread" in text for text in said)


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


def test_the_library_finds_the_vnni_that_linux_finds() -> None:
    """Another's instructions would end the process; in emulation the library has all of them."""
    found, flags = native.avx2_library(), cpu_flags()
    if found is None or not flags:
        pytest.skip("no compiled kernels here, or no list of the CPU's instructions")
    wide = flags >= {"avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert found.headstart_native_vnni() in {2 * wide + ("avx_vnni" in flags), 3}


def test_the_baseline_has_no_instruction_that_a_cpu_may_lack() -> None:
    """The functions that ask what the CPU has are compiled without any -mavx flag."""
    settings = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text())
    [module] = settings["tool"]["setuptools"]["ext-modules"]
    assert not [flag for flag in module["extra-compile-args"] if flag.startswith("-m")]


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_without_a_library_there_is_none(tmp_path: Path, content: bytes | None) -> None:
    """A file that is no library is left alone."""
    if content is not None:
        (tmp_path / f"_kernels{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    assert native._load(tmp_path) is None


def test_a_library_of_other_sources_is_not_used(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    assert native._load.__wrapped__(Path(library._name).parent) is None


@pytest.mark.skipif(not EMULATE.exists(), reason="no tools beside these tests")
def test_what_the_emulation_runs_is_there() -> None:
    found = runpy.run_path(str(EMULATE))
    for name in (*found["TESTS"], *found["NOT_EMULATED"]):
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
    """Or the thread that runs the steps would wake its own 200 times a token."""
    command = [sys.executable, "-c", RELEASED, *loads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [left, "True"], done.stderr
