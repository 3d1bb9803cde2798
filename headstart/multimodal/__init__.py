"""vLLM's module paths under `vllm.multimodal`."""
