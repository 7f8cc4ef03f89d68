"""``python -m cupyflash``."""

import sys

from .commands.cli import main

if __name__ == "__main__":  # warm-up starts processes that import this file
    sys.exit(main())
