"""The parts of Qwen2.5-Omni and Qwen3-Omni that the stages of a pipeline run."""
