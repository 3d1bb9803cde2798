"""The installed package can be imported from every folder."""

import os
import subprocess
import sys
from pathlib import Path

from tests.house.source import ROOT


def test_a_clone_in_the_current_folder_does_not_hide_the_package(tmp_path: Path) -> None:
    """Regression: `from headstart import LLM` next to a clone failed with "unknown location".

    The clone's folder has no __init__.py, so it counts as a namespace package.
    """
    (tmp_path / "headstart").symlink_to(ROOT)
    program = "import headstart; from headstart import LLM; print(headstart.__file__)"
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=usual, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("__init__.py")
