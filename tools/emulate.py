"""Runs the tests of the kernels over a library that watches itself, for whoever changes them.

    python tools/sanitize.py [arguments for pytest]

A copy of the sources is built with AddressSanitizer and UndefinedBehaviorSanitizer of GCC, and the
tests run in that copy; torch's and numpy's tensors are watched, too, as their memory comes from
`malloc`. The first access beyond one ends the run with its place in the C++. Loads and stores under
a mask are not seen: GCC leaves those instructions alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-O1", "-g", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
TESTS = (
    *("tests/native", "tests/attention", "tests/models/lora", "tests/engine/test_paths.py"),
    *(
        f"tests/models/test_{name}.py"
        for name in ("greedy_head", "packed", "plain", "fused", "swap", "nonfinite")
    ),
)


def main(arguments: list[str]) -> int:
    """Copy, build, test; pytest's exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("headstart", "tests", "bench"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        build(folder)
        # libstdc++ too, or the sanitizer ends the run at the first exception that torch throws.
        preloaded = [find_library(name) for name in ("libasan.so", "libstdc++.so.6")]
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "LD_PRELOAD": " ".join(preloaded),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are many
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "2",
        }
        command = [sys.executable, "-m", "pytest", "--capture=sys", *(arguments or TESTS)]
        return subprocess.run(command, cwd=folder, env=environment).returncode


def find_library(name: str) -> str:
    """Where the compiler has one of its own libraries."""
    command = [COMPILER, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path) -> None:
    """The library of the sources in `folder`, beside them."""
    settings = tomllib.loads((folder / "pyproject.toml").read_text())
    [module] = settings["tool"]["setuptools"]["ext-modules"]
    for old in (folder / "headstart" / "native").glob("_kernels.*"):
        old.unlink()
    target = f"headstart/native/_kernels{EXTENSION_SUFFIXES[0]}"
    arguments = [*module["extra-compile-args"], *FLAGS, "-shared", "-pthread", "-o", target]
    subprocess.run([COMPILER, *arguments, *module["sources"]], cwd=folder, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
