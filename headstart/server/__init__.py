"""The server: an OpenAI-compatible API over `AsyncLLM`, with the cache's work in every answer."""
