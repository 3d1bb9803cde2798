"""Content, reasoning and calls of tools in a model's text, read as it arrives."""
