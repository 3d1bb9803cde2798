"""Image embeddings: the encoder cache, and what a step may encode."""
