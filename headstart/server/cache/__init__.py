"""The server's view of its cache: the pool, reasons of misses, and advice."""
