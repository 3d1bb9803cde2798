"""Compiles `headstart.cache` with mypyc for wheels that ask for it; the rest is in pyproject.toml.

    HEADSTART_COMPILED_CACHE=1 pip wheel --no-deps .

Such a wheel has the modules compiled and as sources, for tracebacks and `help`. Without the
variable nothing here changes anything, and mypy is not needed.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, OptionError

VARIABLE = "HEADSTART_COMPILED_CACHE"
CHOICES = {"": False, "0": False, "1": True}
EDITABLE = {"editable_wheel", "develop"}
COMPILER = "mypy[mypyc]>=2.4,<3"
CACHE = Path("headstart/cache")
INTERPRETED = {
    "__init__.py",  # names alone
    "config.py",  # its annotations are read at run time; compiled, they are all `object`
    "events.py",  # compiled dataclasses are neither copied nor pickled, nor made any faster
    "stats.py",  # as events.py
    "shares.py",  # refuses weights of any type with an error of its own
}


def is_asked() -> bool:
    """Whether the cache is to be compiled."""
    value = os.environ.get(VARIABLE, "")
    if value not in CHOICES:
        raise OptionError(f"{VARIABLE} is {value!r}; allowed: 1 to compile headstart.cache, or 0")
    return CHOICES[value]


def compiled_cache() -> list[Extension]:
    """The extensions that stand in for the cache's modules, all in one library."""
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        needed = f"{VARIABLE}=1 needs mypyc: pip install '{COMPILER}', or build with isolation"
        raise ExecError(needed) from error

    modules = sorted(map(str, CACHE.rglob("*.py")))
    return mypycify(
        # Of other modules no type is known: what comes from there is taken as it is.
        [
            *("--config-file=", f"--cache-dir={os.devnull}", "--follow-imports=skip"),
            "headstart/mypyc_hints.py",
            *modules,
        ],
        only_compile_paths=[name for name in modules if Path(name).name not in INTERPRETED],
        group_name="headstart.cache.compiled",
        target_dir="build/mypyc",
        debug_level="0",
    )


class BuildExtensions(build_ext):
    """Builds the kernels, and the cache if it is asked for."""

    def finalize_options(self) -> None:
        if is_asked():
            if not EDITABLE.isdisjoint(self.distribution.commands):
                raise OptionError(f"{VARIABLE}=1 is for wheels: an editable one is interpreted")
            kernels = self.distribution.ext_modules or []
            self.distribution.ext_modules = [*kernels, *compiled_cache()]
        super().finalize_options()

    def build_extensions(self) -> None:
        """Compile several sources of an extension at the same time."""
        compile_sources = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                results = pool.map(lambda source: compile_sources([source], **options), sources)
                return [path for paths in results for path in paths]

        self.compiler.compile = compile_each
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildExtensions},
    setup_requires=[COMPILER] if is_asked() else [],
)
