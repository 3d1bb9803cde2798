"""Images in prompts: files and URLs read, decoded, compared and placed in a prompt."""
