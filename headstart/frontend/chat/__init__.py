"""Chats: from messages to prompts that begin with the tokens of earlier turns."""
