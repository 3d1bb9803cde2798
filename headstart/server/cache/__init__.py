"""The server's view of its cache: the pool, reasons for misses, and advice."""
