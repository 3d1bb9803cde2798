"""vLLM's names of modules."""
