"""Entry point of `python -m locality`."""

import sys

from locality.cli import main

if __name__ == "__main__":
    sys.exit(main())
