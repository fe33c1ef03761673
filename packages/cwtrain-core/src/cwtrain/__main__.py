"""The command line's front door, for ``cwtrain`` and for ``python -m cwtrain``.

What costs time is imported inside, so that a Ctrl-C during the imports ends as one at any later moment does.
"""

from __future__ import annotations

import sys

from cwtrain._streams import UnfailingStderr, open_closed_streams, settle_streams

__all__ = ["run"]


def run() -> int:
    """Run the command line with ``sys.argv`` and return its exit code."""
    open_closed_streams()
    try:
        with UnfailingStderr():
            try:
                from cwtrain.cli import main

                return main()
            except KeyboardInterrupt:  # before ``main`` could see it, or while it ended
                sys.stderr.write("\ninterrupted\n")  # on a line of its own: the terminal has shown ^C
                return 130
    finally:
        settle_streams()


if __name__ == "__main__":
    sys.exit(run())
