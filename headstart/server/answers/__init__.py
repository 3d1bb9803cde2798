"""What a model's text says: content, reasoning and calls of tools, read as the text comes."""
