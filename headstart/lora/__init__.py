"""vLLM's module paths under `vllm.lora`."""
