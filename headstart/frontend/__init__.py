"""Text in, text out: prompts, chats, images, answers, and the public Python API."""
