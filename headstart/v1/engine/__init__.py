"""vLLM's module paths under `vllm.v1.engine`."""
