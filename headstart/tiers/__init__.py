"""Tiers: blocks stored outside the pool, on disk and on other machines. No torch."""
