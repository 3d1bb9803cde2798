"""What is seen of a server: its health, metrics, a line for each request, the prompts of late."""
