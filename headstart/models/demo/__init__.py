"""Small generated models for demos and tests; they need no download."""
