"""`python -m headstart` is the command `headstart`; Ctrl-C ends it while it still imports."""

import sys

from headstart.imports import load_module


def main() -> None:
    """Run the command line."""
    try:
        run = load_module("headstart.cli.main").main
    except KeyboardInterrupt:
        sys.exit(130)
    run(prog_name="headstart")


if __name__ == "__main__":
    main()
