"""How matrices are stored, read from files and multiplied."""
