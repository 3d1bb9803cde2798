"""What the server tells of its cache: the pool, why prompts missed, what would have helped."""
