"""vLLM's names of modules: a program that imports from `vllm.v1` finds them here."""
