"""What importing torch and the rest does to Python's garbage collector."""

import subprocess
import sys

# Garbage: an object that holds itself.
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


def test_garbage_of_before_is_not_kept() -> None:
    """By the first import, nor by one that finds the module there."""
    run(
        f"{GARBAGE}from headstart.imports import load_module\n"
        "for name in ('wave', 'wave'):\n"
        "    found = garbage(); load_module(name); gc.collect()\n"
        "    assert found() is None\n"
    )
