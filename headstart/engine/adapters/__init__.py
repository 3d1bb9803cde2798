"""LoRA adapters: how a request names one, and which of them are in memory."""
