"""The server: an OpenAI-compatible API over `AsyncLLM`. Answers report cached tokens."""
