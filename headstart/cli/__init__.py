"""The command line: `headstart demo`, `run`, `chat` and `models`."""
