"""Faults for cache folders, by what fails: files, processes, the machine."""
