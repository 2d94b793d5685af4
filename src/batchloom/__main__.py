"""``python -m batchloom``."""

from batchloom.cli.main import main

if __name__ == "__main__":
    main()
