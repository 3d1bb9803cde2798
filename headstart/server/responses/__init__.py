"""OpenAI's Responses API: items in, items out, and conversations that the server remembers."""
