"""`python -m tierwise` is the command line."""

from tierwise.cli.main import main

if __name__ == "__main__":
    main()
