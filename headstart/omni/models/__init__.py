"""The parts of Qwen2.5-Omni and Qwen3-Omni that pipeline stages run."""
