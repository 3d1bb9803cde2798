"""Models of transformers, loaded and checked for paged K/V."""
