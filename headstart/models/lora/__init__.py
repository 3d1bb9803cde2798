"""LoRA adapters: reading PEFT's files, and adding their matrices row by row."""
