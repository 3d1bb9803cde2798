"""The command `headstart`, also as `python -m headstart`. Ctrl-C works during the imports too."""

import sys

from headstart.imports import load_module


def main() -> None:
    """Run the command line."""
    try:
        run = load_module("headstart.cli.main").main
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headstart"):
            raise
        # Installed with --no-deps, for example to use `headstart.cache` alone.
        print(
            f"the command headstart needs {error.name}, which is not installed; run pip install . "
            "in the folder of the clone",
            file=sys.stderr,
        )
        sys.exit(2)
    run(prog_name="headstart")


if __name__ == "__main__":
    main()
