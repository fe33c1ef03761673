"""Run a command that dies with the process that asked for it: python bound_child.py PARENT_PID COMMAND [ARGUMENT ...]

A test run that is killed cannot stop the servers it started. Linux kills them for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the parent is gone")
    os.execvp(command[0], command)
