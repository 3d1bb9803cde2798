"""Model files, loading, checks, adapters, and modules that run over paged K/V."""
