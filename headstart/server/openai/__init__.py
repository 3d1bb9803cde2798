"""OpenAI's completions and chat completions: their requests, answers and errors."""
