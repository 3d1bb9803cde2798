"""Views of a server: its health, metrics, a log line per request, recent prompts."""
