"""Run the tests of the cache with the cache compiled by mypyc.

    python tools/compiled.py [arguments for pytest]

`setup.py` compiles a copy of the sources in build/compiled, and the tests run in that copy. Without
a C compiler and Python's headers, no tests run. The copy remains, for
`bench/manager/manager.py --compiled build/compiled`.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "compiled"
TESTS = (
    *("tests/cache", "tests/cluster", "tests/replay", "tests/tiers", "tests/engine/limits"),
    *(f"tests/engine/test_{name}.py" for name in ("engine", "failures", "scheduler")),
    *("tests/engine/tiering", "tests/omni/test_output_cache.py", "tests/omni/test_interrupted.py"),
    *("tests/server/cache", "tests/server/tenants", "tests/server/test_cache_api.py"),
)
DESELECTED = {
    "tests/server/test_cache_api.py::test_concurrent_requests_share_pool_queries": (
        "replaces a method"
    ),
    "tests/cluster/serving": "hardly uses the manager, and takes long",
}


def main(arguments: list[str]) -> int:
    """Copy, compile, test; return the exit status of the tests."""
    if not can_compile():
        print("headstart.cache is not compiled: there is no C compiler, or no Python.h")
        return 0
    compile_copy()
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
    deselected = (f"--deselect={test}" for test in DESELECTED)
    command = [sys.executable, "-m", "pytest", *deselected, *(arguments or TESTS)]
    return subprocess.run(command, cwd=FOLDER, env=environment).returncode


def can_compile() -> bool:
    """Return True if a C compiler and Python's headers are installed."""
    compiler = shutil.which((os.environ.get("CC") or "cc").split()[0])
    return compiler is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def compile_copy() -> None:
    """Copy the sources and compile the cache; unchanged modules are not compiled again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        if old.is_dir() and old.name != "build":
            shutil.rmtree(old)
        elif not old.is_dir():
            old.unlink()
    shutil.copytree(ROOT / "headstart", FOLDER / "headstart")
    shutil.copy2(ROOT / "setup.py", FOLDER)
    # pyproject.toml is copied only after the build, since it would also build the kernels.
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "HEADSTART_COMPILED_CACHE": "1"}
    build = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True)
    if build.returncode:
        sys.exit(f"{build.stdout}\n{build.stderr}\nheadstart.cache was not compiled: see above")
    for part in ("tests", "bench", "docs", "tools"):
        shutil.copytree(ROOT / part, FOLDER / part)
    for part in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / part, FOLDER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
