"""Tiers: blocks stored outside the pool, on disk and on other machines. No torch."""

from headstart.tiers.worker import Job

__all__ = ["Job"]
