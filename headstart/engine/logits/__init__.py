"""What changes logits before a token is chosen: one protocol, and its kinds."""
