"""The server of a model that speaks: OpenAI's chats, with sounds and images in, and speech out."""
