"""A Qwen2.5-Omni of 400,000 parameters, with the real classes and random weights."""

from pathlib import Path

from examples.small_models.omni import IDS, OmniSizes, write_omni
from tests.tiny_models import write_once

AUDIO, IMAGE = IDS["<|AUDIO|>"], IDS["<|IMAGE|>"]
AUDIO_START, AUDIO_END = IDS["<|audio_bos|>"], IDS["<|audio_eos|>"]
VISION_START, VISION_END = IDS["<|vision_bos|>"], IDS["<|vision_eos|>"]
# The weights are large enough that attention changes the result.
TINY = OmniSizes(64, 3, 48, 2, 4, scale=6, readable=False)


def save_qwen25(folder: Path) -> Path:
    """Write the model with two voices as a checkpoint folder."""
    return write_once(_save, folder)


def _save(folder: Path) -> None:
    write_omni(folder, TINY)
