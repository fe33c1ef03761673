"""The command line's front door, for ``cwtrain`` and for ``python -m cwtrain``.

What costs time is imported inside, so that a Ctrl-C during the imports ends as one at any later moment does.
"""

from __future__ import annotations

import os
import sys
import threading

from cwtrain._streams import UnfailingStderr, open_closed_streams, settle_streams

__all__ = ["run"]


def run() -> int:
    """Run the command line with ``sys.argv`` and return its exit code."""
    open_closed_streams()
    try:
        with UnfailingStderr():
            try:
                from cwtrain.cli import main

                code = main()
            except KeyboardInterrupt:  # before ``main`` could see it, or while it ended
                sys.stderr.write("\ninterrupted\n")  # on a line of its own: the terminal has shown ^C
                code = 130
    finally:
        settle_streams()
    if code in (130, 143) and _others():
        os._exit(code)  # Python would wait for threads that wait for an answer; everything else was cleaned up
    return code


def _others() -> bool:
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


if __name__ == "__main__":
    sys.exit(run())
