"""Models on a GPU, or on a simulated one: what runs on the CPU brings its tensors to the device."""

import subprocess
import sys
from pathlib import Path

IMAGES = "tests/engine/tiering/test_images.py"
TESTS = (
    f"{IMAGES}::test_a_stored_image_and_a_new_one_stand_in_one_prompt",
    "tests/models/test_int8_kv.py",
    "tests/omni/test_small_voice.py",
)


def test_what_needs_no_cpu_runs_on_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.on_gpu", "-q", "-n0", *TESTS]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
