"""Small generated models for the demos, the tests and the benchmarks."""

import headstart  # noqa: F401 - before torch, to set how long its threads spin
