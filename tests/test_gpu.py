"""Models on a GPU, real or simulated: code on the CPU moves its tensors to the device."""

import subprocess
import sys
from pathlib import Path

IMAGES = "tests/engine/tiering/test_images.py"
INT8_KV = "tests/models/test_int8_kv.py::test_logits_are_those_of_rounded_rows"
# Layers with windows, sinks, experts and shared K/V, and two families in transformers' modules.
NAMES = ("llama", "gemma4_text", "gpt_oss", "qwen3_moe", "gpt2", "deepseek_v3")
TESTS = (
    f"{IMAGES}::test_a_prompt_with_a_stored_image_and_a_new_one",
    *(f"{INT8_KV}[{name}]" for name in NAMES),
    "tests/omni/test_small_voice.py",
)


def test_tests_without_a_cpu_requirement_pass_on_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.on_gpu", "-q", "-n0", *TESTS]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
