"""`python -m podracer`, the command line."""

from podracer.cli.main import main

if __name__ == "__main__":
    main()
