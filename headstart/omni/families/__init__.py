"""The stages of each family of speaking models, and their prompts."""
