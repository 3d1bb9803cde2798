"""Checkpoints whose weights were quantised before: AWQ, GPTQ, compressed-tensors, torchao."""
