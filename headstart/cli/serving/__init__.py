"""`headstart serve`: a server, and the flags of `vllm serve`."""
