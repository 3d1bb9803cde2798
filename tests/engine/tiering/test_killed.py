"""Engines that are killed at random moments; `tools/kill_engine.py` kills hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.tiny_llm import save_smallest

ROOT = Path(__file__).parents[3]


def test_the_next_engine_answers_as_one_without_a_store(tmp_path: Path) -> None:
    model = save_smallest(tmp_path / "model")
    told = subprocess.run(
        [sys.executable, str(ROOT / "tools/kill_engine.py"), str(model), "--rounds", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    counts = json.loads(told.stdout.splitlines()[-1])
    assert counts["wrong"] == counts["failed"] == 0
    assert counts["cached tokens"] > 0, "nothing was kept"
