"""Some faults of every kind; `tools/inject_faults.py` injects more for as long as it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_faults_lose_at_most_blocks() -> None:
    tool = [sys.executable, str(ROOT / "tools/inject_faults.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [*tool, "--faults", "80"], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout.splitlines()[-1])
    assert counts["faults"] == 80
    assert counts["wrong"] == counts["problems"] == 0
    assert counts["lost"] > 0, "no fault did anything"
