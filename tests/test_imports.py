"""Effects of imports on Python's garbage collector, and missing packages."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import headstart
from headstart.imports import install

# Garbage: an object that refers to itself.
GARBAGE = (
    "import gc, weakref\n"
    "class Ring: pass\n"
    "def garbage():\n"
    "    ring = Ring(); ring.ring = ring\n"
    "    return weakref.ref(ring)\n"
)


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_leaves_the_garbage_collector_as_it_was() -> None:
    run(
        "import gc, headstart\n"
        "headstart.SamplingParams; assert gc.isenabled() and gc.get_freeze_count()\n"
        "gc.disable(); headstart.HeadstartError; assert not gc.isenabled()\n"
    )


def test_earlier_garbage_is_still_collected() -> None:
    """Neither the first import nor a later one freezes it."""
    run(
        f"{GARBAGE}from headstart.imports import load_module\n"
        "for name in ('wave', 'wave'):\n"
        "    found = garbage(); load_module(name); gc.collect()\n"
        "    assert found() is None\n"
    )


def test_importing_does_not_keep_locals_of_its_callers(tmp_path: Path) -> None:
    """Regression: frames of torch.fx refer to themselves, so the first engine was never freed."""
    module = "import inspect\ndef hold():\n    own = inspect.currentframe()\nhold()\n"
    Path(tmp_path, "holds_itself.py").write_text(module)
    run(
        "import sys, weakref\n"
        "from headstart.imports import load_module\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "class Held: pass\n"
        "def load():\n"
        "    held = Held(); load_module('holds_itself')\n"
        "    return weakref.ref(held)\n"
        "assert load()() is None\n"
    )


def test_warnings_of_optional_packages_are_hidden(tmp_path: Path) -> None:
    """Regression: torchao, which transformers imports, warned at every start."""
    module = (
        "import logging\n"
        "logging.getLogger('torchao').warning('Failed to load')\n"
        "logging.getLogger('torchao.kernel').warning('Failed to load')\n"
        "logging.getLogger('other').warning('of another')\n"
    )
    Path(tmp_path, "warns.py").write_text(module)
    program = (
        "import logging, sys\n"
        "from headstart.imports import load_module\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "load_module('warns')\n"
        "logging.getLogger('torchao').warning('later')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "of another\nlater\n"


def test_errors_of_missing_packages_name_the_clone() -> None:
    """Regression: errors named a package on PyPI, which is missing or of another project."""
    assert install("serve") == 'pip install ".[serve]" in the folder of the clone'
    root = Path(headstart.__file__).parent
    sources = [file.read_text(encoding="utf-8") for file in root.rglob("*.py")]
    named = {extra for text in sources for extra in re.findall(r"""\binstall\(['"](\w+)""", text)}
    project = tomllib.loads((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"vision", "gguf", "otel"} <= named <= project["project"]["optional-dependencies"].keys()
    assert not [text for text in sources if re.search(r"pip install ['\"]headstart", text)]


def test_commands_without_their_packages_are_refused() -> None:
    """Regression: `headstart` after `pip install --no-deps` ended with a traceback."""
    program = "import sys; sys.modules['click'] = None\nfrom headstart.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "the command headstart needs click, which is not installed; run pip install . in the "
        "folder of the clone\n"
    )
    ours = program.replace("click", "headstart.cli.main")  # a missing module of ours
    done = subprocess.run([sys.executable, "-c", ours], capture_output=True, text=True)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
