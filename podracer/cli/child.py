"""`python -m podracer.cli.child`: the command line, for a process with which it saves and ends."""

from podracer.io.processes import stop_with_parent

if __name__ == "__main__":
    stop_with_parent()  # before what is slow to import
    from podracer.cli.main import main

    main()
