"""Some faults of every kind; `tools/inject_faults.py` injects as many as there is time for."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_faults_cost_blocks_at_the_most() -> None:
    tool = [sys.executable, str(ROOT / "tools/inject_faults.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [*tool, "--faults", "80"], env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    counts = json.loads(told.stdout.splitlines()[-1])
    assert counts["faults"] == 80
    assert counts["wrong"] == counts["problems"] == 0
    assert counts["lost"] > 0, "no fault did anything"
