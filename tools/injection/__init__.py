"""Faults of cache folders: of files, processes and the machine."""
