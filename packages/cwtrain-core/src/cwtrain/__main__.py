"""``python -m cwtrain``: the command line."""

from __future__ import annotations

import sys

from cwtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
