"""Storage of matrices: formats, reading from files, products."""
