"""``python -m dshard``: the same as the console command ``dshard``."""

import sys

from dshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
