"""Engines that are killed at random moments, and engines over damaged folders.

`tools/kill_engine.py` and `tools/damage_engine.py` do so hundreds of times.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.tiny_llm import save_smallest
from tests.tiny_adapters import make_adapter
from tests.tiny_vision import save_tiny_vision

ROOT = Path(__file__).parents[3]


def run(tool: str, *arguments: str | Path) -> dict[str, int]:
    """Run a tool; return its final counts."""
    process = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    counts: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    assert counts["wrong"] == counts["failed"] == 0
    return counts


def test_the_next_engine_answers_as_without_a_store(tmp_path: Path) -> None:
    counts = run("kill_engine.py", save_smallest(tmp_path / "model"), "--rounds", "3")
    assert counts["cached tokens"] > 0, "no block was stored"


def test_damage_to_adapters_causes_no_wrong_answer(tmp_path: Path) -> None:
    model = save_smallest(tmp_path / "model")
    adapters = [make_adapter(model, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    adapter_options = [part for adapter in adapters for part in ("--adapter", adapter)]
    counts = run("damage_engine.py", model, *adapter_options, "--faults", "9")
    assert counts["faults"] == 9 and counts["loaded tokens"] > 0


def test_damage_to_images_causes_no_wrong_answer(tmp_path: Path) -> None:
    model = save_tiny_vision("qwen2_vl", tmp_path / "model")
    counts = run("damage_engine.py", model, "--images", "--faults", "9")
    assert counts["faults"] == 9 and counts["loaded tokens"] > 0
