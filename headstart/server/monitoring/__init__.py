"""Metrics, recent requests, log lines and traces."""
