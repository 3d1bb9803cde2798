"""vLLM's names: which of them work here, which need nothing done, and which are refused and why."""
