"""Images in prompts: reading, decoding, comparing and placing them."""
