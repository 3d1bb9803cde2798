"""The command line: `headstart demo`, `run` and `chat`."""
