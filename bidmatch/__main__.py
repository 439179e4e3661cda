"""Lets `python -m bidmatch` do what the `bidmatch` command does."""

from bidmatch.cli import main

if __name__ == "__main__":
    main()
