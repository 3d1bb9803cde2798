"""Run the tests of all kernels on any x86 CPU.

    python tools/emulate.py [--sanitize] [arguments for pytest]

A copy of the sources is built with `emulation/immintrin.h`, which implements AVX-512 and AMX
instructions in C++, and the tests run in that copy. Results are the kernels'; times mean nothing.
Needs GCC and Linux.

`--sanitize` draws a thousand cases per random test, and adds AddressSanitizer and
UndefinedBehaviorSanitizer: the first access outside a tensor ends the run and prints its line of
C++. Tensors of torch and numpy are checked too, since `malloc` allocates them. So are masked loads
and stores; as instructions they would not be checked.

Sources are compiled and tests run in one process per core; `-n 0` runs the tests in one process.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).parent.parent
EMULATION = Path(__file__).parent / "emulation"
COMPILER = os.environ.get("CXX", "g++")
EMULATED = (
    *("-march=native", f"-I{EMULATION}", "-Wno-psabi"),
    *("-D__builtin_cpu_supports(feature)=1", "-DHEADSTART_EMULATED"),
)
# Sources that every x86 CPU runs without emulation.
NOT_EMULATED = [
    f"headstart/native/{name}.cpp"
    for name in (
        "attention/float32",
        "narrow/half",
        "narrow/integers",
        "narrow/integers_vnni",
        "narrow/layers",
        "recurrent",
    )
]
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
# Also emulated: AVX-VNNI, which fewer CPUs have than AVX2.
AVX_VNNI = ("-march=native", "-DHEADSTART_EMULATED", "-include", str(EMULATION / "avx_vnni.h"))
# Masked loads, so that the sanitizers check them.
WATCHED = ("-include", str(EMULATION / "watched_avx2.h"))
SPREAD = ("-n", "logical", "--maxprocesses", "8", "--dist", "worksteal")
TESTS = (
    *("tests/native", "tests/attention", "tests/models/lora", "tests/engine/test_paths.py"),
    *("tests/models/dense", "tests/models/transformers_backend/test_pack.py"),
    *(f"tests/weights/test_{name}.py" for name in ("greedy_head", "packed", "half_weight")),
    "tests/models/test_nonfinite.py",
    "tests/weights/test_grouped.py",
    "tests/weights/test_int8.py",
)


def main(arguments: list[str]) -> int:
    """Copy, build and test; return pytest's exit status."""
    sanitize = arguments[:1] == ["--sanitize"]
    tests = arguments[sanitize:] or TESTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("headstart", "tests", "bench"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        build(folder, SANITIZED if sanitize else ())
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "2"}
        if sanitize:
            environment |= sanitizer()
        # Emulated instructions are slow, so tests have no time limit. Each test is printed when it
        # ends, so that an interrupted run has shown its failures.
        options = [*SPREAD, "--capture=sys", "--timeout=0", "-vv"]
        if sanitize:
            options += ["--hypothesis-profile", "deep"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        return subprocess.run(command, cwd=folder, env=environment).returncode


def sanitizer() -> dict[str, str]:
    """Return the environment variables for a process that loads a library with sanitizers."""
    # Without libstdc++ the sanitizer would end the run at torch's first exception.
    preloaded = [find_library(name) for name in ("libasan.so", "libstdc++.so.6")]
    return {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # Python leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def find_library(name: str) -> str:
    """Return the path of a library of the compiler."""
    command = [COMPILER, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path, flags: tuple[str, ...]) -> None:
    """Build the kernel library of the sources in `folder`."""
    settings = tomllib.loads((folder / "pyproject.toml").read_text())
    [module] = settings["tool"]["setuptools"]["ext-modules"]
    for old in (folder / "headstart" / "native").glob("_kernels.*"):
        old.unlink()
    target = f"headstart/native/_kernels{EXTENSION_SUFFIXES[0]}"
    command = [COMPILER, *module["extra-compile-args"], "-fPIC", "-w", *flags]

    def compile_source(source: str) -> str:
        made = str(folder / source.replace("/", "-")) + ".o"
        special = EMULATED if source not in NOT_EMULATED else WATCHED if flags else ()
        if source.endswith("integers_vnni.cpp"):
            special = (*special, *AVX_VNNI)
        subprocess.run([*command, *special, "-c", source, "-o", made], cwd=folder, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, module["sources"]))
    subprocess.run(
        [*command, "-shared", "-pthread", "-o", target, *objects], cwd=folder, check=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
