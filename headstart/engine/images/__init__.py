"""Images in prompts: read, compared, encoded, and scheduled as far as there is room."""
