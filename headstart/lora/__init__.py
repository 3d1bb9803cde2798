"""The names of `vllm.lora`."""
