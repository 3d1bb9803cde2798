"""LoRA adapters: PEFT's files read, and their matrices added row by row."""
