"""OpenAI's API: completions and chats, in its words for requests, answers and errors."""
