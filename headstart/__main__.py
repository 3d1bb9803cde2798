"""`python -m headstart` is the command `headstart`."""

from headstart.cli.main import main

if __name__ == "__main__":
    main(prog_name="headstart")
