"""Small generated models that need no download, for the demos, the tests and the benchmarks."""

import headstart  # noqa: F401 - before torch, whose threads read how long to spin when it is loaded
