"""Anthropic's API: messages, in its words for requests, answers and events."""
