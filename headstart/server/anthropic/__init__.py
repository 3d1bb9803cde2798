"""Anthropic's Messages API: its requests, answers and events."""
