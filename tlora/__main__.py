"""`python -m tlora`, for launchers that start modules."""

from tlora.cli.main import main

if __name__ == "__main__":
    main()
