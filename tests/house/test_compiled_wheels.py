"""Wheels contain a compiled `headstart.cache` only on request."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

ASK = """
import sys
from setuptools import build_meta
print("needs", build_meta.get_requires_for_build_wheel())
"""
EXTENSIONS = """
from setuptools import distutils
from distutils.core import run_setup
made = run_setup("setup.py", ["build_ext"], stop_after="commandline")
command = made.get_command_obj("build_ext")
command.ensure_finalized()
print("extensions", len(command.extensions))
"""
NO_MYPYC = "import sys; sys.modules['mypyc'] = None\n"
EDITABLE = """
from setuptools import build_meta
build_meta.build_editable(".")
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the files that a build reads first."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for part in ("__init__.py", "version.py", "mypyc_hints.py", "cache"):
        source, target = ROOT / "headstart" / part, tmp_path / "headstart" / part
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return tmp_path


def run(program: str, sources: Path, compiled: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.pop("HEADSTART_COMPILED_CACHE", None)
    if compiled is not None:
        environment["HEADSTART_COMPILED_CACHE"] = compiled
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("compiled", "needs"), [(None, False), ("0", False), ("1", True)])
def test_mypyc_is_a_build_requirement_only_if_it_is_used(
    sources: Path, compiled: str | None, needs: bool
) -> None:
    done = run(ASK, sources, compiled)
    assert done.returncode == 0, done.stderr
    [requirements] = [line for line in done.stdout.splitlines() if line.startswith("needs ")]
    assert ("mypyc" in requirements) == needs


def test_a_default_build_has_only_the_kernels_and_needs_no_mypyc(sources: Path) -> None:
    done = run(NO_MYPYC + EXTENSIONS, sources, None)
    assert done.stdout.splitlines()[-1:] == ["extensions 1"], done.stderr


@pytest.mark.parametrize(
    ("program", "compiled", "message"),
    [
        (ASK, "yes", "HEADSTART_COMPILED_CACHE is 'yes'; allowed: 1 to compile"),
        (NO_MYPYC + EXTENSIONS, "1", "HEADSTART_COMPILED_CACHE=1 needs mypyc: pip install"),
        (EDITABLE, "1", "an editable one is interpreted"),
    ],
)
def test_an_unsupported_compiled_build_is_refused(
    sources: Path, program: str, compiled: str, message: str
) -> None:
    done = run(program, sources, compiled)
    assert done.returncode
    assert message in done.stderr + done.stdout
